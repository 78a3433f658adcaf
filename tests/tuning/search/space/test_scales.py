"""Objectives on the scale that suits them: chosen from values alone, ranks kept, samplers told nothing impossible."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from elastune.core.journal.records import TrialFinished
from elastune.train.program.space import probe
from elastune.tuning.search.front import RAW, on_scales, scale_of
from elastune.tuning.search.history import History, Outcome
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.registry import make_sampler
from elastune.tuning.search.suggester import Suggester

TWO = parse_objectives({"error": "min", "seconds": "min"})
EVEN = [0.1 * at for at in range(12)]
DECADES = [10.0 ** (at / 4) for at in range(12)]


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-4, 1.0, log=True), "width": trial.suggest_int("width", 1, 64)}


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (EVEN, "raw"),
        ([-value for value in EVEN], "raw"),
        (DECADES, "log"),
        (DECADES[:7], "raw"),  # too few to say
        ([0.5] * 20, "raw"),
        ([1e-300] * 20 + [1e300], "rank"),
        ([-value for value in DECADES], "raw"),
        ([0.0, *DECADES], "raw"),
        ([0.9 + 0.001 * at for at in range(30)] + [0.1], "rank"),  # one broken training among good ones
        ([0.3 + 0.001 * at for at in range(30)] + [1e6], "rank"),  # one that nearly diverged: logs do not help
        ([0.0] * 30 + [1e6], "rank"),
    ],
)
def test_the_shape_of_the_values_decides(values: list[float], name: str) -> None:
    scale = scale_of(values)
    assert scale.name == name
    assert scale == scale_of(random.Random(1).sample(values, len(values)))
    scaled = [scale(value) for value in sorted(values)]
    assert all(math.isfinite(value) for value in scaled)
    assert all(a < b for (a, b), (x, y) in zip(_pairs(scaled), _pairs(sorted(values)), strict=True) if x < y)


def _pairs(row: list[float]) -> list[tuple[float, float]]:
    return list(itertools.pairwise(row))


def told(history: History) -> list[list[float]]:
    return [list(trial.values) for trial in history.frozen() if trial.values]


def test_samplers_are_told_the_scaled_values_and_all_anew_when_the_scale_changes() -> None:
    history = History(TWO, [], penalise=False, reenact=False, scaled=True)
    for sample, seconds in zip(probe(space, 12, 0), DECADES, strict=True):
        history.tell(history.add(sample, lambda: make_sampler("random", 0)), Outcome((0.5, seconds), {}, True))
    assert np.allclose([seconds for _, seconds in told(history)], np.log(DECADES))
    # a value that a logarithm cannot take, and a failure, which is told the worst
    nothing, failed = (history.add(sample, lambda: make_sampler("random", 0)) for sample in probe(space, 2, 1))
    history.tell(nothing, Outcome((0.5, 0.0), {}, True))
    history.tell(failed, Outcome(None, {}, False))
    assert scale_of([*DECADES, 0.0]) == RAW
    assert [seconds for _, seconds in told(history)] == [*DECADES, 0.0, max(DECADES)]


def test_other_samplers_are_told_the_values_themselves() -> None:
    history = History(TWO, [], penalise=False, reenact=False)
    for sample, seconds in zip(probe(space, 12, 0), DECADES, strict=True):
        history.tell(history.add(sample, lambda: make_sampler("random", 0)), Outcome((0.5, seconds), {}, True))
    assert [seconds for _, seconds in told(history)] == DECADES


def test_seconds_and_their_logarithms_are_searched_alike() -> None:
    """What a unit is, and whether a user already took logarithms, does not decide what is tried."""
    tried = []
    for shown in (math.exp, float):
        suggester = Suggester(space, TWO, sampler="gp", seed=1)
        for at in range(14):
            suggestion = suggester.ask()
            assert suggestion is not None
            if at < 12:  # the same history for both, of a shape that is not in doubt
                values = {"error": 0.1 * (at % 5), "seconds": shown(at / 2)}
                suggester.tell(suggestion.number, TrialFinished(suggestion.number, "complete", values=values))
            tried.append(suggestion.params)
    assert tried[12:14] == tried[26:28]


def test_columns_have_a_scale_each_whichever_way_they_are_turned() -> None:
    points = np.array([EVEN, DECADES, [-value for value in DECADES]]).T
    even, logs, negated = on_scales(points).T
    assert np.array_equal(even, EVEN)
    assert np.allclose(logs, np.log(DECADES))
    assert np.allclose(negated, -np.log(DECADES))
    assert on_scales(np.empty((0, 2))).shape == (0, 2)
