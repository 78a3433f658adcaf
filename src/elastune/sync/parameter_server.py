"""A parameter server with bounded staleness: learners go on while what the others have learnt is on its way."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastune.comm.exact import ExactReducer
from elastune.comm.group import Group
from elastune.core.sync_plan import SyncPlan
from elastune.sync.local import Local, Values


class ParameterServer(Local):
    """What a learner's step changed reaches the others ``plan.staleness`` mixes later, as the mean over all learners.

    A learner sees its own steps at once. When the mean m of the learners' steps of mix t - s is here, it puts m in the
    place of its own step d of that mix: x <- x + (m - d). The mean over learners is thus what a server would hold, and
    no learner is further from it than s steps. Servers are the workers, each of a part of the parameters.

    (Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013;
    Gupta et al., "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning", ICDM 2016, arXiv 1509.04210. Here
    every step is exactly as stale as the bound allows, so that the result does not depend on who was quick.)
    """

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        super().__init__(plan, like, group)
        like = [value.detach() for value in like]
        lanes = range(plan.staleness + 1)
        self._reducers = [ExactReducer(like, plan.learners, group, lane=lane) for lane in lanes]
        self._turn = -1
        self._start: Values = ()
        self._before: dict[int, list[torch.Tensor]] = {}  # by learner: its values after the mix before
        self._under_way: list[dict[int, list[torch.Tensor]]] = []  # the learners' steps, by mix, oldest first

    def begin(self, values: Values) -> None:
        self._start, self._before, self._under_way = values, {}, []

    def mix(self, learners: Mapping[int, Values], turn: int) -> None:
        now = {
            learner: list(torch._foreach_sub(list(values), list(self._before.get(learner, self._start))))
            for learner, values in learners.items()
        }
        self._reducers[turn % len(self._reducers)].begin_with(now)
        self._under_way.append(now)
        if len(self._under_way) > self.plan.staleness:
            oldest = self._reducers[(turn - self.plan.staleness) % len(self._reducers)]
            means = [total / self.plan.learners for total in oldest.finish()]
            for learner, own in self._under_way.pop(0).items():
                torch._foreach_add_(list(learners[learner]), torch._foreach_sub(means, own))
        self._turn = turn
        self._before = {learner: [value.clone() for value in values] for learner, values in learners.items()}

    def finish(self) -> None:
        """The mean over learners has all of their steps already: what is under way comes in, and changes nothing."""
        for turn in range(self._turn + 1 - len(self._under_way), self._turn + 1):
            self._reducers[turn % len(self._reducers)].finish()
        self._under_way = []

    def abandon(self) -> None:
        for reducer in self._reducers:
            reducer.drain()

    def regroup(self, group: Group) -> None:
        super().regroup(group)
        for reducer in self._reducers:
            reducer.regroup(group)
