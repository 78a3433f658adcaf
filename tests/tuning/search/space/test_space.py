import math

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from elastune.core.errors import UserError
from elastune.train.program import space as spaces


def conditional(trial):
    kind = trial.suggest_categorical("kind", ["sgd", "adam"])
    results = {"kind": kind, "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}
    if kind == "sgd":
        results["momentum"] = trial.suggest_float("momentum", 0.0, 0.9, step=0.3)
    results["widths"] = [trial.suggest_int("width", 8, 128, log=True)] * 2
    return results


def test_probe_is_seeded_and_sees_the_conditions():
    samples = spaces.probe(conditional, 60, seed=3)
    assert samples == spaces.probe(conditional, 60, seed=3)
    assert samples != spaces.probe(conditional, 60, seed=4)
    for sample in samples:
        assert ("momentum" in sample.values) == (sample.params["kind"] == "sgd")
        assert sample.distributions.keys() == sample.params.keys()
        assert 1e-4 <= sample.values["lr"] <= 1e-1
        assert sample.values["widths"] == [sample.params["width"]] * 2
    assert {round(s.values["momentum"], 6) for s in samples if "momentum" in s.values} == {0.0, 0.3, 0.6, 0.9}


@pytest.mark.parametrize(
    "distribution",
    [
        IntDistribution(3, 15, step=4),
        IntDistribution(1, 100, log=True),
        IntDistribution(5, 5),
        FloatDistribution(-1.0, 2.0),
        FloatDistribution(1e-5, 1e-1, log=True),
        FloatDistribution(0.0, 1.0, step=0.1),
        FloatDistribution(2.0, 2.0),
        CategoricalDistribution(["a", None, 3, True]),
    ],
)
def test_draws_lie_in_the_distribution(distribution):
    rng = np.random.default_rng(0)
    drawn = [spaces.draw(distribution, rng) for _ in range(300)]
    assert all(distribution._contains(distribution.to_internal_repr(value)) for value in drawn)
    count = spaces.size(distribution)
    if count < 20:
        assert len(set(drawn)) == count
    if getattr(distribution, "log", False):
        below = sum(v < math.sqrt(distribution.low * distribution.high) for v in drawn)
        assert 100 < below < 200


def test_enumeration_visits_every_branch_once():
    def space(trial):
        a = trial.suggest_int("a", 0, 2)
        results = {"a": a, "same": trial.suggest_int("a", 0, 2), "b": trial.suggest_categorical("b", ["x", "y"])}
        if a == 1:
            results["c"] = trial.suggest_float("c", 0.0, 0.5, step=0.25)
        return results

    every = spaces.enumerate_all(space, 100)
    assert len(every) == 2 + 2 * 3 + 2
    assert len({tuple(sample.params.items()) for sample in every}) == len(every)
    assert spaces.enumerate_all(space, 10) == every
    assert spaces.enumerate_all(space, 9) is None
    assert spaces.enumerate_all(conditional, 10**6) is None
    assert len(spaces.enumerate_all(lambda trial: {"fixed": 1}, 5)) == 1


def raising(trial):
    trial.suggest_int("a", 0, 1)
    return {"a": 1 / 0}


def through_optuna(trial):
    return {"a": trial.suggest_float("a", 2.0, 1.0)}


@pytest.mark.parametrize(
    ("space", "rule", "value"),
    [
        (raising, "must not raise", f"test_space.py:{raising.__code__.co_firstlineno + 2}"),
        (through_optuna, "must not raise", f"test_space.py:{through_optuna.__code__.co_firstlineno + 1}"),
        (lambda trial: None, "must return a dict", "None"),
        (lambda trial: [1], "must return a dict", "[1]"),
        (lambda trial: {1: 2}, "must return a dict", "{1: 2}"),
        (lambda trial: {"a": object()}, "plain values", "object"),
        (lambda trial: {"a": math.nan}, "plain values", ""),
        (lambda trial: {"a": np.int64(3)}, "plain values", "int64"),
        (lambda trial: trial.nonsense(), "must not raise", "AttributeError"),
    ],
)
def test_a_broken_space_is_a_user_error(space, rule, value):
    with pytest.raises(UserError, match=rule) as caught:
        spaces.probe(space, 1, seed=0)
    assert value in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_user_error_in_the_space_passes_through():
    def space(trial):
        raise UserError("rule", "value", "fix")

    with pytest.raises(UserError, match="rule .got value."):
        spaces.probe(space, 1, seed=0)


def test_call_works_on_a_study_trial():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    trial = study.ask()
    values = spaces.call(conditional, trial)
    assert values["lr"] == trial.params["lr"]


def test_distributions_survive_json():
    sample = spaces.probe(conditional, 1, seed=1)[0]
    texts = spaces.to_json(sample.distributions)
    assert spaces.from_json(texts) == sample.distributions
    assert list(spaces.from_json(texts)) == list(sample.distributions)
    for broken in ["", "{}", '{"name": "IntDistribution"}', "[]"]:
        with pytest.raises(UserError, match="Optuna's"):
            spaces.from_json({"a": broken})
