"""Grow the batch towards the gradient noise scale.

McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), section 2: below the noise scale
tr(Sigma) / |G|^2, a larger batch takes nearly as many steps fewer as it is larger; far above it, it wastes samples. The
scale grows as the loss falls, and so does the best batch. Mai et al., "KungFu" (OSDI 2020), run it as a policy.

Limits: it cannot tell whether larger batches are faster on these workers (``goodput`` asks that). The scale depends on
where training is, and so on the learning rate (their "temperature"): tune that first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from elastune.adapt.policies.base import Policy
from elastune.core.errors import UserError
from elastune.core.plan.batch_size import check_rule

if TYPE_CHECKING:
    from elastune.adapt.policies.base import Run


def wanted_batch(
    batch: int, noise: float, error: float, *, factor: float, low: int, high: int, most_doublings: int, shrink: bool
) -> int:
    """Return the batch that the noise scale asks for: ``batch`` doubled or halved, within ``low`` to ``high``.

    The batch is doubled, up to ``most_doublings`` times, while ``noise`` less its standard ``error`` is at least
    ``factor`` times the batch before. If ``shrink`` is set, it is halved once where noise and error together are at
    most batch / factor. An unknown (NaN) noise asks for nothing; an unknown error counts as none. All sizes are in
    samples.
    """
    error = 0.0 if math.isnan(error) else error
    wanted = batch
    for _ in range(most_doublings):
        if noise - error >= factor * wanted and 2 * wanted <= high:
            wanted *= 2
    half = batch // 2
    if shrink and wanted == batch and half >= low and noise + error <= batch / factor and noise < factor * half:
        return half  # which would not be doubled again
    return wanted


def with_batch(workers: int, old: int, new: int, low: int, high: int) -> int:
    """Return as many workers as keep the samples of each worker, within ``low`` to ``high``."""
    return max(low, min(high, round(workers * new / old)))


class GrowWithNoise(Policy):
    """``gns``: double the batch when the noise scale, less its standard error, reaches ``factor`` times the batch.

    Args:
        max_batch: The largest batch, in samples; None: an epoch.
        min_batch: The smallest batch, in samples.
        factor: How many times the batch the noise scale must be.
        settle: First steps of the run in which nothing changes.
        most_doublings: The most doublings at once.
        lr: The rule by which the learning rate follows the batch.
        ramp_steps: Steps over which it follows; 0: at once.
        correct_momentum: Divide SGD's momentum by the learning rate's factor.
        shrink: Halve the batch when the scale has fallen below the batch / factor.
        workers: The number of workers grows with the batch.
    """

    monitors: ClassVar[tuple[str, ...]] = ("noise_scale",)
    default_guards: ClassVar[Mapping[str, int]] = {"patience": 3, "cooldown": 20}

    def __init__(
        self,
        *,
        max_batch: int | None = None,
        min_batch: int = 1,
        factor: float = 2.0,
        settle: int = 20,
        most_doublings: int = 1,
        lr: str = "adascale",
        ramp_steps: int = 0,
        correct_momentum: bool = False,
        shrink: bool = False,
        workers: bool = False,
    ) -> None:
        if not 1 <= min_batch <= (math.inf if max_batch is None else max_batch):
            raise UserError("gns needs 1 <= min_batch <= max_batch", f"{min_batch} and {max_batch}", "swap them")
        if factor < 1.0 or most_doublings < 1 or ramp_steps < 0 or settle < 0:
            value = f"{factor}, {most_doublings}, {ramp_steps} and {settle}"
            rule = "gns needs factor >= 1, most_doublings >= 1, ramp_steps >= 0 and settle >= 0"
            raise UserError(rule, value, "raise them")
        self.max_batch = max_batch
        self.min_batch = min_batch
        self.factor = factor
        self.settle = settle
        self.most_doublings = most_doublings
        self.lr = check_rule(lr)
        self.ramp_steps = ramp_steps
        self.correct_momentum = correct_momentum
        self.shrink = shrink
        self.workers = workers

    def after_step(self, run: Run) -> None:
        if run.step < self.settle:  # of the first few readings not even the error can be trusted
            return
        batch = run.batch_size()
        wanted = wanted_batch(
            batch,
            run.grad_noise_scale(),
            run.error("noise_scale"),
            factor=self.factor,
            low=self.min_batch,
            high=min(bound for bound in (self.max_batch, run.limits.longest_batch, 2**31) if bound is not None),
            most_doublings=self.most_doublings,
            shrink=self.shrink,
        )
        if wanted == batch:
            return
        run.set_batch_size(wanted, lr=self.lr, ramp_steps=self.ramp_steps, correct_momentum=self.correct_momentum)
        if self.workers:
            run.resize(with_batch(run.size(), batch, wanted, run.limits.low, run.limits.high))
