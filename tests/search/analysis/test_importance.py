"""Importance and interactions on functions whose answers are known."""

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

from elastune.search.analysis.importance import FEWEST, Importance, Tried, importance
from elastune.search.space.objective import Objective

LOSS = [Objective("loss", "min")]
UNIT: dict[str, BaseDistribution] = {name: FloatDistribution(0, 1) for name in "abcd"}


def tried(f: Callable[..., float], space: dict[str, BaseDistribution], n: int, seed: int = 0) -> list[Tried]:
    """Random configurations; what ``f`` does not ask for, by returning None of it, is left out by the caller."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    found = []
    for _ in range(n):
        params = study.ask(space).params
        found.append(Tried(params, {k: distribution_to_json(d) for k, d in space.items()}, {"loss": f(**params)}))
    return found


def one(trials: list[Tried]) -> Importance:
    (found,) = importance(trials, LOSS)
    return found


def totals(found: Importance) -> dict[str, float]:
    return {share.name: share.total for share in found.parameters}


def pairs(found: Importance) -> dict[frozenset[str], float]:
    return {frozenset((pair.first, pair.second)): pair.share for pair in found.pairs}


def test_a_sum_splits_by_variance_and_does_not_interact() -> None:
    found = one(tried(lambda a, b, c, d: 3 * a + b, UNIT, 80))
    assert [share.name for share in found.parameters[:2]] == ["a", "b"]
    alone = {share.name: share.alone for share in found.parameters}
    assert alone["a"] == pytest.approx(0.9, abs=0.07), "9 to 1, the squares of the slopes"
    assert alone["b"] == pytest.approx(0.1, abs=0.07)
    assert max(alone["c"], alone["d"]) < 0.02
    assert max(pairs(found).values()) < 0.02
    assert found.explained > 0.8
    assert found.trials == 80


def test_a_product_acts_only_together() -> None:
    found = one(tried(lambda a, b, c, d: (a - 0.5) * (b - 0.5), UNIT, 200))
    shares = pairs(found)
    assert shares.pop(frozenset("ab")) > 0.6
    assert max(shares.values()) < 0.05
    assert {share.name for share in found.parameters[:2]} == {"a", "b"}
    assert all(share.alone < 0.2 and share.total > 0.8 for share in found.parameters[:2])


def test_it_is_what_optunas_fanova_finds() -> None:
    trials = tried(lambda a, b, c, d: 3 * a + b + 4 * c * d, UNIT, 150)
    study = optuna.create_study()
    for each in trials:
        study.add_trial(optuna.create_trial(params=dict(each.params), distributions=UNIT, value=each.values["loss"]))
    evaluator = optuna.importance.FanovaImportanceEvaluator(n_trees=8, seed=0)
    theirs = evaluator.evaluate(study)
    found = one(trials)
    ours = {share.name: share.alone for share in found.parameters}
    assert ours == pytest.approx(theirs, abs=0.12)
    true = {"a": 9 / 12, "b": 1 / 12, "c": 4 / 12, "d": 4 / 12, "c and d together": 16 / 144}
    shares = {name: variance / sum(true.values()) for name, variance in true.items()}
    together = pairs(found)[frozenset("cd")]
    assert ours | {"c and d together": together} == pytest.approx(shares, abs=0.1)


def test_a_rate_counts_on_its_own_scale() -> None:
    space = {"lr": FloatDistribution(1e-5, 1, log=True), "layers": IntDistribution(1, 4)}
    found = one(tried(lambda lr, layers: math.log10(lr) + 0.4 * layers, space, 80))
    share = totals(found)
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
        trials.append(Tried(kept, {name: each.distributions[name] for name in kept}, each.values))
    found = one(trials)
    share = totals(found)
    assert set(share) == set(space)
    assert share["momentum"] > 0.5 > 10 * max(share["beta"], share["workers"])


def test_ranges_that_grew_are_one() -> None:
    small = tried(lambda a: a, {"a": FloatDistribution(0, 0.5)}, 20)
    large = tried(lambda a: a, {"a": FloatDistribution(0, 1)}, 20, seed=1)
    kinds = [
        Tried({"kind": kind}, {"kind": distribution_to_json(CategoricalDistribution(choices))}, {"loss": i + 0.0})
        for choices in (["x", "y"], ["y", "z"])
        for i, kind in enumerate(choices)
        for _ in range(5)
    ]
    assert totals(one(small + large))["a"] > 0.95
    assert totals(one(kinds))["kind"] > 0.95


def test_fewer_trials_are_less_sure() -> None:
    few, many = (one(tried(lambda a, b, c, d: 3 * a + 2 * b, UNIT, n)) for n in (20, 200))
    assert few.parameters[0].spread > 2 * many.parameters[0].spread > 0


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
def test_where_nothing_can_be_said_it_says_so(trials: list[Tried], why: str) -> None:
    found = one(trials)
    assert why in found.why_not
    assert not found.parameters
    assert not found.pairs


def test_noise_is_not_explained() -> None:
    draw = np.random.default_rng(3)
    found = one(tried(lambda a, b, c, d: float(draw.normal()), UNIT, 60))
    assert "do not predict it" in found.why_not
    assert found.explained <= 0


def test_each_objective_has_its_own_and_the_same_trials_say_the_same() -> None:
    trials = [
        Tried(t.params, t.distributions, {"loss": t.params["a"], "seconds": t.params["b"]})
        for t in tried(lambda a, b, c, d: a, UNIT, 40)
    ]
    objectives = [*LOSS, Objective("seconds", "min")]
    found = importance(trials, objectives)
    assert [(each.objective, each.parameters[0].name) for each in found] == [("loss", "a"), ("seconds", "b")]
    assert importance(trials, objectives) == found
