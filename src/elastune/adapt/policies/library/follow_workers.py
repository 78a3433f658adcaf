"""Keep the samples of each worker: the global batch, and the learning rate with it, follow the number of workers.

Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.1: k times the workers, k times the batch, k times the
learning rate; section 2.1's remark on momentum correction for the step at which the rate changes. Lin et al., "Dynamic
Mini-batch SGD for Elastic Distributed Training" (2019), do so while workers come and go.

This is the one policy by which the number of workers changes the result: the result depends on when workers come and
go. Each change is a decision, journaled with its cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from elastune.adapt.policies.base import Hook, Policy
from elastune.core.errors import UserError
from elastune.core.plan.batch_size import check_rule, rule_monitors

if TYPE_CHECKING:
    from elastune.adapt.policies.base import Run


@dataclass(frozen=True)
class Share:
    """The batch per worker that is kept: ``batch`` samples on ``workers`` workers. 0: nothing seen yet.

    Attributes:
        seen: The workers that the batch was last fitted to.
    """

    batch: int = 0
    workers: int = 0
    seen: int = 0

    def on(self, workers: int, longest: int | None) -> int:
        """Return the global batch for ``workers`` workers, in samples; at most ``longest``."""
        batch = max(1, round(self.batch * workers / self.workers))
        return batch if longest is None else min(batch, longest)


@dataclass(frozen=True)
class FollowWorkers(Policy):
    """``follow_workers``: the global batch changes in proportion to the number of workers.

    The proportion is that of the first step, or of the batch that another decision left. A batch that would be longer
    than an epoch is cut to the epoch.

    Args:
        lr: The rule by which the learning rate follows the batch.
        ramp_steps: Steps over which it follows; 0: at once.
        correct_momentum: Divide SGD's momentum by the learning rate's factor.
    """

    hooks: ClassVar[tuple[Hook, ...]] = ("before_step",)

    lr: str = "linear"
    ramp_steps: int = 0
    correct_momentum: bool = True

    def __post_init__(self) -> None:
        check_rule(self.lr)
        if self.ramp_steps < 0:
            raise UserError("follow_workers needs ramp_steps >= 0", self.ramp_steps, "give 0 for at once")

    @property
    def monitors(self) -> tuple[str, ...]:  # type: ignore[override]
        return rule_monitors(self.lr)

    def init(self) -> Share:
        return Share()

    def decide(self, hook: Hook, state: Share, run: Run) -> Share:
        """Fit the batch to the present workers."""
        workers, batch, longest = run.size(), run.batch_size(), run.limits.longest_batch
        if state.seen == 0 or state.on(state.seen, longest) != batch:
            state = Share(batch, state.seen or workers, state.seen or workers)
        if workers != state.seen:
            wanted = state.on(workers, longest)
            run.set_batch_size(wanted, lr=self.lr, ramp_steps=self.ramp_steps, correct_momentum=self.correct_momentum)
        return replace(state, seen=workers)
