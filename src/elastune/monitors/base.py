"""The contract of a monitor: readings of single steps go in, signals come out; its state is explicit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from elastune.core.signals import Signal

Need = Literal["norms", "preconditioned", "times", "sharpness", "trace"]
State = dict[str, Any]  # JSON: it travels to joiners and into checkpoints


@dataclass(frozen=True)
class WorkerTimes:
    """How one worker spent the step before this one, in seconds. All zero: nothing is known.

    ``UNTOLD`` stands for a worker that compiled a model, for which all others waited.

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


UNTOLD = WorkerTimes(-1.0, -1.0, -1.0)


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of one step's gradients, before any clipping.

    The global batch of ``batch`` samples was cut into ``parts`` (slots, workers or micro-batches). Part p has n_p
    samples, mean gradient g_p and weight w_p = n_p / batch. ``part_square`` is sum_p w_p |g_p|^2, ``square`` is |g|^2
    of g = sum_p w_p g_p. For ANY sizes of the parts, with G the true gradient and Sigma the covariance of one sample's:
    E part_square = |G|^2 + parts tr(Sigma) / batch and E square = |G|^2 + tr(Sigma) / batch.
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
    """One estimator. A monitor is immutable: all that changes is in its state, which is equal on every worker.

    Attributes:
        name: Its name for ``--monitor``.
        needs: What its readings must have.
        gives: The names of all signals that it may give.
        every: Steps from one reading to the next.
    """

    name: str
    needs: frozenset[Need]
    gives: frozenset[str]  # the names of all signals that it may tell
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
