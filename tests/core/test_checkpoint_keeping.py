"""Which checkpoints stay: the notation, and the decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.checkpoint_keeping import NEWEST_TWO, KeepCheckpoints, SavedCheckpoint, to_delete
from elastune.core.errors import UserError


def saved(*steps: int, **metrics: dict[int, float]) -> list[SavedCheckpoint]:
    """Checkpoints of ``steps``; each metric's values by step."""
    return [
        SavedCheckpoint(step, {name: values[step] for name, values in metrics.items() if step in values})
        for step in steps
    ]


@pytest.mark.parametrize(
    "text", ["last:3", "last:3,every:1000", "last:1,every:10,best:accuracy:max,best:loss:min", "last:2,best:f1"]
)
def test_a_text_is_read_and_written(text: str) -> None:
    assert str(KeepCheckpoints.parse(text)) == text


def test_what_is_left_out() -> None:
    assert KeepCheckpoints.parse("every:5") == KeepCheckpoints(2, 5)
    assert KeepCheckpoints.parse("best:accuracy").directed({}).best == (("accuracy", "max"),)
    assert KeepCheckpoints.parse("best:loss").directed({"loss": "min"}).best == (("loss", "min"),)
    assert KeepCheckpoints.parse("best:accuracy").directed({"accuracy": "min"}).best == (("accuracy", "min"),)
    assert KeepCheckpoints.parse("best:loss:max").directed({}).best == (("loss", "max"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "last:N,every:STEPS"),
        ("all", "'all'"),
        ("last", "from 1 to"),
        ("last:0", "from 1 to"),
        ("last:-1", "from 1 to"),
        ("last:2.5", "from 1 to"),
        ("last:٣", "from 1 to"),
        ("every:99999999999", "from 1 to"),
        ("last:2,last:3", "each rule once"),
        ("best:", "best:METRIC"),
        ("best:a b", "best:METRIC"),
        ("best:accuracy:up", "best:METRIC"),
        ("best:accuracy:", "best:METRIC"),
        ("best:a,best:a:min", "a metric once"),
        ("last:3,", "last:N,every:STEPS"),
    ],
)
def test_a_wrong_text_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        KeepCheckpoints.parse(text)


def test_a_direction_against_the_objective_is_refused() -> None:
    with pytest.raises(UserError, match="direction of the objective"):
        KeepCheckpoints.parse("best:loss:max").directed({"loss": "min"})


@pytest.mark.parametrize("metric", ["val_loss", "Error", "perplexity", "test_mse", "rmse"])
def test_a_metric_that_may_fall_needs_a_direction(metric: str) -> None:
    with pytest.raises(UserError, match="needs a direction"):
        KeepCheckpoints.parse(f"best:{metric}").directed({"accuracy": "max"})


@pytest.mark.parametrize(
    ("text", "deleted"),
    [
        ("last:2", [10, 20, 30]),
        ("last:1,every:20", [10, 30]),
        ("last:1,best:accuracy", [10, 30, 40]),  # of two equal ones the first
        ("last:1,best:loss:min", [20, 30, 40]),
        ("last:1,best:accuracy,best:loss:min", [30, 40]),
        ("last:1,best:recall", [10, 20, 30, 40]),  # nobody reported it
        ("last:9", []),
    ],
)
def test_what_is_deleted(text: str, deleted: list[int]) -> None:
    accuracy, loss = {10: 0.5, 20: 0.9, 30: 0.9, 50: 0.1}, {10: 1.0, 30: 2.0}
    those = saved(10, 20, 30, 40, 50, accuracy=accuracy, loss=loss)
    assert to_delete(KeepCheckpoints.parse(text), those) == deleted
    assert to_delete(KeepCheckpoints.parse(text), those[::-1]) == deleted


@given(
    st.builds(
        KeepCheckpoints,
        st.integers(1, 5),
        st.none() | st.integers(1, 9),
        st.sampled_from([(), (("a", "max"),), (("a", "min"), ("b", "max"))]),
    ),
    st.dictionaries(st.integers(0, 60), st.dictionaries(st.sampled_from("ab"), st.floats(-9, 9)), max_size=12),
)
def test_the_newest_stays_and_a_second_look_deletes_nothing(
    rules: KeepCheckpoints, metrics: dict[int, dict[str, float]]
) -> None:
    those = [SavedCheckpoint(step, values) for step, values in metrics.items()]
    deleted = to_delete(rules, those)
    left = [each for each in those if each.step not in deleted]
    assert not those or max(metrics) not in deleted
    assert len(left) >= min(rules.last, len(those))
    assert to_delete(rules, left) == []


def test_the_default_is_the_newest_two() -> None:
    assert to_delete(NEWEST_TWO, saved(1, 2, 3)) == [1]
