"""Exponentially weighted averages of readings, with the standard error of any quantity computed from them.

A reading adds a vector of terms f to sums S, and f f' to a matrix M. Both forget: S <- k S + f and M <- k^2 M + f f'
with k = 1 - 1/memory. Sums start at zero, and their ratios need no correction for the start. (Ratios of Adam's moments
do, because Adam does not count its weights along.)

For a quantity q(S) that does not depend on the unit of the weights, grad q' M grad q estimates its variance. This is
the delta method, with each reading's own deviation in place of a modelled one (the "sandwich" of White 1980, "A
heteroskedasticity-consistent covariance matrix estimator"). So readings may differ in weight and precision, and
correlations between terms are included. Readings count as independent of each other; drift within the memory widens the
error, as it should.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastune.core.signals import Signal
from elastune.monitors.base import State


def empty(size: int) -> State:
    """Return the state before the first reading, for readings of ``size`` terms each."""
    return {"sums": [0.0] * size, "products": [0.0] * (size * size)}


def folded(state: State, terms: Sequence[float], memory: float) -> State:
    """Return ``state`` with one more reading; ``state`` itself where the sums would not be finite."""
    keep = 1 - 1 / memory
    squared = keep * keep
    outer = [a * b for a in terms for b in terms]
    sums = [keep * old + new for old, new in zip(state["sums"], terms, strict=True)]
    products = [squared * old + new for old, new in zip(state["products"], outer, strict=True)]
    if not all(map(math.isfinite, sums)) or not all(map(math.isfinite, products)):
        return state
    return {"sums": sums, "products": products}


def effective_sample_size(state: State, weight: int = 0) -> float:
    """Return the effective sample size (Kish): (sum w)^2 / sum w^2. ``weight`` is the index of the term w."""
    size = len(state["sums"])
    squares = state["products"][weight * size + weight]
    return float(state["sums"][weight] ** 2 / squares) if squares > 0 else 0.0


def error(state: State, slope: Sequence[float], count: float) -> float | None:
    """Return the standard error of a quantity whose gradient by the sums is ``slope``; None for less than two readings.

    ``count`` (the effective sample size) widens it by n / (n - 1): deviations are from an average that contains them.
    """
    if count <= 1 + 1e-9:
        return None
    size, products = len(slope), state["products"]
    variance = sum(slope[i] * slope[j] * products[i * size + j] for i in range(size) for j in range(size))
    result = math.sqrt(max(variance, 0.0) * count / (count - 1))
    return result if math.isfinite(result) else None


# -- the plain case: the weighted mean of one number, of terms (w, w x) ------------------------------------------------


def with_value(state: State, value: float, weight: float, memory: float) -> State:
    """Return the mean's ``state`` with one more ``value``; a value that is not finite leaves it as it is."""
    return folded(state, (weight, weight * value), memory)


def mean(state: State) -> Signal | None:
    """Return the weighted mean and its standard error; None before the first reading."""
    weight, total = state["sums"]
    if weight <= 0:
        return None
    value = total / weight
    return Signal(value, error(state, (-value / weight, 1 / weight), effective_sample_size(state)))
