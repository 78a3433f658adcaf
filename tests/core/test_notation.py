"""Text of a command line: what is understood, and that all else is one line about the rule."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core import notation
from elastune.core.errors import UserError


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("3m", 180), ("1.5h", 5400), ("2d", 172_800), (" 10s ", 10), ("0.5s", 0.5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert notation.duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["3x", "0s", "-3m", "nan", "nans", "infs", "90", "", "s", "1e3s", "1_0s", "3 m", "367d", "9" * 400 + "s", "٣s"],
)
def test_no_durations(text: str) -> None:
    with pytest.raises(UserError, match="--budget"):
        notation.duration(text)


def test_a_duration_names_its_option() -> None:
    with pytest.raises(UserError, match="--trial-timeout must be a duration"):
        notation.duration("3x", "--trial-timeout")


def test_worker_counts_ascend() -> None:
    assert notation.worker_counts("1,2,4,8") == (1, 2, 4, 8)
    assert notation.worker_counts(" 8, 1 ") == (1, 8)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1,2,", "two", "-1", "1.5", "1,1", "65537", "1" * 5000, "²"])
def test_no_worker_counts(text: str) -> None:
    with pytest.raises(UserError):
        notation.worker_counts(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.05", 0.05),
        ("256", 256),
        ("1e-3", 1e-3),
        ("true", True),
        ("True", True),
        ("False", False),
        ("null", None),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ('"7"', "7"),
        ("adam", "adam"),
        ("a=b", "a=b"),
        ("", ""),
        ("01", "01"),
    ],
)
def test_settings(text: str, value: object) -> None:
    result = notation.settings([f"name={text}"])["name"]
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    "pairs",
    [
        ["lr"],
        ["=1"],
        ["9a=1"],
        ["lr=1", "lr=2"],
        ["lr=NaN"],
        ["lr=Infinity"],
        ["lr=1e999"],
        ["lr=[1e999]"],
        ['lr={"a": 1}'],
        ["lr=" + "[" * 200_000],
        ["lr=" + "1" * 20_000],
    ],
)
def test_no_settings(pairs: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        notation.settings(pairs)
    assert len(str(raised.value)) < 300


@given(st.text(max_size=60))
@pytest.mark.parametrize(
    "function", [notation.duration, notation.worker_counts, lambda text: notation.settings([text])]
)
def test_any_text_is_a_value_or_a_user_error(function: Callable[[str], Any], text: str) -> None:
    try:
        value = function(text)
    except UserError:
        return
    if isinstance(value, float):
        assert 0 < value < math.inf
    else:
        json.dumps(value, allow_nan=False)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    st.lists,
    max_leaves=5,
)


@given(PLAIN)
def test_what_a_command_prints_is_read_back(value: object) -> None:
    """The reports' commands write settings as JSON: the same value must come back."""
    assert notation.settings([f"x={json.dumps(value)}"]) == {"x": value}
