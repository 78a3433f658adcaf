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

# [diloco] DiLoCo: the mean of learners is a step of an outer optimizer with Nesterov's momentum.


class DiLoCo(Local):
    """The way from where a round began to the learners' mean, turned round, is the outer gradient d. With the momentum
    m <- mu m + d parameters become begun - lr (d + mu m).

    (Source: Douillard et al., "DiLoCo", arXiv 2311.08105, algorithm 1, with Nesterov's momentum as in
    ``torch.optim.SGD``.) Every worker holds the momentum, and all the same.
    """

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        super().__init__(plan, like, group)
        self._momentum = [torch.zeros_like(value) for value in like]
        # Of this round: what the outer steps have come to, and their momentum. A round that is dropped leaves none.
        self._centre: list[torch.Tensor] = []
        self._moving: list[torch.Tensor] = []

    def begin(self, values: Values) -> None:
        self._centre, self._moving = list(values), list(self._momentum)

    def end(self, begun: Values, execution: Values) -> Values:
        super().end(begun, execution)
        values = self._outer_step(range(len(execution)), execution)
        self._momentum, self._centre, self._moving = self._moving, [], []
        return values

    def _outer_step(self, places: Sequence[int], execution: Values) -> list[torch.Tensor]:
        """One with the parameters at ``places``, whose ``execution`` these are; what they come to."""
        begun = [self._centre[place] for place in places]
        steps = torch._foreach_sub(begun, list(execution))
        moved = torch._foreach_mul([self._moving[place] for place in places], self.plan.outer_momentum)
        torch._foreach_add_(moved, steps)
        torch._foreach_add_(steps, moved, alpha=self.plan.outer_momentum)
        values = list(torch._foreach_sub(begun, steps, alpha=self.plan.outer_lr))
        for place, value, momentum in zip(places, values, moved, strict=True):
            self._centre[place], self._moving[place] = value, momentum
        return values

    def abandon(self) -> None:
        self._centre, self._moving = [], []

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "momentum": list(self._momentum)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for own, value in zip(self._momentum, state["momentum"], strict=True):
            own.copy_(value)


# [streaming] DiLoCo in fragments: parts of the model come together one after another, while training goes on.


class StreamingDiLoCo(DiLoCo):
    """After its steps of a round (``core.fragments.send_schedule``) a fragment of each learner leaves; ``plan.delay`` steps
    later the mean is waited for, the fragment takes an outer step from where its last one had come to, and each learner
    adopts that: x becomes blend x + (1 - blend) outer. At most one fragment is under way. A round's end is DiLoCo's,
    with an outer step of every fragment from its newest one.

    All of it is counted in steps, none in time: the result does not depend on who was quick. Where a round
    ends early no fragment leaves that could not be adopted before it, and all are exchanged there anyway.

    (Source: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, algorithm 2. There
    learners never become equal; and theirs are fragments of layers, here of whole tensors of nearly equal bytes.)
    """

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        """Raises ``UserError`` where there are fewer parameters than fragments."""
        super().__init__(plan, like, group)
        self._fragments = fragments_of([value.nbytes for value in like], plan.fragments)
        self._reducers = [
            ExactReducer([like[place].detach() for place in places], plan.learners, group) for places in self._fragments
        ]
        self._leaves = send_schedule(plan.every, plan.fragments, plan.cycles)
        self._under_way: tuple[int, int] | None = None  # a fragment, and after how many steps it left

    def mix(self, learners: Mapping[int, Values], turn: int) -> None:
        steps = turn + 1
        if self._under_way is not None:
            fragment, left = self._under_way
            reducer, age = self._reducers[fragment], steps - left
            if age < self.plan.delay:  # sums that go in several legs begin them at even distances
                reducer.advance(age * (reducer.legs + 1) // self.plan.delay)
            else:
                self._adopt(fragment, learners)
        if steps in self._leaves and steps + self.plan.delay < self.steps:
            self._send(self._leaves[steps], learners)
            self._under_way = self._leaves[steps], steps

    def _send(self, fragment: int, learners: Mapping[int, Values]) -> None:
        reducer, places = self._reducers[fragment], self._fragments[fragment]
        reducer.begin_with({learner: [values[place] for place in places] for learner, values in learners.items()})
        reducer.advance()

    def _adopt(self, fragment: int, learners: Mapping[int, Values]) -> None:
        places = self._fragments[fragment]
        execution = [total / self.plan.learners for total in self._reducers[fragment].finish()]
        self._under_way = None
        outer = self._outer_step(places, execution)
        for values in learners.values():
            for place, value in zip(places, outer, strict=True):
                values[place].lerp_(value, 1.0 - self.plan.blend)

    def finish(self) -> None:
        if self._under_way is not None:
            self._reducers[self._under_way[0]].finish()
            self._under_way = None

    def abandon(self) -> None:
        super().abandon()
        for reducer in self._reducers:
            reducer.drain()
        self._under_way = None

    def regroup(self, group: Group) -> None:
        super().regroup(group)
        for reducer in self._reducers:
            reducer.regroup(group)
