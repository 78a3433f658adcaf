"""Importance of parameters on functions whose answers are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)

from elastune.tuning.search.importance import FEWEST, EvaluatedTrial, Importance, importance
from elastune.tuning.search.objective import Objective

LOSS = [Objective("loss", "min")]
UNIT: dict[str, BaseDistribution] = {name: FloatDistribution(0, 1) for name in "abcd"}


def tried(f: Callable[..., float], space: dict[str, BaseDistribution], n: int, seed: int = 0) -> list[EvaluatedTrial]:
    """Random configurations and what ``f`` makes of them."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    results = []
    for _ in range(n):
        params = study.ask(space).params
        results.append(
            EvaluatedTrial(params, {k: distribution_to_json(d) for k, d in space.items()}, {"loss": f(**params)})
        )
    return results


def one(trials: list[EvaluatedTrial]) -> Importance:
    (result,) = importance(trials, LOSS)
    return result


def shares(found: Importance) -> dict[str, float]:
    return {each.name: each.share for each in found.parameters}


def test_a_sum_is_decided_by_its_steepest_term() -> None:
    result = one(tried(lambda a, b, c, d: 3 * a + b, UNIT, 80))
    assert [each.name for each in result.parameters[:2]] == ["a", "b"]
    share = shares(result)
    assert share["a"] == pytest.approx(0.9, abs=0.07), "9 to 1, the squares of the slopes"
    assert share["b"] == pytest.approx(0.1, abs=0.07)
    assert max(share["c"], share["d"]) < 0.03
    assert sum(share.values()) == pytest.approx(1.0)
    assert (result.trials, result.why_not) == (80, "")


def test_the_best_are_the_highest_where_more_is_better() -> None:
    """Only how high ``a`` is separates the best; below, the loss hangs on ``b``."""
    trials = tried(lambda a, b, c, d: 10.0 + a if a > 0.7 else b, UNIT, 120)
    (most,) = importance(trials, [Objective("loss", "max")])
    (least,) = importance(trials, LOSS)
    assert most.parameters[0].name == "a"
    assert least.parameters[0].name == "b"


def test_a_rate_counts_on_its_own_scale() -> None:
    space = {"lr": FloatDistribution(1e-5, 1, log=True), "layers": IntDistribution(1, 4)}
    share = shares(one(tried(lambda lr, layers: math.log10(lr) + 0.4 * layers, space, 80)))
    assert share["lr"] == pytest.approx(0.914, abs=0.1), "variances 25/12 and .16 x 15/12"


def test_parameters_of_some_trials_alone_count_and_so_do_system_parameters() -> None:
    """Momentum of SGD alone decides much; workers decide nothing of the loss."""
    space: dict[str, BaseDistribution] = {
        "optimizer": CategoricalDistribution(["sgd", "adam"]),
        "momentum": FloatDistribution(0, 1),
        "beta": FloatDistribution(0, 1),
        "workers": IntDistribution(1, 8),
    }

    def loss(optimizer: str, momentum: float, beta: float, workers: int) -> float:
        return 2 * momentum if optimizer == "sgd" else 1.0

    trials = []
    for each in tried(loss, space, 120):
        gone = "beta" if each.params["optimizer"] == "sgd" else "momentum"
        kept: dict[str, Any] = {name: value for name, value in each.params.items() if name != gone}
        trials.append(EvaluatedTrial(kept, {name: each.distributions[name] for name in kept}, each.values))
    result = one(trials)
    share = shares(result)
    assert set(share) == set(space)
    assert share["momentum"] > 0.5 > 10 * max(share["beta"], share["workers"])
    counts = {each.name: each.trials for each in result.parameters}
    assert counts["momentum"] + counts["beta"] == counts["optimizer"] == 120


def test_ranges_that_grew_are_one() -> None:
    small = tried(lambda a, b: a, {"a": FloatDistribution(0, 0.5), "b": FloatDistribution(0, 1)}, 20)
    large = tried(lambda a, b: a, {"a": FloatDistribution(0, 1), "b": FloatDistribution(0, 1)}, 20, seed=1)
    assert shares(one(small + large))["a"] > 0.9


@pytest.mark.parametrize(
    ("trials", "why"),
    [
        (tried(lambda a, b, c, d: a, UNIT, FEWEST - 1), "9 trials are too few for 4 parameters, 10 are needed"),
        (tried(lambda **_: 1.0, {f"p{i}": FloatDistribution(0, 1) for i in range(8)}, 15), "16 are needed"),
        (tried(lambda a, b, c, d: 1.0, UNIT, 20), "all trials reached the same"),
        (tried(lambda a, b, c, d: math.nan, UNIT, 20), "no trial has a value"),
        (tried(lambda a: 1.0, {"a": IntDistribution(3, 3)}, 20), "no parameter was searched"),
        ([], "no trial has a value"),
    ],
)
def test_where_nothing_can_be_said_it_says_so(trials: list[EvaluatedTrial], why: str) -> None:
    result = one(trials)
    assert why in result.why_not
    assert not result.parameters


def test_noise_is_decided_by_nothing() -> None:
    """Of twenty sequences of noise about one looks like a cause."""
    silent = 0
    for seed in range(20):
        draw = np.random.default_rng(seed)
        result = one(tried(lambda a, b, c, d, draw=draw: float(draw.normal()), UNIT, 40, seed))
        silent += "do not predict it" in result.why_not
    assert silent >= 17


def test_each_objective_has_its_own_and_the_same_trials_say_the_same() -> None:
    trials = [
        EvaluatedTrial(t.params, t.distributions, {"loss": t.params["a"], "seconds": t.params["b"]})
        for t in tried(lambda a, b, c, d: a, UNIT, 40)
    ]
    objectives = [*LOSS, Objective("seconds", "min")]
    result = importance(trials, objectives)
    assert [(each.objective, each.parameters[0].name) for each in result] == [("loss", "a"), ("seconds", "b")]
    assert importance(trials, objectives) == result
