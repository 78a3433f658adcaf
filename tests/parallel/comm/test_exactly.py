"""Sums and means that do not depend on order."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.parallel.comm.norms import exact_mean, exact_sum

FINITE = st.floats(allow_nan=False, allow_infinity=False)
ANY = st.floats(allow_nan=True, allow_infinity=True)


def rounded(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


@given(st.lists(FINITE))
def test_a_sum_is_rounded_once(values: list[float]) -> None:
    assert exact_sum(values) == rounded(sum(map(Fraction, values), Fraction(0)))


@given(st.lists(ANY, max_size=8).flatmap(lambda v: st.tuples(st.just(v), st.permutations(v))))
def test_order_does_not_show(pair: tuple[list[float], list[float]]) -> None:
    values, permuted = pair
    assert repr(exact_sum(values)) == repr(exact_sum(permuted))
    assert repr(exact_mean(values)) == repr(exact_mean(permuted))


@given(FINITE, st.integers(1, 50))
def test_equal_values_are_their_own_mean(value: float, count: int) -> None:
    assert exact_mean([value] * count) == value


@given(st.lists(st.tuples(FINITE, st.integers(0, 9)), min_size=1, max_size=8))
def test_whole_weights_are_repeats(pairs: list[tuple[float, int]]) -> None:
    values, weights = zip(*pairs, strict=True)
    repeated = [value for value, weight in pairs for _ in range(weight)]
    assert repr(exact_mean(values, weights)) == repr(exact_mean(repeated))


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ([1e308, 1e308, -1e308], 1e308),
        ([1e308, 1e308], math.inf),
        ([-1e308, -1e308], -math.inf),
        ([1e308, 1e308, -math.inf], -math.inf),
        ([math.inf, 1.0], math.inf),
        ([], 0.0),
    ],
)
def test_large_and_infinite_numbers(values: list[float], total: float) -> None:
    assert exact_sum(values) == total


def test_nothing_has_no_mean_and_nan_stays() -> None:
    assert math.isnan(exact_mean([]))
    assert math.isnan(exact_mean([1.0, 2.0], [0.0, 0.0]))
    assert math.isnan(exact_mean([math.nan, 1.0]))
    assert math.isnan(exact_sum([math.inf, -math.inf]))
