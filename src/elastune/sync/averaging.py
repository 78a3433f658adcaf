"""Synchronous model averaging: within a round each learner is pulled towards the mean of all."""

from __future__ import annotations

from collections.abc import Mapping

from elastune.comm.exact import ExactReducer
from elastune.comm.group import Group
from elastune.core.sync_plan import SyncPlan
from elastune.sync.local import Local, Values


class Averaging(Local):
    """In a mix a learner's parameters x become x + pull (mean - x).

    (Source: KungFu's SMA, Mai et al., OSDI 2020, after Crossbow, Koliousis et al., VLDB 2019, which restarts its
    learners from their mean as a round's end does here.) The mean is taken along the canonical tree over learners.
    """

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        super().__init__(plan, like, group)
        self._reducer = ExactReducer([value.detach() for value in like], plan.learners, group)

    def mix(self, learners: Mapping[int, Values], turn: int) -> None:
        self._reducer.begin_with(learners)
        means = [total / self.plan.learners for total in self._reducer.finish()]
        for values in learners.values():
            for value, mean in zip(values, means, strict=True):
                value.lerp_(mean, self.plan.pull)

    def abandon(self) -> None:
        self._reducer.drain()

    def regroup(self, group: Group) -> None:
        super().regroup(group)
        self._reducer.regroup(group)
