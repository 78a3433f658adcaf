"""The contract of a monitor, and the exponentially weighted averages that estimators are made of.

Readings of single steps go in, signals come out, and the state is explicit.

For averages, a reading adds a vector of terms f to sums S, and f f' to a matrix M. Both forget: S <- k S + f and
M <- k^2 M + f f' with k = 1 - 1/memory. Sums start at zero, and their ratios need no correction for the start. (Ratios
of Adam's moments do, because Adam does not count its weights along.)

For a quantity q(S) that does not depend on the unit of the weights, grad q' M grad q estimates its variance. This is
the delta method, with each reading's own deviation in place of a modelled one (the "sandwich" of White 1980, "A
heteroskedasticity-consistent covariance matrix estimator"). So readings may differ in weight and precision, and
correlations between terms are included. Readings count as independent of each other; drift within the memory widens the
error, as it should.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from elastune.core.decisions import Signal

Need = Literal["norms", "preconditioned", "times", "sharpness", "trace"]
State = dict[str, Any]  # JSON: it travels to joiners and into checkpoints


@dataclass(frozen=True)
class WorkerTimes:
    """How one worker spent the step before this one, in seconds. All zero: nothing is known.

    ``UNKNOWN_TIMES`` stands for a worker that compiled a model, for which all others waited.

    Attributes:
        data_s: Seconds of fetching samples.
        compute_s: Seconds in the user's lines and the backward pass.
        wait_s: Seconds of waiting for the reduction: for slower workers and for the network.
    """

    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The time of the whole step, in seconds."""
        return self.data_s + self.compute_s + self.wait_s


UNKNOWN_TIMES = WorkerTimes(-1.0, -1.0, -1.0)


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of one step's gradients, before any clipping.

    The global batch of ``batch`` samples was cut into ``parts`` (slots, workers or micro-batches). Part p has n_p
    samples, mean gradient g_p and weight w_p = n_p / batch. ``part_square`` is ``sum_p w_p |g_p|^2``, ``square`` is
    ``|g|^2`` of g = sum_p w_p g_p. For ANY sizes of the parts, with G the true gradient and Sigma the covariance of one
    sample's:
    ``E part_square = |G|^2 + parts tr(Sigma) / batch`` and ``E square = |G|^2 + tr(Sigma) / batch``.
    """

    batch: int
    parts: int
    part_square: float
    square: float


@dataclass(frozen=True)
class Reading:
    """What the reduction of one step brought; equal on every worker.

    Attributes:
        step: The number of the step, from 1.
        batch: Samples of the global batch.
        workers: Number of workers.
        loss: The mean loss over the global batch, at the parameters before the step.
        norms: Squared norms of gradients; None where they were not taken, or the step had one part only.
        preconditioned: The same of gradients divided by sqrt(v) + eps, with Adam's second moment v before this step.
        times: The workers' times, by rank.
        sharpness: The top eigenvalue of the loss's Hessian on the step's first part.
        trace: Hutchinson's estimate of the trace of its Hessian over the whole batch.
    """

    step: int
    batch: int
    workers: int
    loss: float
    norms: GradientNorms | None = None
    preconditioned: GradientNorms | None = None
    times: tuple[WorkerTimes, ...] = ()
    sharpness: float | None = None
    trace: float | None = None


class Monitor(ABC):
    """One estimator of a training's signals. Inherit from this class to write a monitor.

    A monitor is immutable: everything that changes is in its state, a JSON value that is equal on every worker.

    Attributes:
        name: Its name for ``--monitor``.
        needs: What its readings must have.
        gives: The names of all signals that it may give.
        every: Steps from one reading to the next.

    Example:
        >>> class LargestLoss(Monitor):
        ...     name, gives = "largest_loss", frozenset({"largest_loss"})
        ...     def init(self) -> State:
        ...         return None
        ...     def update(self, state: State, reading: Reading) -> State:
        ...         return reading.loss if state is None else max(state, reading.loss)
        ...     def signals(self, state: State) -> dict[str, Signal]:
        ...         return {} if state is None else {"largest_loss": Signal(state, None)}
    """

    name: str
    needs: frozenset[Need]
    gives: frozenset[str]  # the names of all signals that it may give
    every: int = 1  # steps from one reading to the next

    @abstractmethod
    def init(self) -> State:
        """Return the state before the first reading: JSON, complete."""

    @abstractmethod
    def update(self, state: State, reading: Reading) -> State:
        """Return the state after ``reading``; a value that is not finite, or missing, leaves the state as it is."""

    @abstractmethod
    def signals(self, state: State) -> dict[str, Signal]:
        """Return the signals that are known; empty before the first usable reading. No value is NaN."""


# Exponentially weighted averages of readings, with the standard error of any quantity computed from them.


def empty(size: int) -> State:
    """Return the state before the first reading, for readings of ``size`` terms each."""
    return {"sums": [0.0] * size, "products": [0.0] * (size * size)}


def updated(state: State, terms: Sequence[float], memory: float) -> State:
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
    return updated(state, (weight, weight * value), memory)


def mean(state: State) -> Signal | None:
    """Return the weighted mean and its standard error; None before the first reading."""
    weight, total = state["sums"]
    if weight <= 0:
        return None
    value = total / weight
    return Signal(value, error(state, (-value / weight, 1 / weight), effective_sample_size(state)))
