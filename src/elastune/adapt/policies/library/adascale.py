"""AdaScale: the learning rate that a larger batch has earned.

Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for Distributed Training" (2020), algorithm 1: at S times the
base batch the learning rate is the base one times the gain (sigma^2 + mu^2) / (sigma^2 / S + mu^2) in [1, S], and a
step counts as ``gain`` steps of the schedule ("scale-invariant iterations"). For SGD; it does not say what Adam needs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from elastune.adapt.policies.base import Policy
from elastune.core.errors import UserError
from elastune.core.plan.batch_size import gain

if TYPE_CHECKING:
    from elastune.adapt.policies.base import Run


class AdaScale(Policy):
    """``adascale``: the learning rate is the program's, times the gain of the batch over ``base_batch``.

    The factor multiplies what schedulers and other policies make of the rate. Policies that change the batch at the
    same time must leave the rate alone (``lr=none``).

    Args:
        base_batch: The batch, in samples, that the program's learning rate was tuned for; None: the run's first batch.
        tolerance: The rate changes only when the gain has changed by more than this part.

    Attributes:
        scale_invariant_steps: The steps so far, in steps at the base batch.
    """

    monitors: ClassVar[tuple[str, ...]] = ("noise_scale",)

    def __init__(self, *, base_batch: int | None = None, tolerance: float = 0.05) -> None:
        if base_batch is not None and base_batch < 1:
            raise UserError("adascale's base_batch must be at least 1", base_batch, "give a larger one")
        if tolerance < 0.0:
            raise UserError("adascale's tolerance must not be negative", tolerance, "such as 0.05")
        self.base_batch = base_batch
        self.tolerance = tolerance
        self.gain = 1.0
        self.scale_invariant_steps = 0.0

    def before_step(self, run: Run) -> None:
        # Not in after_step: what a guard drops there would take the step's count with it
        self.scale_invariant_steps += self.gain

    def after_step(self, run: Run) -> None:
        variance, square = run.grad_variance(), run.grad_square()
        if math.isnan(variance) or math.isnan(square):
            return
        base = self.base_batch or run.snapshot.batch_at_start
        wanted = gain(variance, square, base, run.batch_size())
        if abs(math.log(wanted / self.gain)) <= math.log1p(self.tolerance):
            return
        run.scale_lr(wanted / self.gain)
        self.gain = wanted
