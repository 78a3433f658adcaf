"""Learners that take the mean with one other each: who with whom is a strategy's, how values get there is told here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch

from elastune.comm.group import Group, Work
from elastune.comm.reducer import plan as plan_buckets
from elastune.core.sync_plan import SyncPlan
from elastune.sync.local import Local, Values

Flat = dict[int, torch.Tensor]
"""By learner: some of its parameters as one vector."""


class Peers(Local):
    """In a mix every learner's parameters become the mean of its own and those of its source, as both were before."""

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        super().__init__(plan, like, group)
        self._buckets = plan_buckets([value.detach() for value in like])

    @abstractmethod
    def sources(self, turn: int) -> Sequence[int]:
        """By learner: whose values it takes; its own number where it takes none. The same on every worker."""

    def mix(self, learners: Mapping[int, Values], turn: int) -> None:
        sources = self.sources(turn)
        under_way: list[tuple[list[int], Flat, Work, _Mail]] = []
        for places in self._buckets:
            own = {learner: _flat([values[i] for i in places]) for learner, values in learners.items()}
            mail = _Mail(self.plan, sources, self.group, own)
            under_way.append((places, own, mail.start(), mail))
        for places, own, work, mail in under_way:
            work.wait()
            all_of_them = own | mail.came()
            for learner, values in learners.items():
                if sources[learner] != learner:
                    mean = (own[learner] + all_of_them[sources[learner]]) / 2
                    _spread(mean, [values[i] for i in places])


class _Mail:
    """What workers send each other of one bucket, so that every learner has its source's values beside it."""

    def __init__(self, plan: SyncPlan, sources: Sequence[int], group: Group, own: Flat) -> None:
        self._group, self._own = group, own
        self._like = next(iter(own.values()))
        carried = [plan.carried(group.size, rank) for rank in range(group.size)]
        here = carried[group.rank]

        def wanted(giver: range, taker: range) -> list[int]:
            """Which of the giver's learners the taker needs, in order."""
            return [] if giver == taker else sorted({sources[learner] for learner in taker} & set(giver))

        self._given = [wanted(here, taker) for taker in carried]
        self._taken = [wanted(giver, here) for giver in carried]

    def start(self) -> Work:
        """Raises ``GroupBroken``."""
        if self._group.size == 1:
            return Work(self._group, None)
        given = [self._own[learner] for learners in self._given for learner in learners]
        numel, wire = self._like.numel(), self._group.wire
        self._sent = torch.cat([*given, self._like[:0]]).to(wire)
        self._room = torch.empty(sum(map(len, self._taken)) * numel, dtype=self._like.dtype, device=wire)
        sizes, coming = ([len(each) * numel for each in way] for way in (self._given, self._taken))
        return self._group.all_to_all(self._room, self._sent, coming, sizes)

    def came(self) -> Flat:
        """The values of others' learners, once they are here."""
        taken = [learner for learners in self._taken for learner in learners]
        if not taken:
            return {}
        rows = self._room.to(self._like.device).view(len(taken), -1)
        return dict(zip(taken, rows, strict=True))


def _flat(values: Values) -> torch.Tensor:
    return torch.cat([value.detach().reshape(-1) for value in values])


def _spread(flat: torch.Tensor, values: Values) -> None:
    for value, piece in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(piece.view_as(value))
