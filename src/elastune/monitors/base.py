"""The contract of a monitor: what one step's reduction brought goes in, signals come out; the state is explicit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from elastune.core.signals import Signal

Need = Literal["norms", "preconditioned", "times", "sharpness", "trace"]
State = dict[str, Any]  # JSON: it travels to joiners and into checkpoints


@dataclass(frozen=True)
class WorkerTimes:
    """Seconds that one worker spent on the step before this one, by what for.

    ``data_s`` fetching samples, ``compute_s`` in the user's lines and the backward pass, ``wait_s`` waiting for the
    reduction (for slower workers, and for the network). All zero: nothing is known of it. ``UNTOLD``: this worker
    compiled a model, for which all others waited.
    """

    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.data_s + self.compute_s + self.wait_s


UNTOLD = WorkerTimes(-1.0, -1.0, -1.0)


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of one step's gradients, before any clipping.

    The global batch of ``batch`` samples was cut into ``parts`` (slots, workers or micro-batches), part p of n_p
    samples with mean gradient g_p and weight w_p = n_p / batch. ``part_square`` is sum_p w_p |g_p|^2, ``square`` is
    |g|^2 of g = sum_p w_p g_p. For ANY sizes of the parts, with G the true gradient and Sigma the covariance of one
    sample's: E part_square = |G|^2 + parts tr(Sigma) / batch and E square = |G|^2 + tr(Sigma) / batch.
    """

    batch: int
    parts: int
    part_square: float
    square: float


@dataclass(frozen=True)
class Reading:
    """What the reduction of step ``step`` (counted from 1) brought; equal on every worker.

    ``norms`` is None where they were not taken or a step had one part only. ``preconditioned``: the same of gradients
    divided by sqrt(v) + eps of Adam's second moment before this step. ``times``: by rank. ``loss``: mean over the
    global batch, at the parameters before the step. ``sharpness``: top eigenvalue of the loss's Hessian on the step's
    first part; ``trace``: Hutchinson's estimate of the trace of its Hessian over the whole batch.
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
    """One estimator. Immutable: all that changes is in the state, which every worker holds alike."""

    name: str
    needs: frozenset[Need]
    gives: frozenset[str]  # the names of all signals that it may tell
    every: int = 1  # steps from one reading to the next

    @abstractmethod
    def init(self) -> State:
        """The state before the first reading: JSON, complete."""

    @abstractmethod
    def update(self, state: State, reading: Reading) -> State:
        """The state after ``reading``; what is not finite, or missing, leaves it as it is."""

    @abstractmethod
    def signals(self, state: State) -> dict[str, Signal]:
        """What can be said by now; empty before the first usable reading. Never NaN."""
