"""Local SGD and the strategies on top of it: model averaging, a parameter server, DiLoCo and Streaming DiLoCo.

With local SGD learners exchange nothing within a round, and end it as their mean. Model averaging pulls each learner
towards the mean within a round. With a parameter server of bounded staleness learners go on while the changes of
other learners are in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastune.core.sync_plan import SyncPlan, fragments_of, send_schedule
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.group import Group

# Local SGD and two strategies on top of it: synchronous model averaging, and a parameter server.

Values = Sequence[torch.Tensor]
"""A learner's parameters, in the order of the model."""


class Local:
    """Local SGD, and the base of all strategies by which learners come together.

    A subclass overrides what differs: ``mix`` for exchanges within a round, ``end`` for the round's end. The state of
    a strategy is equal on all workers, and ``state_dict`` saves it.

    Attributes:
        taken: How often in this round a learner of this worker took another learner's values without waiting.
        taken_age: The ages of these values in mixes, added up.
        steps: The steps of the round; set before ``begin``.
        seed: The run's seed, for random choices; set before the first round.
    """

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        """``like``: the parameters, which give shapes and dtypes of a learner's values."""
        self.plan, self.group = plan, group
        self.rounds, self.steps = 0, plan.every
        self.taken = self.taken_age = self.seed = 0

    def mix(self, learners: Mapping[int, Values], turn: int) -> None:
        """Change the values of this worker's ``learners`` within a round, at its ``turn``-th mix, from 0.

        All workers call it alike. After ``GroupBroken`` the round is done again from its beginning.
        """

    def begin(self, values: Values) -> None:
        """A round begins; the parameters of all learners are ``values``."""

    def finish(self) -> None:
        """Wait for unfinished exchanges, after the last step of a round. Raises ``GroupBroken``."""

    def end(self, start_values: Values, averages: Values) -> Values:
        """Return the parameters of all learners after a round.

        Args:
            start_values: The parameters at the round's beginning.
            averages: The means of the learners' parameters now.
        """
        self.rounds += 1
        return averages

    def abandon(self) -> None:
        """Drop the exchanges of a round. Afterwards no collective of it reads or writes any more."""

    def regroup(self, group: Group) -> None:
        """Meet on ``group`` from the next mix on."""
        self.group = group

    def state_dict(self) -> dict[str, Any]:
        """The state that outlives a round."""
        return {"rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of another worker, or of a checkpoint."""
        self.rounds = int(state["rounds"])


class Averaging(Local):
    """Synchronous model averaging: in a mix a learner's parameters x become x + pull (mean - x).

    The mean follows the canonical tree over learners. (Source: KungFu's SMA, Mai et al., OSDI 2020, after Crossbow,
    Koliousis et al., VLDB 2019. Crossbow restarts its learners from their mean, as the end of a round does here.)
    """

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        super().__init__(plan, like, group)
        self._reducer = ExactReducer([value.detach() for value in like], plan.learners, group)

    def mix(self, learners: Mapping[int, Values], turn: int) -> None:
        self._reducer.begin_with(learners)
        averages = [total / self.plan.learners for total in self._reducer.finish()]
        for values in learners.values():
            for value, mean in zip(values, averages, strict=True):
                value.lerp_(mean, self.plan.pull)

    def abandon(self) -> None:
        self._reducer.drain()

    def regroup(self, group: Group) -> None:
        super().regroup(group)
        self._reducer.regroup(group)


class ParameterServer(Local):
    """A parameter server with bounded staleness: a step reaches the other learners ``plan.staleness`` mixes later.

    A learner sees its own steps at once. After s = ``plan.staleness`` mixes the mean m of the learners' steps arrives,
    and a learner replaces its own step d of that mix by m: x <- x + (m - d). So the mean over learners equals the
    parameters of a server, and no learner is further from it than s steps. The workers are the servers, each of a part
    of the parameters.

    (Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013;
    Gupta et al., "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning", ICDM 2016, arXiv 1509.04210. Here
    every step is exactly as stale as the bound allows, so the result does not depend on which worker is quick.)
    """

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        super().__init__(plan, like, group)
        like = [value.detach() for value in like]
        lanes = range(plan.staleness + 1)
        self._reducers = [ExactReducer(like, plan.learners, group, lane=lane) for lane in lanes]
        self._turn = -1
        self._start: Values = ()
        self._before: dict[int, list[torch.Tensor]] = {}  # by learner: its values after the last mix
        self._pending: list[dict[int, list[torch.Tensor]]] = []  # the learners' steps, by mix, oldest first

    def begin(self, values: Values) -> None:
        self._start, self._before, self._pending = values, {}, []

    def mix(self, learners: Mapping[int, Values], turn: int) -> None:
        now = {
            learner: list(torch._foreach_sub(list(values), list(self._before.get(learner, self._start))))
            for learner, values in learners.items()
        }
        self._reducers[turn % len(self._reducers)].begin_with(now)
        self._pending.append(now)
        if len(self._pending) > self.plan.staleness:
            oldest = self._reducers[(turn - self.plan.staleness) % len(self._reducers)]
            averages = [total / self.plan.learners for total in oldest.finish()]
            for learner, steps in self._pending.pop(0).items():
                torch._foreach_add_(list(learners[learner]), torch._foreach_sub(averages, steps))
        self._turn = turn
        self._before = {learner: [value.clone() for value in values] for learner, values in learners.items()}

    def finish(self) -> None:
        """Receive the means in flight, and drop them: the mean over learners already has all of their steps."""
        for turn in range(self._turn + 1 - len(self._pending), self._turn + 1):
            self._reducers[turn % len(self._reducers)].finish()
        self._pending = []

    def abandon(self) -> None:
        for reducer in self._reducers:
            reducer.drain()

    def regroup(self, group: Group) -> None:
        super().regroup(group)
        for reducer in self._reducers:
            reducer.regroup(group)


# DiLoCo: the mean of learners is a step of an outer optimizer with Nesterov's momentum.
#
# Streaming DiLoCo exchanges the model in fragments, one after another, while training goes on.


class DiLoCo(Local):
    """At the end of a round an outer optimizer takes a step, with Nesterov's momentum as in ``torch.optim.SGD``.

    The outer gradient is d = begun - mean: the parameters at the round's beginning minus the learners' mean. With the
    momentum m <- mu m + d the parameters become begun - lr (d + mu m). Every worker holds the same momentum.

    (Source: Douillard et al., "DiLoCo", arXiv 2311.08105, algorithm 1.)
    """

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        super().__init__(plan, like, group)
        self._momentum = [torch.zeros_like(value) for value in like]
        # Of this round: the parameters after its outer steps, and their momentum. A dropped round leaves none.
        self._centre: list[torch.Tensor] = []
        self._moving: list[torch.Tensor] = []

    def begin(self, values: Values) -> None:
        self._centre, self._moving = list(values), list(self._momentum)

    def end(self, start_values: Values, averages: Values) -> Values:
        super().end(start_values, averages)
        values = self._outer_step(range(len(averages)), averages)
        self._momentum, self._centre, self._moving = self._moving, [], []
        return values

    def _outer_step(self, places: Sequence[int], averages: Values) -> list[torch.Tensor]:
        """Take an outer step with the parameters at ``places``, whose means are ``averages``; return the new values."""
        start_values = [self._centre[place] for place in places]
        steps = torch._foreach_sub(start_values, list(averages))
        moved = torch._foreach_mul([self._moving[place] for place in places], self.plan.outer_momentum)
        torch._foreach_add_(moved, steps)
        torch._foreach_add_(steps, moved, alpha=self.plan.outer_momentum)
        values = list(torch._foreach_sub(start_values, steps, alpha=self.plan.outer_lr))
        for place, value, momentum in zip(places, values, moved, strict=True):
            self._centre[place], self._moving[place] = value, momentum
        return values

    def abandon(self) -> None:
        self._centre, self._moving = [], []

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "momentum": list(self._momentum)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for momentum, value in zip(self._momentum, state["momentum"], strict=True):
            momentum.copy_(value)


class StreamingDiLoCo(DiLoCo):
    """DiLoCo that exchanges the model in fragments, while training goes on.

    A fragment of each learner leaves at its step of the round (``core.sync_plan.send_schedule``). ``plan.delay`` steps
    later the strategy waits for the mean. The fragment takes an outer step from its last outer values, and each learner
    adopts the result: x becomes blend x + (1 - blend) outer. At most one fragment is in flight. At the end of the round
    every fragment takes an outer step from its newest outer values, as in DiLoCo.

    The schedule counts steps, not time, so the result does not depend on which worker is quick. If a round ends early,
    a fragment that could not be adopted before the end does not leave; the end exchanges all fragments anyway.

    (Source: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, algorithm 2. In the
    paper learners never become equal, and fragments are layers; here they are whole tensors of nearly equal bytes.)
    """

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        """Raises ``UserError`` if the model has fewer parameters than fragments."""
        super().__init__(plan, like, group)
        self._fragments = fragments_of([value.nbytes for value in like], plan.fragments)
        self._reducers = [
            ExactReducer([like[place].detach() for place in places], plan.learners, group) for places in self._fragments
        ]
        self._leaves = send_schedule(plan.every, plan.fragments, plan.cycles)
        self._sent: tuple[int, int] | None = None  # a fragment, and after how many steps it left

    def mix(self, learners: Mapping[int, Values], turn: int) -> None:
        steps = turn + 1
        if self._sent is not None:
            fragment, left = self._sent
            reducer, age = self._reducers[fragment], steps - left
            if age < self.plan.delay:  # a sum of several legs begins them at equal distances
                reducer.advance(age * (reducer.legs + 1) // self.plan.delay)
            else:
                self._adopt(fragment, learners)
        if steps in self._leaves and steps + self.plan.delay < self.steps:
            self._send(self._leaves[steps], learners)
            self._sent = self._leaves[steps], steps

    def _send(self, fragment: int, learners: Mapping[int, Values]) -> None:
        reducer, places = self._reducers[fragment], self._fragments[fragment]
        reducer.begin_with({learner: [values[place] for place in places] for learner, values in learners.items()})
        reducer.advance()

    def _adopt(self, fragment: int, learners: Mapping[int, Values]) -> None:
        places = self._fragments[fragment]
        averages = [total / self.plan.learners for total in self._reducers[fragment].finish()]
        self._sent = None
        outer = self._outer_step(places, averages)
        for values in learners.values():
            for place, value in zip(places, outer, strict=True):
                values[place].lerp_(value, 1.0 - self.plan.blend)

    def finish(self) -> None:
        if self._sent is not None:
            self._reducers[self._sent[0]].finish()
            self._sent = None

    def abandon(self) -> None:
        super().abandon()
        for reducer in self._reducers:
            reducer.drain()
        self._sent = None

    def regroup(self, group: Group) -> None:
        super().regroup(group)
        for reducer in self._reducers:
            reducer.regroup(group)
