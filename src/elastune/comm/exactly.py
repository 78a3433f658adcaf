"""Sums and means of numbers that do not depend on their order, nor on which worker held which."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction


def exact_sum(values: Iterable[float]) -> float:
    """The sum, rounded once (Shewchuk 1997, as ``math.fsum``); of infinities and NaN what adding them gives."""
    numbers = list(values)
    if wild := [x for x in numbers if not math.isfinite(x)]:
        return sum(wild)  # them alone: finite numbers could overflow on the way, in one order and not in another
    try:
        return math.fsum(numbers)
    except OverflowError:  # of a partial sum, perhaps not of the whole
        return _rounded(sum(map(Fraction, numbers), Fraction(0)))


def exact_mean(values: Iterable[float], weights: Iterable[float] | None = None) -> float:
    """The (weighted) mean, rounded once: equal values have exactly their own value as mean. NaN of nothing."""
    numbers = list(values)
    parts = [1.0] * len(numbers) if weights is None else list(weights)
    if wild := [x for x in numbers if not math.isfinite(x)]:
        return sum(wild)
    total = sum(map(Fraction, parts), Fraction(0))
    if total == 0:
        return math.nan
    return float(sum((Fraction(x) * Fraction(w) for x, w in zip(numbers, parts, strict=True)), Fraction(0)) / total)


def _rounded(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
