"""Confidence intervals for a mean over few seeds within a metric's bounds, and for a proportion over many samples.

The file also has the test that a mean is no worse than another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import ndtri, stdtrit  # quantiles; scipy.stats has them, too, and takes most of a second to load


def mean_ci(values: Sequence[float], level: float = 0.95) -> tuple[float, float | None]:
    """Return the mean and the half-width of its two-sided confidence interval at ``level``.

    The interval is Student's, with n - 1 degrees of freedom. One value has no spread: its half-width is None, not zero.
    Raises ``ValueError`` for no values, or one that is not finite (a diverged seed is a count of its own, not a value).
    """
    _check_level(level)
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"mean_ci needs at least one value, all finite, not {list(values)}")
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, float(stdtrit(n - 1, 0.5 + level / 2)) * math.sqrt(variance / n)


def wilson(successes: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """Return the lower and upper end of Wilson's score interval for a proportion (Wilson, JASA 1927).

    It stays within [0, 1] and keeps its level near 0 and 1, where mean +- z * standard error does not.
    """
    _check_level(level)
    if not 0 <= successes <= total or total == 0:
        raise ValueError(f"wilson needs 0 <= successes <= total and total > 0, not {successes} of {total}")
    return _score(successes / total, total, float(ndtri(0.5 + level / 2)))


def bounded_ci(
    values: Sequence[float],
    low: float = -math.inf,
    high: float = math.inf,
    samples: int | None = None,
    level: float = 0.95,
) -> tuple[float, float] | None:
    """Two-sided confidence interval at ``level`` of the mean of a metric that lies between ``low`` and ``high``.

    Two sources of error. Over seeds: s^2 / k, with k - 1 degrees of freedom. Over test samples, where there are two
    bounds and the number of ``samples`` is known: (mean - low)(high - mean) / samples, the binomial variance of an
    accuracy, and the most that the mean of any bounded figure of a sample can have (Bhatia and Davis, "A Better Bound
    on the Variance", American Mathematical Monthly 2000). All seeds share the test set, so it is not divided by k. By
    the law of total variance both add up; the degrees of freedom are Satterthwaite's (Biometrics Bulletin 1946).

    Two bounds: Wilson's score interval with the effective number of samples p (1 - p) / variance (Korn and Graubard,
    "Confidence Intervals for Proportions with Small Expected Number of Positive Counts Estimated from Survey Data",
    Survey Methodology 1998; Dean and Pagano, JSSAM 2015), and Student's quantile in place of the normal one. One bound:
    Student's interval of the logarithm of the distance to it, its error by the delta method (Meeker and Escobar,
    "Statistical Methods for Reliability Data", 1998, section 7.2.3). None: Student's interval.

    Few seeds of a skewed spread leave it a little short of its level: with 3 or 5 seeds whose logits are normal, the
    95 % interval held the truth in 90 to 97 of 100 cases (``tests/core/plan/test_intervals.py``).

    Args:
        values: one a seed, within the bounds.
        samples: that every value was measured on; None: not known, so that the interval covers seeds alone.

    Returns:
        Lower and upper end, within the bounds; None for fewer than two values, whose spread nobody knows.

    Raises:
        ValueError: where there are no values, one is not finite or out of bounds, or ``samples`` is below 1.
    """
    mean, half = mean_ci(values, level)
    if min(values) < low or max(values) > high:
        raise ValueError(f"values lie within {low} and {high}, not at {min(values)} and {max(values)}")
    if samples is not None and samples < 1:
        raise ValueError(f"a value is measured on at least one sample, not {samples}")
    if half is None:
        return None
    if math.isfinite(low) and math.isfinite(high):
        ends = _two_bounds([(value - low) / (high - low) for value in values], samples, level)
        return low + (high - low) * ends[0], low + (high - low) * ends[1]
    if math.isfinite(low):
        near, far = _one_bound(mean - low, half)
        return low + near, low + far
    if math.isfinite(high):
        near, far = _one_bound(high - mean, half)
        return high - far, high - near
    return mean - half, mean + half


@dataclass(frozen=True)
class Comparison:
    """The verdict whether a metric is worse than a baseline's by less than ``margin``.

    Attributes:
        loss: The mean loss, the amount by which the metric is worse, over ``pairs`` of seeds.
        low, high: One-sided bounds of it, each at ``level``; None for too few pairs.
        verdict: "holds": ``high`` is below ``margin``. "falls": ``low`` is above it. Else "not shown".
    """

    loss: float
    low: float | None
    high: float | None
    margin: float
    pairs: int
    level: float

    @property
    def verdict(self) -> Literal["holds", "not shown", "falls"]:
        if self.low is None or self.high is None:
            return "not shown"
        return "holds" if self.high < self.margin else "falls" if self.low > self.margin else "not shown"


def non_inferiority(losses: Sequence[float], margin: float, level: float = 0.95) -> Comparison:
    """Compare pairs, each of one seed: by how much the metric is worse than its baseline's.

    The method is two one-sided paired t-tests against ``margin`` (Schuirmann, Journal of Pharmacokinetics and
    Biopharmaceutics 1987; non-inferiority is the first of them). Pairs share their seed and their test samples, so the
    result holds for these samples. Raises ``ValueError`` for no pairs, losses that are not finite, or a margin that is
    not positive.
    """
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"a margin is positive, not {margin}")
    loss, half = mean_ci(losses, 2 * level - 1)
    if half is None:
        return Comparison(loss, None, None, margin, len(losses), level)
    return Comparison(loss, loss - half, loss + half, margin, len(losses), level)


def _two_bounds(values: Sequence[float], samples: int | None, level: float) -> tuple[float, float]:
    """The interval of values in [0, 1]. Variances are relative to the variance of one sample, p (1 - p)."""
    k = len(values)
    rate = min(1.0, math.fsum(values) / k)
    one = rate * (1 - rate)
    # k values in [0, 1] with this mean cannot spread further than 1 / (k - 1) of it.
    seeds = min(1 / (k - 1), math.fsum((value - rate) ** 2 for value in values) / (k - 1) / k / one) if one else 0.0
    whole = seeds + (1 / samples if samples else 0.0)
    if whole == 0:
        return rate, rate
    share = seeds / whole
    freedom = (k - 1) / share**2 if share > 1e-6 else math.inf
    quantile = ndtri(0.5 + level / 2) if math.isinf(freedom) else stdtrit(freedom, 0.5 + level / 2)
    return _score(rate, 1 / whole, float(quantile))


def _one_bound(distance: float, half: float) -> tuple[float, float]:
    """The interval of a positive mean whose Student's interval has the half-width ``half``."""
    if distance <= 0:
        return 0.0, 0.0
    factor = math.exp(min(half / distance, 700.0))
    return distance / factor, distance * factor


def _score(rate: float, total: float, quantile: float) -> tuple[float, float]:
    shrink = 1 + quantile * quantile / total
    centre = (rate + quantile * quantile / (2 * total)) / shrink
    half = quantile * math.sqrt(rate * (1 - rate) / total + quantile * quantile / (4 * total * total)) / shrink
    return 0.0 if rate == 0 else max(0.0, centre - half), 1.0 if rate == 1 else min(1.0, centre + half)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"a confidence level lies between 0 and 1, not {level}")
