"""Confidence intervals: for a mean over few seeds, and for a proportion over many samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.stats import norm, t


def mean_ci(values: Sequence[float], level: float = 0.95) -> tuple[float, float | None]:
    """Mean and half-width of its two-sided confidence interval at ``level`` (Student's t, n - 1 degrees of freedom).

    One value has no spread: its half-width is None, not zero. Raises ``ValueError`` where there are no values or one
    is not finite (a diverged seed is a count of its own, not a value).
    """
    _check_level(level)
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"mean_ci needs at least one value, all finite, not {list(values)}")
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, float(t.ppf(0.5 + level / 2, n - 1)) * math.sqrt(variance / n)


def wilson(successes: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """Lower and upper end of Wilson's score interval for a proportion (Wilson, JASA 1927).

    It stays within [0, 1] and keeps its level near 0 and 1, where mean +- z * standard error does not.
    """
    _check_level(level)
    if not 0 <= successes <= total or total == 0:
        raise ValueError(f"wilson needs 0 <= successes <= total and total > 0, not {successes} of {total}")
    z = float(norm.ppf(0.5 + level / 2))
    rate = successes / total
    shrink = 1 + z * z / total
    centre = (rate + z * z / (2 * total)) / shrink
    half = z * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total)) / shrink
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == total else centre + half
    return low, high


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"a confidence level lies between 0 and 1, not {level}")
