import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.formatting import (
    cost,
    count,
    cut,
    duration,
    flat,
    interval,
    number,
    plain,
    plus_minus,
    printable,
    rate,
    settings_text,
)


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (3.4e-5, "34 µs"),
        (0.2349, "235 ms"),
        (0.9996, "1 s"),
        (42.31, "42.3 s"),
        (59.96, "1.0 min"),
        (192, "3.2 min"),
        (3599, "1.0 h"),
        (7440, "2.1 h"),
        (40 * 3600, "40.0 h"),
        (3.4 * 86400, "3.4 days"),
        (2000 * 86400, "2,000.0 days"),
        (None, "–"),
        (math.inf, "∞"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "price", "text"),
    [
        (0.412, 2.5, "$0.41"),
        (0.0029, 2.5, "$0.0029"),
        (12.345, 2.5, "$12.35"),
        (92613.4, 3.589, "$92,613"),
        (0.0002865, 1.0, "1.03 worker-s"),
        (0.0534, 1.0, "3.2 worker-min"),
        (17.25, 1.0, "17.2 worker-h"),
        (None, 1.0, "–"),
        (math.nan, 2.0, "NaN"),
    ],
)
def test_costs(value, price, text):
    assert cost(value, price) == text


def test_counts_and_rates():
    assert [count(1, "step"), count(2, "step"), count(12345, "step")] == ["1 step", "2 steps", "12,345 steps"]
    assert [rate(12345.6), rate(0.4213), rate(None)] == ["12,346 samples/s", "0.421 samples/s", "–"]


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ((0.9582, 0.99512), "0.958 to 0.995"),
        ((0.1, 0.97), "0.10 to 0.97"),
        ((1234.0, 2234.0), "1234 to 2234"),
        ((1.0, 1.0), "1 to 1"),
        (None, "–"),
    ],
)
def test_intervals(ends, text):
    assert interval(ends) == text


def test_plain_is_one_short_printable_line():
    assert plain("a\nb\tc\x00\x1b[31md") == "a b c\\x00\\x1b[31md"
    assert plain("x" * 200, 10) == "x" * 9 + "…"


def test_what_a_terminal_obeys_or_hides_is_made_visible():
    assert printable("\x1b[2J\u202egpj.exe\x07\r\x9b\u200b\u2028\ud800") == (
        "\\x1b[2J\\u202egpj.exe\\x07\\r\\x9b\\u200b\\u2028\\ud800"
    )
    for kept in ("a\n\tb", "Größe ∞ 数", "1\u202f000\u00a0€", ""):
        assert printable(kept) == kept


@given(st.text())
def test_what_is_printable_stays_so(text):
    shown = printable(text)
    assert printable(shown) == shown
    assert all(c.isprintable() or c in "\n\t" or c.isspace() for c in shown)


def test_a_long_text_keeps_its_ends():
    assert cut("abc", 3) == "abc"
    assert cut("begin" + "x" * 100 + "end", 10) == "begin [...] xxend"


def test_settings_and_nested_mappings():
    assert settings_text({"lr": 0.0512345, "batch_size": 64, "kind": "sgd"}, without=("kind",)) == (
        "lr=0.05123, batch_size=64"
    )
    assert flat({"a": {"b": 1, "c": [1, 2]}, "d": None}) == {"a.b": "1", "a.c": "1, 2", "d": "–"}
