"""What a trial that has not ended would reach: learnt from how the curves of finished trials went on.

A prior guess is corrected by what it missed for finished trials that looked alike. The guess: what grows with the
passes (time, cost) goes on as it did, anything else keeps its last value, which is hard to beat for one curve alone
(Kielhoefer, Mohr, van Rijn 2024). The correction: ridge regression of the finished trials' errors on the guess and on
how fast the curve moves, as Baker et al. 2017 ("Accelerating neural architecture search using performance prediction")
regress final values on partial curves and their differences; local (Cleveland 1979), since good and bad trials end
differently. What is clocked is regressed as a logarithm, as is what samplers see on a logarithmic scale. With few
finished trials the correction tends to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from elastune.search.space.objective import Floats
from elastune.search.space.scales import scale_of

ALIKE = 15  # finished trials that a correction is learnt from
FEWEST = 5  # below, there is no correction, and nobody knows how wrong the guess is
_TINY = 1e-12  # stands for a clocked value of 0 under the logarithm


@dataclass(frozen=True)
class Forecast:
    """Values at a trial's end, one per objective, and the range that should hold each in about two of three cases.

    ``low`` and ``high`` are None where too few trials have ended to tell.
    """

    values: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


@dataclass
class Curve:
    """What a trial reported: ``passes`` (n,) ascending, ``values`` (n, objectives), of ``epochs`` planned passes."""

    epochs: int
    passes: list[int] = field(default_factory=list)
    values: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, epoch: int, values: tuple[float, ...]) -> None:
        """A report; one for passes that were reported before takes the place of what was said from there on."""
        while self.passes and self.passes[-1] >= epoch:
            self.passes.pop()
            self.values.pop()
        self.passes.append(epoch)
        self.values.append(values)

    def at(self, part: float, objective: int) -> float:
        """The value after ``part`` (0 to 1) of the training, between two reports in proportion."""
        column = [row[objective] for row in self.values]
        return float(np.interp(part * self.epochs, self.passes, column))


class Extrapolator:
    """Forecasts from the curves of finished trials. ``clocked``: for each objective, whether it grows with every pass.

    A function of what was finished, in that order. Beyond a few, it learns when a tenth more have finished: ``learnt``.
    """

    def __init__(self, clocked: Sequence[bool]) -> None:
        self._clocked = tuple(clocked)
        self._finished: list[tuple[Curve, tuple[float, ...]]] = []
        self.learnt = 0
        self._known: dict[tuple[float, int, bool], tuple[Floats, Floats]] = {}
        self._heavy: dict[int, bool] = {}  # objectives whose ends have a logarithmic scale

    def finish(self, curve: Curve, values: tuple[float, ...]) -> None:
        """Learn from a trial that trained to its end."""
        if curve.passes and all(map(math.isfinite, values)):
            self._finished.append((curve, values))
            if len(self._finished) >= int(1.1 * self.learnt):
                self.learnt = len(self._finished)
                self._known.clear()
                self._heavy.clear()

    def forecast(self, curve: Curve) -> Forecast:
        """What a trial with this much of a curve would end with. The curve must hold a report."""
        part = min(1.0, curve.passes[-1] / curve.epochs)
        found = [self._one(curve, part, objective) for objective in range(len(self._clocked))]
        values = tuple(value for value, _, _ in found)
        if self.learnt < FEWEST:
            return Forecast(values)
        return Forecast(values, tuple(low for _, low, _ in found), tuple(high for _, _, high in found))

    def _one(self, curve: Curve, part: float, objective: int) -> tuple[float, float, float]:
        clocked = self._clocked[objective]
        logs = clocked or (self._logarithmic(objective) and _positive(curve, objective))
        guess = _features(curve, part, objective, clocked, logs)
        missed, spread = 0.0, 0.0
        if self.learnt >= FEWEST:
            features, errors = self._past(part, objective, logs)
            alike = np.argsort(np.abs(features[:, 0] - guess[0]), kind="stable")[:ALIKE]
            missed, spread = ridge(features[alike], errors[alike], guess)
        value = guess[0] + missed
        low, high = value - spread, value + spread
        if logs:
            value, low, high = (math.exp(min(bound, 700.0)) for bound in (value, low, high))
        return float(value), float(low), float(high)

    def _logarithmic(self, objective: int) -> bool:
        """Whether the finished trials' values have a logarithmic scale, and have had one all along."""
        if objective not in self._heavy:
            past = self._finished[: self.learnt]
            ends = scale_of([values[objective] for _, values in past])
            self._heavy[objective] = ends.name == "log" and all(_positive(curve, objective) for curve, _ in past)
        return self._heavy[objective]

    def _past(self, part: float, objective: int, logs: bool) -> tuple[Floats, Floats]:
        """Of the finished trials: features (n, 2) after this part of the training, and what the guess missed (n,)."""
        key = part, objective, logs
        if key not in self._known:
            clocked = self._clocked[objective]
            past = self._finished[: self.learnt]
            features = np.array([_features(curve, part, objective, clocked, logs) for curve, _ in past])
            ends = np.array([_scale(values[objective], logs) for _, values in past])
            self._known[key] = features, ends - features[:, 0]
        return self._known[key]


def _scale(value: float, logs: bool) -> float:
    return math.log(max(value, _TINY)) if logs else value


def _positive(curve: Curve, objective: int) -> bool:
    return all(row[objective] > 0 for row in curve.values)


def _features(curve: Curve, part: float, objective: int, clocked: bool, logs: bool) -> NDArray[np.float64]:
    """The guess of the final value, and how the second half of what was seen differs from the first. Shape (2,)."""
    last, half = curve.at(part, objective), curve.at(part / 2, objective)
    if not clocked:
        return np.array([_scale(last, logs), _scale(last, logs) - _scale(half, logs)])
    guess = _scale(last / part, True)
    recent = last + (last - half) * (1 - part) / (part / 2)
    return np.array([guess, _scale(max(recent, last), True) - guess])


def ridge(features: Floats, targets: Floats, at: Floats) -> tuple[float, float]:
    """Ridge regression of ``targets`` (n,) on standardised ``features`` (n, k): the prediction at ``at`` (k,).

    And its standard error: the root mean square of the errors of leaving each one out (Hastie et al. 2009, 7.10).
    """
    middle, width = features.mean(axis=0), features.std(axis=0) + _TINY
    design = np.column_stack([np.ones(len(features)), (features - middle) / width])
    inverse = np.linalg.inv(design.T @ design + np.diag([0.5, *np.ones(features.shape[1])]))
    weights = inverse @ design.T @ targets
    leverage = np.einsum("ij,jk,ik->i", design, inverse, design)
    left_out = (targets - design @ weights) / np.maximum(1 - leverage, 0.05)
    prediction = np.concatenate([[1.0], np.clip((at - middle) / width, -3, 3)]) @ weights  # no far extrapolation
    return float(prediction), float(np.sqrt(np.mean(left_out**2)))
