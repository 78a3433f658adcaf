"""The scale on which a search sees the values of an objective.

A Gaussian process assumes a smooth objective with even noise, and TPE weighs fronts by hypervolume. Training times that
span three decades look to both like a few slow trials and nothing else. Early stopping, which ranks the trials of a
front by their distances, has the same problem. A monotone scale, chosen from the data, spreads the values evenly. It
keeps all ranks, so the Pareto front does not change, and reported values stay as they are (Snoek et al. 2014, "Input
Warping", does the same to inputs; Salinas et al. 2020, "A Quantile-based Approach for Hyperparameter Transfer
Learning", does it to objectives).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from elastune.tuning.search.objective import Floats

ENOUGH = 8  # values, before their distribution counts
HEAVY = 1.0  # skewness from which a tail is heavy: that of a normal sample of 8 is beyond it once in 20 times
FAR = 3.0  # skewness from which neither mean nor spread describe where most values are


@dataclass(frozen=True)
class Scale:
    """Maps values of one objective to the values that samplers see.

    ``raw``: as they are. ``log``: their logarithm. ``rank``: the normal quantile of their rank among ``known``.
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
    """Return the scale that suits ``values`` of an objective, whatever their order.

    Positive values with a heavy tail to the right get a logarithm. A tail that a logarithm does not even out, or a
    heavy tail to the left, gets ranks. Other values stay raw.
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
    """Return each column of ``points`` (n, objectives) on the scale that suits it; ranks are kept.

    Callers often negate a maximised objective, so a column of negative values has the scale of its magnitudes.
    """
    columns = []
    for column in points.T:
        sign = -1.0 if bool(np.all(column < 0)) else 1.0
        scale = scale_of(list(sign * column))
        columns.append([sign * scale(float(value)) for value in sign * column])
    return np.array(columns, dtype=float).reshape(points.T.shape).T


def skewness(x: Floats) -> float:
    """Return the third standardised moment; 0 where all values are equal."""
    x = x / (float(np.abs(x).max()) or 1.0)  # else the squares of large values overflow
    centred = x - x.mean()
    spread = math.sqrt(float(np.mean(centred**2)))
    if spread <= 1e-12:
        return 0.0
    return float(np.mean((centred / spread) ** 3))
