"""AdaScale's gain."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.monitors.gradient_variance import adascale_gain
from elastune.plan.goodput import Noise, efficiency

amounts = st.floats(0, 1e30)
scales = st.floats(1, 1e6)


@pytest.mark.parametrize(
    ("variance", "square", "scale", "gain"),
    [(0, 1, 8, 1), (0, 0, 8, 1), (1, 0, 8, 8), (1, 1, 1, 1), (1, 1, 4, 1.6), (3, 1, 2, 1.6), (8, 2, 0.5, 10 / 18)],
)
def test_against_values_by_hand(variance: float, square: float, scale: float, gain: float) -> None:
    assert adascale_gain(variance, square, scale) == pytest.approx(gain, rel=1e-12)


@given(amounts, amounts, scales)
def test_lies_between_one_and_the_scale(variance: float, square: float, scale: float) -> None:
    assert 1 <= adascale_gain(variance, square, scale) <= scale


@given(amounts, amounts, scales, scales)
def test_grows_with_the_scale(variance: float, square: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert adascale_gain(variance, square, low) <= adascale_gain(variance, square, high) * (1 + 1e-12)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), scales)
def test_is_pollux_efficiency_times_the_scale(variance: float, square: float, scale: float) -> None:
    expected = efficiency(Noise(square, variance), 32 * scale, 32) * scale
    assert adascale_gain(variance, square, scale) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bad", [(-1, 1, 2), (1, -1, 2), (1, 1, 0), (math.nan, 1, 2), (1, 1, math.nan)])
def test_refuses_what_is_no_variance(bad: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="a gain needs"):
        adascale_gain(*bad)
