"""How workers agree, by how many there are, or by how dear the network is.

Mai et al., "KungFu: Making Training in Distributed Machine Learning Adaptive" (OSDI 2020), section 6.2, switch from
synchronous SGD to model averaging where a cluster grows large. What a step's exchange costs beside its computing
decides how many steps of their own pay for one (Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best
Error-Runtime Trade-off in Local-Update SGD", MLSys 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from elastune.core.options import Range, check
from elastune.core.sync_plan import Moments, SyncPlan
from elastune.policies.base import Hook, Policy

if TYPE_CHECKING:
    from elastune.policies.run import Run

Apart = Literal["local", "diloco", "averaging", "gossip", "pair_averaging"]
USUAL_LEARNERS = 8


@dataclass(frozen=True)
class SyncBySize(Policy):
    """``sync_by_size``: synchronous up to ``above`` workers; with more, ``strategy`` with ``learners`` and ``every``.

    It is back to all-reduce as soon as there are no more than that. Switching shows in what the run comes to, and so,
    under this policy, does the number of workers: each change is journaled with its cause. ``learners``: None, as many
    as ``fitting_learners`` has.
    """

    hooks: ClassVar[tuple[Hook, ...]] = ("before_step",)
    monitors: ClassVar[tuple[str, ...]] = ()

    above: Annotated[int, Range(1)] = 4
    strategy: Apart = "averaging"
    learners: Annotated[int | None, Range(1)] = None
    every: Annotated[int, Range(1)] = 16
    moments: Moments = "mean"

    def __post_init__(self) -> None:
        check("sync_by_size", self)

    def decide(self, hook: Hook, state: dict[str, Any], run: Run) -> dict[str, Any]:
        """By the workers that there are now."""
        apart = self._apart(run.limits.num_slots, run.limits.high)
        run.set_sync(str(apart if run.size() > self.above else SyncPlan()))
        return state

    def strategies(self, num_slots: int, most_workers: int) -> Sequence[str]:
        """The one that a run of more than ``above`` workers comes to."""
        return (str(self._apart(num_slots, most_workers)),) if most_workers > self.above else ()

    def _apart(self, num_slots: int | None, most_workers: int) -> SyncPlan:
        learners = self.learners or fitting_learners(num_slots, most_workers)
        return SyncPlan(self.strategy, learners, self.every, self.moments)


@dataclass(frozen=True)
class SyncByLink(Policy):
    """``sync_by_link``: where exchanges take more than ``share`` of the time of all-reduce steps, learners take steps
    of their own: as few (a power of two, at most ``most``) as bring that share down to ``share``.

    Not while gradients tell more than they are noisy: where the noise scale is known to be below ``noise`` times a
    learner's batch, learners would pull apart, and it stays with (or goes back to) all-reduce. With learners apart no
    noise scale is measured, so it looks again after ``again`` steps: it then trains synchronously until it knows.
    ``learners``: None, as many as ``fitting_learners`` has.
    """

    hooks: ClassVar[tuple[Hook, ...]] = ("before_step",)
    monitors: ClassVar[tuple[str, ...]] = ("performance", "noise_scale")

    share: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.3
    strategy: Apart = "local"
    learners: Annotated[int | None, Range(1)] = None
    most: Annotated[int, Range(1)] = 64
    noise: Annotated[float, Range(0)] = 1.0
    looks: Annotated[int, Range(1)] = 10
    again: Annotated[int, Range(1)] = 500
    moments: Moments = "mean"

    def __post_init__(self) -> None:
        check("sync_by_link", self)

    def init(self) -> int:
        """The step at which the strategy in use was chosen."""
        return 0

    def decide(self, hook: Hook, state: int, run: Run) -> int:
        """By what the exchanges of all-reduce take now."""
        apart = SyncPlan.parse(run.sync()).in_rounds
        if apart and run.step - state >= self.again:
            run.set_sync("allreduce")
            return run.step
        if apart or run.step - state < self.looks:
            return state
        exchange_s, busy_s = run.signal("reduce_s"), run.signal("compute_s") + run.signal("data_s")
        every = steps_apart(exchange_s, busy_s, self.share, self.most)
        learners = self.learners or fitting_learners(run.limits.num_slots, run.limits.high)
        if every < 2 or run.signal("noise_scale") < self.noise * run.batch_size() / learners:
            return state
        run.set_sync(str(SyncPlan(self.strategy, learners, every, self.moments)))
        return run.step

    def strategies(self, num_slots: int, most_workers: int) -> Sequence[str]:
        """The one with the shortest rounds that it may choose: which it does choose is known only when it has
        measured."""
        learners = self.learners or fitting_learners(num_slots, most_workers)
        return (str(SyncPlan(self.strategy, learners, 2, self.moments)),) if self.most > 1 else ()


def fitting_learners(num_slots: int | None, most_workers: int) -> int:
    """As many learners as a run's slots and workers allow for: 8, or else the fewest that divide the slots and are
    at least one a worker. Both belong to how the run was begun, so it is the same throughout."""
    if num_slots is None:
        return max(USUAL_LEARNERS, most_workers)
    if num_slots % USUAL_LEARNERS == 0 and most_workers <= USUAL_LEARNERS:
        return USUAL_LEARNERS
    return next((n for n in range(most_workers, num_slots) if num_slots % n == 0), num_slots)


def steps_apart(exchange_s: float, busy_s: float, share: float, most: int) -> int:
    """The fewest steps, a power of two of at most ``most``, of which one exchange takes at most ``share`` of the time;
    0 where nothing is known. e / (e + k b) <= share holds from k = e (1 - share) / (share b) on."""
    if not (exchange_s > 0 and busy_s > 0):  # NaN before the first measurement
        return 0
    least = exchange_s * (1 - share) / (share * busy_s)
    return min(most, 1 << max(0, math.ceil(math.log2(least)))) if least > 1 else 1
