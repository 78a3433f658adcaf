"""What a policy can read of a run."""

from __future__ import annotations

import math
from collections.abc import Collection

from elastune.core.errors import UserError
from elastune.core.signals import Snapshot


class RunView:
    """Where a run stands and what its monitors measured. All but ``rank()`` is equal on every worker.

    Attributes:
        snapshot: All of it as one value.
    """

    __slots__ = ("_known", "_rank", "snapshot")

    def __init__(self, snapshot: Snapshot, rank: int, known: Collection[str] | None) -> None:
        self.snapshot = snapshot
        self._rank = rank
        self._known = known

    # -- where training stands ----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self.snapshot.step

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self.snapshot.epoch

    @property
    def samples(self) -> int:
        """The number of samples that all workers used so far."""
        return self.snapshot.samples

    @property
    def seconds(self) -> float:
        """Training time so far, in seconds."""
        return self.snapshot.seconds

    def rank(self) -> int:
        """Return this worker's rank, from 0.

        What depends on the rank must go through a collective before it decides anything.
        """
        return self._rank

    def size(self) -> int:
        """Return the number of workers."""
        return self.snapshot.workers

    def batch_size(self) -> int:
        """Return the global batch size, in samples."""
        return self.snapshot.batch_size

    def micro_batch(self) -> int | None:
        """Return the most samples of one forward pass; None: no bound."""
        return self.snapshot.micro_batch

    def sync(self) -> str:
        """Return the sync strategy, as ``--sync`` has it."""
        return self.snapshot.sync

    def left_out(self) -> int:
        """Return how many learners the newest round ended without: a quorum does not wait for more than it needs."""
        return self.snapshot.left_out

    def lr(self) -> float:
        """Return the learning rate of the first parameter group."""
        return self.snapshot.lr

    # -- what was measured --------------------------------------------------------------------------------------------

    def signal(self, name: str) -> float:
        """Return the newest value of a monitor's signal; NaN until it is measured."""
        found = self.snapshot.signals.get(name)
        if found is not None:
            return found.value
        self._check_known(name)
        return math.nan

    def error(self, name: str) -> float:
        """Return the standard error of a signal; NaN where none is known."""
        found = self.snapshot.signals.get(name)
        if found is None:
            self._check_known(name)
        return math.nan if found is None or found.error is None else found.error

    def grad_noise_scale(self) -> float:
        """Return the simple noise scale tr(Sigma) / |G|^2, in samples (McCandlish et al. 2018, section 2.2)."""
        return self.signal("noise_scale")

    def grad_variance(self) -> float:
        """Return tr(Sigma), the variance of one sample's gradient."""
        return self.signal("gradient_variance")

    def grad_square(self) -> float:
        """Return |G|^2, the square of the true gradient's norm."""
        return self.signal("gradient_square")

    def step_time(self) -> float:
        """Return the time of a step, in seconds."""
        return self.signal("step_s")

    def throughput(self) -> float:
        """Return the samples a second of all workers together."""
        return self.signal("throughput")

    def loss(self) -> float:
        """Return the smoothed training loss."""
        return self.signal("loss")

    def _check_known(self, name: str) -> None:
        if self._known is not None and name not in self._known:
            known = ", ".join(sorted({*self._known, *self.snapshot.signals})) or "none"
            fix = f"name its monitor in the policy's `monitors` or with --monitor; signals of this run: {known}"
            raise UserError("no monitor of this run gives this signal", name, fix)
