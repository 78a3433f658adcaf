import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.plan.confidence_intervals import bounded_ci, mean_ci, non_inferiority, wilson


def test_mean_ci_is_students():
    mean, half = mean_ci([0.95, 0.97, 0.96])
    assert mean == pytest.approx(0.96)
    assert half == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-5)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9), st.sampled_from([0.8, 0.95, 0.99]))
def test_mean_ci_agrees_with_scipy(values, level):
    from scipy.stats import t

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
    from scipy.stats import bootstrap

    draws = np.repeat([1.0, 0.0], [300, 700])
    drawn = bootstrap((draws,), np.mean, n_resamples=2000, rng=np.random.default_rng(0), method="percentile")
    assert wilson(300, 1000) == pytest.approx(tuple(drawn.confidence_interval), abs=0.005)


@pytest.mark.parametrize(("successes", "total"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_impossible_counts(successes, total):
    with pytest.raises(ValueError, match="successes"):
        wilson(successes, total)


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=6),
    st.none() | st.integers(1, 10_000),
    st.sampled_from([(0.0, 1.0), (0.0, 100.0), (-1.0, 1.0), (0.0, math.inf), (-math.inf, 5.0), (-math.inf, math.inf)]),
)
def test_intervals_stay_within_bounds_and_hold_the_mean(shares, samples, bounds):
    low, high = bounds
    width = high - low if math.isfinite(high - low) else 5.0
    start = low if math.isfinite(low) else high - width if math.isfinite(high) else 0.0
    values = [min(high, start + width * share) for share in shares]
    below, above = bounded_ci(values, low, high, samples)
    slack = 1e-9 * width
    assert low <= below <= math.fsum(values) / len(values) + slack
    assert math.fsum(values) / len(values) - slack <= above <= high


def test_three_seeds_of_which_one_collapsed_do_not_leave_the_scale():
    below, above = bounded_ci([0.95, 0.78, 0.28], 0.0, 1.0)
    assert 0 < below < 0.2
    assert 0.9 < above < 1
    mean, half = mean_ci([0.95, 0.78, 0.28])
    assert mean + half > 1.4, "as the mean and its Student's half-width do"


def test_without_spread_the_interval_is_wilsons():
    assert bounded_ci([0.986, 0.986, 0.986], 0, 1, 10_000) == pytest.approx(wilson(9860, 10_000))
    assert bounded_ci([1.0, 1.0], 0, 1, 400) == pytest.approx(wilson(400, 400))
    assert bounded_ci([98.6, 98.6], 0, 100, 10_000) == pytest.approx(tuple(100 * end for end in wilson(9860, 10_000)))


def test_the_test_sets_error_and_the_spread_over_seeds_add_up():
    values = [0.97, 0.98, 0.99]
    seeds, both, few = (bounded_ci(values, 0, 1, n) for n in (None, 1000, 100))
    assert few[0] < both[0] < bounded_ci([0.98] * 3, 0, 1, 1000)[0]
    assert bounded_ci(values, 0, 1, 10**9) == pytest.approx(seeds, abs=1e-3), "an endless test set has no error"


SEEDS = [(0.95, 0.0, 400), (0.95, 0.3, 400), (0.98, 0.5, 2000), (0.8, 1.0, 300)]  # mean, spread of logits, samples


@pytest.mark.parametrize(("rate", "spread", "samples"), SEEDS)
@pytest.mark.parametrize("k", [3, 5])
def test_it_covers_as_often_as_it_says(rate, spread, samples, k):
    """Seeds of a normal logit, all measured on one test set whose samples are right or wrong by their difficulty."""
    draw = np.random.default_rng(0)
    logits = math.log(rate / (1 - rate)) + spread * draw.normal(size=(2000, k))
    truth = np.mean(1 / (1 + np.exp(-(math.log(rate / (1 - rate)) + spread * draw.normal(size=200_000)))))
    rates = 1 / (1 + np.exp(-logits))
    hard = draw.uniform(size=(2000, samples, 1))  # a sample is wrong for every seed whose rate is below its difficulty
    result = (hard < rates[:, None, :]).mean(axis=1)
    covered = sum(low <= truth <= high for low, high in (bounded_ci(each.tolist(), 0, 1, samples) for each in result))
    assert 0.9 <= covered / 2000 <= 0.975


def test_a_loss_stays_above_zero():
    below, above = bounded_ci([0.02, 0.01, 0.3], 0.0)
    assert 0 < below < 0.01
    assert above > 0.3
    assert bounded_ci([0.0, 0.0], 0.0) == (0.0, 0.0)
    mirrored = bounded_ci([-0.02, -0.01, -0.3], high=0.0)
    assert mirrored == pytest.approx((-above, -below))


def test_bounded_intervals_refuse_what_is_none():
    assert bounded_ci([0.5], 0, 1, 100) is None
    with pytest.raises(ValueError, match="within"):
        bounded_ci([0.5, 98.6], 0, 1)
    with pytest.raises(ValueError, match="at least one sample"):
        bounded_ci([0.5, 0.6], 0, 1, 0)


def test_non_inferiority_is_a_paired_one_sided_t_test():
    from scipy.stats import ttest_1samp

    outcome = non_inferiority([0.002, 0.004, 0.003], 0.01)
    result = ttest_1samp([0.002, 0.004, 0.003], 0.01, alternative="less")
    assert outcome.verdict == "holds"
    assert outcome.high == pytest.approx(result.confidence_interval(0.95).high)
    assert non_inferiority([0.001, 0.03, -0.01], 0.01).verdict == "not shown"
    assert non_inferiority([0.2, 0.21, 0.19], 0.01).verdict == "falls"
    assert non_inferiority([-0.001], 0.01).verdict == "not shown", "one pair shows nothing"
    assert non_inferiority([0.0, 0.0], 0.01).verdict == "holds"


def test_non_inferiority_is_wrong_as_rarely_as_it_says():
    """At a true loss of just the margin, "holds" is the error of the first kind."""
    draws = np.random.default_rng(1).normal(0.01, 0.005, size=(4000, 3))
    held = sum(non_inferiority(each.tolist(), 0.01).verdict == "holds" for each in draws)
    assert held / 4000 == pytest.approx(0.05, abs=0.015)


@pytest.mark.parametrize("margin", [0.0, -1.0, math.nan])
def test_a_margin_is_positive(margin):
    with pytest.raises(ValueError, match="margin"):
        non_inferiority([0.1], margin)
