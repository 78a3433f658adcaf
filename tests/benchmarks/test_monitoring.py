"""The gate of benchmarks/adaptive/monitoring.py: what it lets through, what it does not, and how sure it is."""

from __future__ import annotations

import random
from typing import Any

import pytest
from benchmarks.adaptive.monitoring import BOUNDS, is_decided, median_interval, too_dear


def cell(ratios: list[float]) -> dict[str, Any]:
    results = {"median": sorted(ratios)[len(ratios) // 2], "median_interval": median_interval(ratios)}
    size = {"monitor": "noise_scale", "model": "lenet", "workers": 2, "mode": "fast", "rounds": len(ratios)}
    return {**size, "every_10_over_off_cpu": results}


def drawn(centre: float, spread: float, count: int, seed: int) -> list[float]:
    generator = random.Random(seed)
    return [centre * generator.lognormvariate(0, spread) for _ in range(count)]


@pytest.mark.parametrize(("count", "places"), [(1, 0), (7, 0), (8, 0), (11, 0), (12, 1), (24, 5), (48, 14)])
def test_the_interval_is_of_order_statistics(count: int, places: int) -> None:
    """Of 8 values all are on one side of the median once in 128 times; of 12, all but one once in 157 times."""
    values = [float(value) for value in range(count)]
    assert median_interval(values[::-1]) == (values[places], values[count - 1 - places])


def test_the_interval_holds_the_median() -> None:
    missed = sum(not low <= 1.0 <= high for low, high in (median_interval(drawn(1, 0.1, 24, s)) for s in range(1000)))
    assert missed <= 20, "one of a hundred"


def test_a_monitor_that_costs_seven_percent_is_refused_and_one_that_costs_two_is_not() -> None:
    bound = BOUNDS["noise_scale"]
    for seed in range(20):
        dear, cheap = drawn(1.07, 0.01, 12, seed), drawn(1.02, 0.01, 12, seed)
        assert is_decided(dear, bound)
        assert "its bound is 1.05" in too_dear(cell(dear))
        assert too_dear(cell(dear), surely=True), "all of its interval is above the bound"
        assert is_decided(cheap, bound)
        assert too_dear(cell(cheap)) == ""


def test_few_rounds_that_scatter_about_the_bound_fail_no_smoke() -> None:
    scattered = cell([0.9, 0.95, 1.0, 1.04, 1.06, 1.07, 1.1, 1.2] * 2)
    assert too_dear(scattered)
    assert too_dear(scattered, surely=True) == ""


def test_a_busy_machine_decides_nothing_soon() -> None:
    assert not is_decided(drawn(1.0, 0.3, 8, 1), BOUNDS["noise_scale"])
    assert not is_decided([1.0] * 7, BOUNDS["noise_scale"]), "too few"
    assert is_decided([1.0] * 8, BOUNDS["noise_scale"])
