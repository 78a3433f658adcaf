import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.report.tables.text import duration, flat, number, plain, plus_minus, settings_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.98123456, "0.9812"),
        (1234.5, "1234"),
        (123456.0, "123456"),
        (0.0001234, "0.0001234"),
        (1.5e-7, "1.5e-7"),
        (2.5e12, "2.5e12"),
        (-0.5, "-0.5"),
        (0.0, "0"),
        (None, "–"),
        (math.nan, "NaN"),
        (-math.inf, "-∞"),
        (60, "60"),
    ],
)
def test_number(value, text):
    assert number(value) == text


@given(st.floats(-1e300, 1e300))
def test_number_says_what_it_is_given(value):
    assert float(number(value)) == pytest.approx(value, rel=5.1e-4, abs=1e-300)


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (0.981234, 0.0021, "0.9812 ± 0.0021"),
        (0.86, 0.0841, "0.860 ± 0.084"),
        (12.3456, 3.4, "12.3 ± 3.4"),
        (1234.5, 120.0, "1234 ± 120"),
        (0.9712, None, "0.9712"),
        (1.0, 0.0, "1 ± 0"),
        (math.nan, 0.1, "NaN"),
    ],
)
def test_plus_minus(mean, half, text):
    assert plus_minus(mean, half) == text


def test_durations():
    assert duration(42.31) == "42.3 s"
    assert duration(185) == "3 min 05 s"
    assert duration(7440) == "2 h 04 min"


def test_plain_is_one_short_printable_line():
    assert plain("a\nb\tc\x00\x1b[31md") == "a b c [31md"
    assert plain("x" * 200, 10) == "x" * 9 + "…"


def test_settings_and_nested_mappings():
    assert settings_text({"lr": 0.0512345, "batch_size": 64, "kind": "sgd"}, without=("kind",)) == (
        "lr=0.05123, batch_size=64"
    )
    assert flat({"a": {"b": 1, "c": [1, 2]}, "d": None}) == {"a.b": "1", "a.c": "1, 2", "d": "–"}
