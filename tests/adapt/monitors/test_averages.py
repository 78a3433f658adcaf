"""Weighted averages that forget, and their standard errors."""

from __future__ import annotations

import math
import random

import pytest

from elastune.adapt.monitors import base
from elastune.adapt.monitors.base import effective_sample_size, empty, mean, with_value


def test_the_mean_is_the_weighted_one_from_the_first_reading_on() -> None:
    state = with_value(empty(2), 3.0, 2.0, memory=10)
    first = mean(state)
    assert first is not None
    assert first.value == 3.0
    assert first.error is None
    second = mean(with_value(state, 6.0, 1.0, memory=10))
    assert second is not None
    assert second.value == pytest.approx((0.9 * 2 * 3 + 1 * 6) / (0.9 * 2 + 1))


def test_without_forgetting_the_error_is_the_textbook_one() -> None:
    rng = random.Random(0)
    values = [rng.gauss(5, 2) for _ in range(50)]
    state = empty(2)
    for value in values:
        state = with_value(state, value, 1.0, memory=1e12)
    result, middle = mean(state), sum(values) / 50
    assert result is not None
    assert result.error == pytest.approx(math.sqrt(sum((v - middle) ** 2 for v in values) / 49 / 50), rel=1e-6)
    assert effective_sample_size(state) == pytest.approx(50)


def test_the_error_is_honest_for_readings_of_differing_weight_and_spread() -> None:
    hits = 0
    for seed in range(400):
        rng = random.Random(seed)
        state = empty(2)
        for step in range(150):
            weight = 1.0 if step < 75 else 4.0
            state = with_value(state, rng.gauss(7, weight**-0.5), weight, memory=50)
        result = mean(state)
        assert result is not None
        assert result.error is not None
        hits += abs(result.value - 7) <= 2 * result.error
    assert 0.92 <= hits / 400 <= 0.98  # 0.954 for a normal deviate


def test_memory_bounds_what_is_remembered() -> None:
    state = empty(2)
    for step in range(2000):
        state = with_value(state, float(step), 1.0, memory=100)
    result = mean(state)
    assert result is not None
    assert result.value == pytest.approx(1999 - 99, rel=1e-6)
    assert effective_sample_size(state) == pytest.approx(199, rel=1e-6)


def test_sums_that_would_overflow_are_not_taken() -> None:
    state = with_value(empty(2), 1.0, 1.0, memory=10)
    assert with_value(state, 1e200, 1.0, memory=10) is state
    assert base.error(state, (1.0, 1.0), 1.0) is None
