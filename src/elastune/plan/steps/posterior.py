"""Constants of a machine from a few measured steps, and what is known of all other plans: one Gaussian.

The logarithm of a step's time is taken as the physical form's (``terms``), plus errors of that form (a Gaussian process
over ``splits.coordinates``), plus noise. Constants are known beforehand within a factor each. With the form made linear
around the fitted constants all of it is one Gaussian (Rasmussen and Williams, "Gaussian Processes for Machine
Learning", 2006, sections 2.2 and 2.7), so that errors are relative, and what was not probed is told as unsure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastune.plan.steps.splits import SHAPE, StepSplits, coordinates
from elastune.plan.steps.terms import Constant, seconds
from elastune.plan.steps.work import Floats, StepWork

SHAPE_REACH = 0.5  # doublings of a shape: kernels of another one have an efficiency of their own
ERROR, REACH = 0.03, 3.0  # of the form in all else, relative, and the doublings over which it is alike
TURNS, STEP = 30, 1e-4
TRUSTED = 10  # measured steps that the model's own width weighs as much as


@dataclass(frozen=True)
class Discrepancy:
    """Relative errors: of the physical form, which plans with one ``shape`` of matrices share; ``noise`` of a step."""

    shape: float
    noise: float

    @property
    def variance(self) -> float:
        """Of the form at one plan."""
        return self.shape**2 + ERROR**2

    def between(self, first: Floats, second: Floats) -> Floats:
        """Covariance of the form's errors at rows of coordinates."""
        shapes = _squares(first[:, :SHAPE], second[:, :SHAPE])
        alike = self.shape**2 * np.exp(-shapes / (2 * SHAPE_REACH**2))
        near: Floats = ERROR**2 * np.exp(-_squares(first, second) / (2 * REACH**2))
        return alike + near


@dataclass(frozen=True)
class FittedForm:
    """The form fitted under one ``discrepancy``. ``log_constants`` in the order of ``CONSTANTS``.

    ``evidence``: logarithm of how likely the measured steps are under it. ``widened``: by how much errors of steps that
    were left out are larger than it says; intervals are as much wider.
    """

    log_constants: Floats
    discrepancy: Discrepancy
    evidence: float
    widened: float
    _points: Floats
    _slopes: Floats
    _weights: Floats
    _inverse: Floats
    _factors: Floats

    def log_seconds(self, work: StepWork, splits: StepSplits) -> tuple[Floats, Floats]:
        """Mean and variance of the logarithm of every plan's measured step."""
        cross, slopes, points = self._cross(work, splits)
        of_form = self.discrepancy.between(points, self._points)
        mean = np.log(seconds(np.exp(self.log_constants), work, splits)) + of_form @ self._weights
        own = self.discrepancy.variance + ((slopes * self._factors) ** 2).sum(axis=1)
        unknown = np.maximum(own - ((cross @ self._inverse) * cross).sum(axis=1), 0.0)
        return mean, self.widened**2 * (unknown + self.discrepancy.noise**2)

    def covariance(self, work: StepWork, splits: StepSplits) -> Floats:
        """Of what is not known of plans, noise left out: a square of all of them."""
        cross, slopes, points = self._cross(work, splits)
        scaled = slopes * self._factors
        return self.discrepancy.between(points, points) + scaled @ scaled.T - cross @ self._inverse @ cross.T

    def _cross(self, work: StepWork, splits: StepSplits) -> tuple[Floats, Floats, Floats]:
        points, slopes = coordinates(work, splits), elasticities(self.log_constants, work, splits)
        shared = (slopes * self._factors**2) @ self._slopes.T
        return self.discrepancy.between(points, self._points) + shared, slopes, points


def elasticities(log_constants: Floats, work: StepWork, splits: StepSplits) -> Floats:
    """By which part of itself each plan's time follows each constant: one row a plan."""
    middle = np.log(seconds(np.exp(log_constants), work, splits))
    moved = np.exp(log_constants + STEP * np.eye(len(log_constants)))
    return np.stack([(np.log(seconds(each, work, splits)) - middle) / STEP for each in moved], axis=1)


def fit_form(
    prior: Sequence[Constant], kind: Discrepancy, work: StepWork, splits: StepSplits, step_s: Floats, start: Floats
) -> FittedForm:
    """The likeliest constants, from ``start`` on by Gauss and Newton's method; half a step where a whole one is worse.

    Args:
        prior: What is known of the constants, in the order of ``CONSTANTS``.
        kind: How wrong the form may be.
        work: What the measured steps computed.
        splits: How they were split.
        step_s: Their seconds; none of them: what is known beforehand.
        start: Logarithms of constants.
    """
    centre = np.log([constant.prior for constant in prior])
    factors = np.log([constant.factor for constant in prior])
    points, told = coordinates(work, splits), np.log(step_s)
    errors = kind.between(points, points) + kind.noise**2 * np.eye(len(told))

    def cost(at: Floats) -> float:
        left = told - np.log(seconds(np.exp(at), work, splits))
        return float(left @ np.linalg.solve(errors, left) + (((at - centre) / factors) ** 2).sum())

    at, best = start, cost(start)
    for _ in range(TURNS):
        slopes = elasticities(at, work, splits)
        left = told - np.log(seconds(np.exp(at), work, splits)) + slopes @ (at - centre)
        scaled = slopes * factors
        move = centre + factors * (scaled.T @ np.linalg.solve(errors + scaled @ scaled.T, left)) - at
        size = 1.0
        while (tried := cost(at + size * move)) > best and size > 1e-3:
            size /= 2
        if best - tried < 1e-6:
            break
        at, best = at + size * move, tried
    slopes = elasticities(at, work, splits)
    left = told - np.log(seconds(np.exp(at), work, splits)) + slopes @ (at - centre)
    whole = errors + (slopes * factors) @ (slopes * factors).T
    inverse: Floats = np.asarray(np.linalg.inv(whole), dtype=np.float64)
    weights = np.linalg.solve(errors, told - np.log(seconds(np.exp(at), work, splits)))
    evidence = -0.5 * float(left @ inverse @ left + np.linalg.slogdet(whole)[1])
    return FittedForm(at, kind, evidence, _widened(inverse, left), points, slopes, weights, inverse, factors)


def _widened(inverse: Floats, left: Floats) -> float:
    """By how much errors of steps that were left out in turn are larger than the model thinks, drawn towards 1."""
    scores = (inverse @ left) / np.sqrt(np.diag(inverse))
    return float(np.sqrt((TRUSTED + (scores**2).sum()) / (TRUSTED + len(scores))))


def _squares(first: Floats, second: Floats) -> Floats:
    """Squared distances between rows."""
    lengths = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1)[None, :]
    squares: Floats = np.maximum(lengths - 2 * first @ second.T, 0.0)
    return squares
