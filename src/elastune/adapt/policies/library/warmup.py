"""Warm-up of the learning rate (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2, gradual warmup).

A large batch's learning rate is too large for the first steps, when the loss curves most. It begins at 1/k of itself
and grows by equal parts. The paper takes k = the number of small batches in a large one, and 5 epochs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from elastune.adapt.policies.base import Policy
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.adapt.policies.base import Run


class WarmUp(Policy):
    """``warmup``: the learning rate begins at 1/``k`` of the program's and grows to it over ``steps`` or ``epochs``.

    The policy works by a factor, so schedulers and other policies may change the rate at the same time. It makes two
    decisions: before training it divides the rate; after the first step it begins the ramp.

    Args:
        k: The rate begins at 1/``k``; above 1.
        steps: The length of the ramp, in steps.
        epochs: The length of the ramp, in epochs; give either this or ``steps``.
    """

    monitors: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, k: float = 8.0, steps: int = 0, epochs: float = 0.0) -> None:
        if not 1.0 < k < math.inf:
            raise UserError("warmup's k must be above 1", k, "such as 8: begin at an eighth of the learning rate")
        if (steps > 0) == (epochs > 0) or steps < 0 or not 0.0 <= epochs < math.inf:
            raise UserError("warmup needs either steps or epochs", f"{steps} and {epochs}", "give one, above 0")
        self.k = k
        self.steps = steps
        self.epochs = epochs
        self.phase = 0  # 0: nothing yet; 1: divided; 2: the ramp has begun

    def before_train(self, run: Run) -> None:
        if self.phase == 0 and run.step == 0:
            run.scale_lr(1.0 / self.k)
            self.phase = 1

    def after_step(self, run: Run) -> None:
        if self.phase == 1:
            run.scale_lr(self.k, ramp_steps=self.steps or self._steps(run))
            self.phase = 2

    def _steps(self, run: Run) -> int:
        samples = run.limits.longest_batch
        if samples is None:
            raise UserError("warmup by epochs needs to know how long one is", f"epochs={self.epochs}", "give steps")
        return max(1, math.ceil(self.epochs * samples / run.batch_size()))
