import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import bootstrap, t

from elastune.plan.intervals import mean_ci, wilson


def test_mean_ci_is_students():
    mean, half = mean_ci([0.95, 0.97, 0.96])
    assert mean == pytest.approx(0.96)
    assert half == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-5)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9), st.sampled_from([0.8, 0.95, 0.99]))
def test_mean_ci_agrees_with_scipy(values, level):
    mean, half = mean_ci(values, level)
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    assert mean == pytest.approx(np.mean(values), abs=1e-9)
    if error > 1e-9:
        low, high = t.interval(level, len(values) - 1, loc=mean, scale=error)
        assert (mean - half, mean + half) == (pytest.approx(low), pytest.approx(high))


def test_mean_ci_covers_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(2.0, 0.5, size=(2000, 3))
    covered = 0
    for row in draws:
        mean, half = mean_ci(row.tolist())
        assert half is not None
        covered += abs(mean - 2.0) <= half
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)


def test_one_value_has_no_interval_and_none_no_mean():
    assert mean_ci([0.5]) == (0.5, None)
    with pytest.raises(ValueError, match="at least one"):
        mean_ci([])
    with pytest.raises(ValueError, match="all finite"):
        mean_ci([0.9, math.nan])
    with pytest.raises(ValueError, match="level"):
        mean_ci([1.0, 2.0], 95)


def test_wilson_known_values():
    low, high = wilson(9860, 10_000)
    assert (low, high) == (pytest.approx(0.98350, abs=1e-5), pytest.approx(0.98813, abs=1e-5))
    assert wilson(0, 10) == (0.0, pytest.approx(0.27753, abs=1e-5))
    assert wilson(10, 10) == (pytest.approx(0.72247, abs=1e-5), 1.0)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_rate_and_is_symmetric(counts):
    successes, total = counts
    low, high = wilson(successes, total)
    assert 0 <= low <= successes / total <= high <= 1
    assert wilson(total - successes, total) == (pytest.approx(1 - high), pytest.approx(1 - low))


def test_wilson_near_bootstrap_in_the_middle():
    draws = np.repeat([1.0, 0.0], [300, 700])
    drawn = bootstrap((draws,), np.mean, n_resamples=2000, rng=np.random.default_rng(0), method="percentile")
    assert wilson(300, 1000) == pytest.approx(tuple(drawn.confidence_interval), abs=0.005)


@pytest.mark.parametrize(("successes", "total"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_impossible_counts(successes, total):
    with pytest.raises(ValueError, match="successes"):
        wilson(successes, total)
