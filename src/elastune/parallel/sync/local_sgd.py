"""Local SGD and two strategies on top of it: synchronous model averaging, and a parameter server.

With local SGD learners exchange nothing within a round, and end it as their mean. Model averaging pulls each learner
towards the mean. With a parameter server of bounded staleness learners go on while the
others' changes are on their way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastune.core.sync_plan import SyncPlan
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.group import Group

# [local] Local SGD: learners see nothing of each other in a round, and end it as their mean.

Values = Sequence[torch.Tensor]


class Local:
    """How learners come together; the strategies that do otherwise than local SGD say in what.

    It keeps what all workers have alike, and is what a run's state knows of it (``state_dict``).

    ``taken``: how often in this round a learner here took another's values as they had come, without waiting for it;
    ``taken_age``: how many mixes old they were, added up. ``steps``: how many the round has, set before ``begin``.
    ``seed``: the run's, of which what a strategy draws is derived, set before the first round.
    """

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        """``like``: the parameters, whose shapes and dtypes a learner's values have."""
        self.plan, self.group = plan, group
        self.rounds, self.steps = 0, plan.every
        self.taken = self.taken_age = self.seed = 0

    def mix(self, learners: Mapping[int, Values], turn: int) -> None:
        """Change the values of this worker's ``learners`` within a round, at its ``turn``-th mix, from 0.

        All workers call it alike. Raises ``GroupBroken``; the round is then done again from its beginning.
        """

    def begin(self, values: Values) -> None:
        """A round begins, and all learners' parameters are ``values``."""

    def finish(self) -> None:
        """A round's last step was taken: wait for what is under way. Raises ``GroupBroken``."""

    def end(self, begun: Values, execution: Values) -> Values:
        """What every learner's parameters become where a round ends: ``begun`` as the round was, ``execution`` now."""
        self.rounds += 1
        return execution

    def abandon(self) -> None:
        """Drop what is under way of a round. No collective of it reads or writes any more."""

    def regroup(self, group: Group) -> None:
        """Meet on ``group`` from the next mix on."""
        self.group = group

    def state_dict(self) -> dict[str, Any]:
        """What outlives a round."""
        return {"rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over another's."""
        self.rounds = int(state["rounds"])


# [averaging] Synchronous model averaging: within a round each learner is pulled towards the mean of all.


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
        execution = [total / self.plan.learners for total in self._reducer.finish()]
        for values in learners.values():
            for value, mean in zip(values, execution, strict=True):
                value.lerp_(mean, self.plan.pull)

    def abandon(self) -> None:
        self._reducer.drain()

    def regroup(self, group: Group) -> None:
        super().regroup(group)
        self._reducer.regroup(group)


# [parameter server] A parameter server with bounded staleness: learners go on while what the others have learnt is on its way.


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
            execution = [total / self.plan.learners for total in oldest.finish()]
            for learner, own in self._under_way.pop(0).items():
                torch._foreach_add_(list(learners[learner]), torch._foreach_sub(execution, own))
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
