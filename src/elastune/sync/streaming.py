"""DiLoCo in fragments: parts of the model come together one after another, while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

from elastune.comm.exact import ExactReducer
from elastune.comm.group import Group
from elastune.core.fragments import fragments_of, sendings
from elastune.core.sync_plan import SyncPlan
from elastune.sync.diloco import DiLoCo
from elastune.sync.local import Values


class StreamingDiLoCo(DiLoCo):
    """After its steps of a round (``core.fragments.sendings``) a fragment of each learner leaves; ``plan.delay`` steps
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
        self._leaves = sendings(plan.every, plan.fragments, plan.cycles)
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
        means = [total / self.plan.learners for total in self._reducers[fragment].finish()]
        self._under_way = None
        outer = self._outer_step(places, means)
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
