"""Pair averaging for ``fast`` mode: nobody waits for its partner."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastune.comm.group import Group
from elastune.comm.offers import Offered, Offers
from elastune.core.sync_plan import SyncPlan
from elastune.sync.local import Values
from elastune.sync.pair_averaging import PairAveraging


class AsyncPairAveraging(PairAveraging):
    """At its t-th mix a learner takes the mean with the newest values of a partner that have come since its last one,
    if any have, and offers what it has come to then to its partner of turn t.

    Pairs are those of ``PairAveraging``, so everyone gives once a mix; but a learner takes what has come, not what its
    partner of this turn has now. In step, that is what the partner of the turn before had then. What is taken is of
    the same round, so never older than it, and where a worker is slow, or its link, others take less of it and do not
    wait. Learners of one worker meet at once. Where learners are on one worker, or on NCCL, this is ``PairAveraging``.

    (After Lian et al., "Asynchronous Decentralized Parallel SGD", ICML 2018, arXiv 1710.06952. There one learner of a
    pair answers the other in the midst of its own step, so that their sum stays; here both give when they mix, so that
    the mean over learners leans to those that are quick, until the round's end takes all alike.)
    """

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        super().__init__(plan, like, group)
        self._offers: Offers | None = None
        self._use = 0  # of the group's offers: those of a strategy before this one are not for it

    def begin(self, values: Values) -> None:
        self.taken, self.taken_age = 0, 0

    def mix(self, learners: Mapping[int, Values], turn: int) -> None:
        if self.group.size == 1 or self.group.backend != "gloo":
            super().mix(learners, turn)
            return
        offers, sources = self._opened(), self.sources(turn)
        self._meet_here(learners, sources)
        for learner, offer in self._newest(offers, learners).items():
            self.taken, self.taken_age = self.taken + 1, self.taken_age + max(0, turn - offer.number[2])
            for value, other in zip(learners[learner], _tensors(offer.values, learners[learner]), strict=True):
                value.lerp_(other, 0.5)
        for learner, values in learners.items():
            if sources[learner] not in learners:
                self._offer(offers, sources[learner], values, turn)

    def _opened(self) -> Offers:
        if self._offers is None:
            self._offers = Offers.of(self.group)
            self._offers.served += 1
            self._use = self._offers.served
        return self._offers

    def _meet_here(self, learners: Mapping[int, Values], sources: list[int]) -> None:
        """Both learners of a pair are this worker's."""
        for learner, values in learners.items():
            if learner < sources[learner] and sources[learner] in learners:
                for value, other in zip(values, learners[sources[learner]], strict=True):
                    value.lerp_(other, 0.5)
                    other.copy_(value)

    def _newest(self, offers: Offers, learners: Mapping[int, Values]) -> dict[int, Offered]:
        """By learner: what was offered to it last in this round, of what has come since its last mix."""
        now = self._now()
        came = (offer for offer in offers.take() if offer.number[0] == now)
        return {offer.number[1]: offer for offer in came if offer.number[1] in learners}

    def _offer(self, offers: Offers, receiver: int, values: Values, turn: int) -> None:
        ranks = (rank for rank in range(self.group.size) if receiver in self.plan.carried(self.group.size, rank))
        offers.make(next(ranks), (self._now(), receiver, turn), _bytes(values))

    def _now(self) -> int:
        """This round of this strategy on this group, as one number."""
        return self._use * 2**32 + self.rounds

    def finish(self) -> None:
        """What has come and was not taken is of no use any more."""
        if self._offers is not None:
            self._offers.take()

    def regroup(self, group: Group) -> None:
        if group is not self.group:
            self._offers = None
        super().regroup(group)


def _bytes(values: Values) -> torch.Tensor:
    """All of them in a row, copied."""
    return torch.cat([value.detach().reshape(-1).view(torch.uint8) for value in values]).cpu()


def _tensors(row: torch.Tensor, like: Values) -> list[torch.Tensor]:
    """What ``_bytes`` made of tensors like these."""
    if len(row) != sum(value.nbytes for value in like):
        raise RuntimeError(f"a learner of {len(row)} bytes was offered, not of {sum(value.nbytes for value in like)}")
    pieces = row.split([value.nbytes for value in like])
    # Copied, because a piece may begin where no number of its type can.
    return [
        piece.clone().view(value.dtype).view(value.shape).to(value.device)
        for piece, value in zip(pieces, like, strict=True)
    ]
