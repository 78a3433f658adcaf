import numpy as np
import pytest

from elastune.core.errors import UserError
from elastune.search.space.objective import Objective, clock, oriented, parse_objectives


def test_both_ways_of_writing_objectives():
    expected = (
        Objective("accuracy", "max", "fraction"),
        Objective("seconds", "min", "s"),
        Objective("cost", "min", "price units"),
        Objective("loss", "min", ""),
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


def test_oriented_values_are_all_minimised():
    objectives = parse_objectives(["accuracy:max", "seconds:min"])
    rows = [{"accuracy": 0.9, "seconds": 3}, {"seconds": 4, "accuracy": 0.95, "other": 1}]
    np.testing.assert_array_equal(oriented(rows, objectives), [[-0.9, 3], [-0.95, 4]])
    np.testing.assert_array_equal(oriented(rows[0], objectives), [-0.9, 3])
    assert oriented([], objectives).shape == (0, 2)
