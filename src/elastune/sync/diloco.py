"""DiLoCo: the mean of learners is a step of an outer optimizer with Nesterov's momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastune.comm.group import Group
from elastune.core.sync_plan import SyncPlan
from elastune.sync.local import Local, Values


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

    def end(self, begun: Values, means: Values) -> Values:
        super().end(begun, means)
        values = self._outer_step(range(len(means)), means)
        self._momentum, self._centre, self._moving = self._moving, [], []
        return values

    def _outer_step(self, places: Sequence[int], means: Values) -> list[torch.Tensor]:
        """One with the parameters at ``places``, whose ``means`` these are; what they come to."""
        begun = [self._centre[place] for place in places]
        steps = torch._foreach_sub(begun, list(means))
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
