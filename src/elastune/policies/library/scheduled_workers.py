"""The number of workers by a schedule: for capacity that comes and goes at known times, and for experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from elastune.core.errors import UserError
from elastune.policies.base import Policy
from elastune.policies.library.scheduled_batch import Unit, check_milestones, passed

if TYPE_CHECKING:
    from elastune.policies.run import Run


class ScheduledWorkers(Policy):
    """``scheduled_workers``: at each of the epochs (or steps, with ``by=step``) ``at`` ask for the next of ``workers``.

    They come when they are warm. It asks once at each milestone: where fewer come, or some are lost, that is so.
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
        due = passed(self.at, run.epoch if self.by == "epoch" else run.step)
        if due > self.done:
            run.resize(self.workers[due - 1])
            self.done = due

    def state(self) -> dict[str, Any]:
        return {"done": self.done}
