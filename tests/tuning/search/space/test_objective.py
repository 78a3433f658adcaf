import math

import numpy as np
import pytest

from elastune.core.errors import UserError
from elastune.tuning.search.objective import Objective, clock, oriented, parse_objectives, valued


def test_both_ways_of_writing_objectives():
    expected = (
        Objective("accuracy", "max", "fraction", 0.0, 1.0),
        Objective("seconds", "min", "s", 0.0),
        Objective("cost", "min", "price units", 0.0),
        Objective("loss", "min", "", 0.0),
    )
    assert parse_objectives({"accuracy": "max", "seconds": "min", "cost": "min", "loss": "min"}) == expected
    assert parse_objectives(["accuracy:max", "seconds : min", "cost:minimize", "loss:min"]) == expected
    assert parse_objectives("accuracy:max") == expected[:1]


@pytest.mark.parametrize(
    ("name", "kind", "unit"),
    [
        ("seconds", "total", "s"),
        ("cost", "total", "price units"),
        ("time", "total", "s"),
        ("latency_s", "duration", "s"),
        ("step_seconds", "duration", "s"),
        ("time_to_target_s", "duration", "s"),
        ("accuracy", None, "fraction"),
        ("times", None, ""),
        ("error_cost", None, ""),
    ],
)
def test_one_place_says_what_is_a_time(name, kind, unit):
    (objective,) = parse_objectives({name: "min"})
    assert objective.clock == clock(name) == kind
    assert objective.unit == unit


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, "at least one"),
        ([], "at least one"),
        ({"accuracy": "up"}, "direction of accuracy"),
        ({"accuracy": 1}, "direction of accuracy"),
        (["accuracy"], "NAME:max"),
        (["a:b:c"], "NAME:max"),
        ([3], "NAME:max"),
        ([":max"], "name a metric"),
        (["loss:min", "loss:max"], "once"),
    ],
)
def test_broken_objectives_are_user_errors(given, rule):
    with pytest.raises(UserError, match=rule):
        parse_objectives(given)


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({"score": "max 0..100"}, (0.0, 100.0)),
        ({"accuracy": "max 0..100"}, (0.0, 100.0)),
        ({"loss": "min -1.5.."}, (-1.5, math.inf)),
        ({"elbo": "max ..0"}, (-math.inf, 0.0)),
        ("score:max 0..1e2", (0.0, 100.0)),
        ({"val_accuracy": "max"}, (0.0, 1.0)),
        ({"error": "min"}, (0.0, 1.0)),
        ({"squared_error": "min"}, (0.0, math.inf)),
        ({"valid_loss": "min"}, (0.0, math.inf)),
        ({"reward": "max"}, (-math.inf, math.inf)),
    ],
)
def test_bounds_are_declared_or_follow_from_the_name(given, bounds):
    (objective,) = parse_objectives(given)
    assert (objective.low, objective.high) == bounds


@pytest.mark.parametrize("within", ["0", "1..0", "..", "a..b", "0..100 or so"])
def test_broken_bounds_are_user_errors(within):
    with pytest.raises(UserError, match=r"bounds of score must be LOW\.\.HIGH"):
        parse_objectives({"score": f"max {within}"})


def test_values_are_told_in_units():
    results = [valued("seconds", 192), valued("cost", 0.41, 2.5), valued("cost", 0.5, 1.0), valued("accuracy", 0.98)]
    assert results == ["3.2 min", "$0.41", "30.0 worker-min", "0.98"]
    assert valued("cost", 0.41) == "0.41 price units"


def test_oriented_values_are_all_minimised():
    objectives = parse_objectives(["accuracy:max", "seconds:min"])
    rows = [{"accuracy": 0.9, "seconds": 3}, {"seconds": 4, "accuracy": 0.95, "other": 1}]
    np.testing.assert_array_equal(oriented(rows, objectives), [[-0.9, 3], [-0.95, 4]])
    np.testing.assert_array_equal(oriented(rows[0], objectives), [-0.9, 3])
    assert oriented([], objectives).shape == (0, 2)
