"""Local SGD: learners see nothing of each other in a round, and end it as their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastune.comm.group import Group
from elastune.core.sync_plan import SyncPlan

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

    def end(self, begun: Values, means: Values) -> Values:
        """What every learner's parameters become where a round ends: ``begun`` as the round was, ``means`` now."""
        self.rounds += 1
        return means

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
