"""DiLoCo: the mean of learners is a step of an outer optimizer with Nesterov's momentum.

Streaming DiLoCo exchanges the model in fragments, one after another, while training goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastune.core.sync_plan import SyncPlan, fragments_of, send_schedule
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.group import Group
from elastune.parallel.sync.local_sgd import Local, Values


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
