"""Batch size, or number of workers, by a schedule.

Smith et al., "Don't Decay the Learning Rate, Increase the Batch Size" (2018): where a schedule would divide the
learning rate by k, multiply the batch by k instead: as many samples, fewer steps. Workers by a schedule: for capacity
that comes and goes at known times, and for experiments.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from elastune.adapt.policies.base import Policy
from elastune.core.errors import UserError
from elastune.core.plan.batch_size import check_rule, rule_monitors

if TYPE_CHECKING:
    from elastune.adapt.policies.base import Run

Unit = Literal["epoch", "step"]


class ScheduledBatch(Policy):
    """``scheduled_batch``: at each milestone ``at``, multiply the batch by ``factor``, or take the next of ``batches``.

    A milestone counts once that many epochs or steps are complete: from an epoch's first step on, or (``by=step``) from
    the step after the one that carries the decision.

    Args:
        at: Milestones, ascending, in epochs or steps.
        factor: Multiplies the batch at each milestone.
        batches: Batch sizes, in samples, one for each milestone; replaces ``factor``.
        by: "epoch" or "step".
        lr: The rule by which the learning rate follows the batch.
        ramp_steps: Steps over which it follows; 0: at once.
        correct_momentum: Divide SGD's momentum by the learning rate's factor.
    """

    def __init__(
        self,
        *,
        at: tuple[int, ...],
        factor: float = 2.0,
        batches: tuple[int, ...] = (),
        by: Unit = "epoch",
        lr: str = "none",
        ramp_steps: int = 0,
        correct_momentum: bool = False,
    ) -> None:
        check_milestones("scheduled_batch", at, batches)
        if not 0.0 < factor < math.inf or ramp_steps < 0:
            value = f"{factor} and {ramp_steps}"
            raise UserError("scheduled_batch needs factor > 0 and ramp_steps >= 0", value, "give larger ones")
        self.at = at
        self.factor = factor
        self.batches = batches
        self.by = by
        self.lr = check_rule(lr)
        self.ramp_steps = ramp_steps
        self.correct_momentum = correct_momentum
        self.done = 0

    @property
    def monitors(self) -> tuple[str, ...]:  # type: ignore[override]
        return rule_monitors(self.lr)

    def before_epoch(self, run: Run) -> None:
        self.before_step(run)

    def before_step(self, run: Run) -> None:
        due = passed(self.at, run, self.by)
        if due <= self.done:
            return
        if self.batches:
            batch = self.batches[due - 1]
        else:
            batch = max(1, round(run.batch_size() * self.factor ** (due - self.done)))
        run.set_batch_size(batch, lr=self.lr, ramp_steps=self.ramp_steps, correct_momentum=self.correct_momentum)
        self.done = due


class ScheduledWorkers(Policy):
    """``scheduled_workers``: at each milestone ``at``, ask for the next of ``workers``.

    New workers join when they are warm. It asks once at each milestone: it does not ask again where fewer come, or some
    are lost.

    Args:
        at: Milestones, ascending, in epochs or steps.
        workers: Numbers of workers, one for each milestone.
        by: "epoch" or "step".
    """

    monitors: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, at: tuple[int, ...], workers: tuple[int, ...], by: Unit = "epoch") -> None:
        check_milestones("scheduled_workers", at, workers)
        if not workers:
            raise UserError("scheduled_workers needs workers", "none", "such as workers=2/4, one for each milestone")
        self.at = at
        self.workers = workers
        self.by = by
        self.done = 0

    def before_epoch(self, run: Run) -> None:
        self.before_step(run)

    def before_step(self, run: Run) -> None:
        due = passed(self.at, run, self.by)
        if due > self.done:
            run.resize(self.workers[due - 1])
            self.done = due


def passed(at: tuple[int, ...], run: Run, by: Unit) -> int:
    """Return how many of the milestones ``at`` are complete."""
    now = run.epoch if by == "epoch" else run.step
    return sum(milestone <= now for milestone in at)


def check_milestones(policy: str, at: tuple[int, ...], values: tuple[int, ...]) -> None:
    """Check that milestones ascend from 0, and that ``values``, where given, are one of at least 1 for each.

    Raises:
        UserError: Where they do not.
    """
    if not at or min(at) < 0 or list(at) != sorted(set(at)):
        raise UserError(f"{policy}'s milestones must ascend from 0", "/".join(map(str, at)), "such as at=30/60/90")
    if values and (len(values) != len(at) or min(values) < 1):
        shown = f"{'/'.join(map(str, values))} at {'/'.join(map(str, at))}"
        raise UserError(
            f"{policy} needs one value of at least 1 for each milestone", shown, "give as many as milestones"
        )
