import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.search.space.constraint import Constraint, parse_constraints
from elastune.search.space.feasible import check_feasible
from elastune.search.space.interval import Interval, bound, impossible


def continuous(trial):
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
        "workers": 2 ** trial.suggest_int("log_workers", 0, 2),
        "micro_batch": trial.suggest_categorical("micro_batch", [32, 64, 128]),
        "scale": 3 * trial.suggest_float("third", 0.0, 1.0),
    }


def finite(trial):
    workers = trial.suggest_int("workers", 1, 4)
    found = {"workers": workers, "batch": trial.suggest_int("batch", 16, 64, step=16)}
    if workers == 4:
        found["momentum"] = trial.suggest_float("momentum", 0.8, 0.9, step=0.1)
    return found


@pytest.mark.parametrize(
    ("space", "texts"),
    [
        (continuous, ["workers >= 8"]),
        (continuous, ["workers < 1"]),
        (continuous, ["lr > 1"]),
        (continuous, ["lr > 0.5", "lr < 0.1"]),
        (continuous, ["lr >= 0.5", "0.5 > lr"]),
        (continuous, ["accuracy > 0.9", "accuracy < 0.5"]),
        (continuous, ["accuracy == 0.9", "accuracy < 0.5"]),
        (continuous, ["lr * 100 >= 200"]),
        (continuous, ["lr + workers >= 5.5"]),
        (continuous, ["workers * micro_batch == 4096"]),
        (continuous, ["workers * micro_batch == 256", "workers * micro_batch == 128"]),
        (continuous, ["workers * micro_batch == 128", "workers == 4", "micro_batch >= 64"]),
        (continuous, ["epochs >= 20"]),
        (continuous, ["epochs * workers > 40"]),
        (finite, ["workers * batch == 100"]),
        (finite, ["workers == 4", "momentum + workers < 4.75"]),
    ],
)
def test_contradictions_are_found_without_running(space, texts):
    with pytest.raises(UserError) as caught:
        check_feasible(space, parse_constraints(texts), {"epochs": 10}, seed=0)
    assert "\n" not in str(caught.value)
    assert any(text in str(caught.value) for text in texts)


@pytest.mark.parametrize(
    ("space", "texts", "verdict"),
    [
        (continuous, [], "feasible"),
        (continuous, ["workers * micro_batch == 256", "lr < 0.1"], "feasible"),
        (continuous, ["accuracy > 0.9", "accuracy < 0.95", "seconds <= 100"], "feasible"),
        (continuous, ["lr == 0.3"], "unknown"),
        (continuous, ["lr >= 1"], "unknown"),
        (continuous, ["scale * workers == 2.5"], "unknown"),
        (continuous, ["scale > 2.9999"], "unknown"),
        (finite, ["workers * batch == 256"], "feasible"),
        (finite, ["momentum <= 0.8"], "feasible"),
        (finite, ["epochs == 10"], "feasible"),
    ],
)
def test_what_may_be_feasible_is_let_through(space, texts, verdict):
    assert check_feasible(space, parse_constraints(texts), {"epochs": 10}, seed=0) == verdict


expressions = st.recursive(
    st.sampled_from(["x", "y", "2", "0", "3.5", "1e3"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%", "**"]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        inner.map(lambda e: f"-({e})"),
        inner.map(lambda e: f"abs({e})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
    ),
    max_leaves=6,
)
ends = st.integers(-6, 6)


@settings(max_examples=400, deadline=None)
@given(
    left=expressions,
    right=expressions,
    comparison=st.sampled_from(["<=", "<", ">=", ">", "=="]),
    x=st.tuples(ends, ends),
    y=st.tuples(ends, ends),
    at=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_what_is_called_impossible_never_holds(left, right, comparison, x, y, at):
    try:
        constraint = Constraint.parse(f"{left} {comparison} {right} + 0 * x")
    except UserError:
        return
    box = {"x": Interval(min(x), max(x)), "y": Interval(min(y), max(y))}
    for a, b in [at, (0, 0), (0, 1), (1, 0), (1, 1)]:
        point = {
            "x": box["x"].low + a * (box["x"].high - box["x"].low),
            "y": box["y"].low + b * (box["y"].high - box["y"].low),
        }
        if impossible(constraint, box):
            assert constraint.violation(point) > 0


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("x * y", -4, 6),
        ("x - y", -4, 2),
        ("x / y", -2, 3),
        ("x // y", -2, 3),
        ("x % y", 0, 2),
        ("x ** 2", 0, 9),
        ("x ** 3", -8, 27),
        ("y ** x", 0.25, 8),
        ("abs(x)", 0, 3),
        ("max(x, y)", 1, 3),
        ("min(x, -y)", -2, -1),
        ("1 / x", -float("inf"), float("inf")),
    ],
)
def test_bounds(text, low, high):
    found = bound(ast.parse(text, mode="eval").body, {"x": Interval(-2, 3), "y": Interval(1, 2)})
    assert (found.low, found.high) == (low, high)
