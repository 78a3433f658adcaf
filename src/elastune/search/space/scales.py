"""Objectives as samplers and early stopping see them: on a scale, chosen from the data, on which values spread evenly.

A Gaussian process takes an objective for smooth with even noise, and TPE weighs fronts by hypervolume: training times
that span three decades look to both like a few slow trials and nothing else; so they do to early stopping, which ranks
the trials of a front by the distances between them. A monotone scale changes no ranks in one objective, so the
front stays the front; reported values stay as they are (Snoek et al. 2014, "Input Warping", do the same to inputs;
Salinas et al. 2020, "A Quantile-based Approach for Hyperparameter Transfer Learning", the same to objectives).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from elastune.search.space.objective import Floats

ENOUGH = 8  # values, before their shape says anything
HEAVY = 1.0  # skewness from which a tail is heavy: that of a normal sample of 8 is beyond it once in 20 times
FAR = 3.0  # and beyond this, neither mean nor spread say where most values are


@dataclass(frozen=True)
class Scale:
    """How values of one objective are told to a sampler.

    ``raw``: as they are; ``log``: their logarithm; ``rank``: the normal quantile of their rank among ``known``, sorted.
    """

    name: Literal["raw", "log", "rank"] = "raw"
    known: tuple[float, ...] = ()

    def __call__(self, value: float) -> float:
        if self.name == "log":
            return math.log(value)
        if self.name == "rank":
            below, above = np.searchsorted(self.known, value), np.searchsorted(self.known, value, side="right")
            return NormalDist().inv_cdf((float(below + above) / 2 + 0.5) / (len(self.known) + 1))
        return value


RAW = Scale()


def scale_of(values: Sequence[float]) -> Scale:
    """The scale for an objective of which ``values`` are known: a function of them alone, whatever their order.

    A heavy tail to the right of positive values becomes a logarithm; a tail so heavy that this does not help, or to
    the other side, becomes ranks; anything else stays.
    """
    if len(values) < ENOUGH:
        return RAW
    x = np.sort(np.array(values, dtype=float))
    raw = skewness(x)
    if raw > HEAVY and x[0] > 0:
        logs = abs(skewness(np.log(x)))
        if logs < min(raw, FAR):
            return Scale("log")
    return Scale("rank", tuple(map(float, x))) if abs(raw) > FAR else RAW


def on_scales(points: Floats) -> Floats:
    """Each column of ``points`` (n, objectives) on the scale that suits it, its order kept.

    What is maximised is often turned round before, so a column of negative values has the scale of its magnitudes.
    """
    columns = []
    for column in points.T:
        sign = -1.0 if bool(np.all(column < 0)) else 1.0
        scale = scale_of(list(sign * column))
        columns.append([sign * scale(float(value)) for value in sign * column])
    return np.array(columns, dtype=float).reshape(points.T.shape).T


def skewness(x: Floats) -> float:
    """The third standardised moment; 0 where all values are equal."""
    x = x / (float(np.abs(x).max()) or 1.0)  # else the squares of large values overflow
    centred = x - x.mean()
    spread = math.sqrt(float(np.mean(centred**2)))
    if spread <= 1e-12:
        return 0.0
    return float(np.mean((centred / spread) ** 3))
