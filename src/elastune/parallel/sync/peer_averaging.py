"""Learners that average with one other learner at a time: gossip and pair averaging.

Gossip takes a neighbour, another one each time. Pair averaging draws the pairs anew each time. In ``fast`` mode no
worker waits for its partner.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch

from elastune.core.run import derive
from elastune.core.sync_plan import SyncPlan
from elastune.parallel.comm.channel import AsyncValue, AsyncValues
from elastune.parallel.comm.group import Group, Work
from elastune.parallel.comm.reducer import plan as plan_buckets
from elastune.parallel.sync.local_sgd import Local, Values

# [peers] Learners that take the mean with one other each: who with whom is a strategy's, how values get there is told here.

Flat = dict[int, torch.Tensor]
"""By learner: some of its parameters as one vector."""


class PeerAveraging(Local):
    """In a mix every learner's parameters become the mean of its own and those of its source, as both were before."""

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        super().__init__(plan, like, group)
        self._buckets = plan_buckets([value.detach() for value in like])

    @abstractmethod
    def sources(self, turn: int) -> Sequence[int]:
        """By learner: whose values it takes; its own number where it takes none. The same on every worker."""

    def mix(self, learners: Mapping[int, Values], turn: int) -> None:
        sources = self.sources(turn)
        under_way: list[tuple[list[int], Flat, Work, _PeerExchange]] = []
        for places in self._buckets:
            own = {learner: _flat([values[i] for i in places]) for learner, values in learners.items()}
            mail = _PeerExchange(self.plan, sources, self.group, own)
            under_way.append((places, own, mail.start(), mail))
        for places, own, work, mail in under_way:
            work.wait()
            all_of_them = own | mail.came()
            for learner, values in learners.items():
                if sources[learner] != learner:
                    mean = (own[learner] + all_of_them[sources[learner]]) / 2
                    _spread(mean, [values[i] for i in places])


class _PeerExchange:
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


# [gossip] Gossip: each learner takes the mean with one neighbour, another one each time.


class Gossip(PeerAveraging):
    """At its t-th mix learner i takes the values of learner i - 2^t: an exponential graph with one neighbour at a time.

    What all have thus goes to all within log2 of their number of mixes. Everyone gives one half and takes one, so that
    the weights of push-sum stay 1 and their mean stays what it was. (Source: Assran et al., "Stochastic Gradient Push",
    ICML 2019, arXiv 1811.10792, appendix A; the mean at a round's end is that of Chen et al., arXiv 2105.09080.)
    """

    def sources(self, turn: int) -> list[int]:
        learners = self.plan.learners
        hop = 1 << turn % max(1, (learners - 1).bit_length())
        return [(learner - hop) % learners for learner in range(learners)]


# [pair averaging] Pair averaging: learners become the mean of pairs that are drawn anew each time.


class PairAveraging(PeerAveraging):
    """In each mix learners are paired at random, by the run's seed, the same way on every worker; of an odd number one
    stays alone.

    (After Lian et al., "Asynchronous Decentralized Parallel SGD", ICML 2018, arXiv 1710.06952, whose learners ask each
    other whenever they are ready; here all meet at once, so that the result does not depend on who was quick. For
    ``fast`` mode see ``sync.async_pairs``.)
    """

    def sources(self, turn: int) -> list[int]:
        learners = list(range(self.plan.learners))
        random.Random(derive(self.seed, "pairs", self.rounds, turn)).shuffle(learners)
        found = list(range(self.plan.learners))
        for one, other in zip(learners[::2], learners[1::2], strict=False):
            found[one], found[other] = other, one
        return found


# [async pairs] Pair averaging for ``fast`` mode: nobody waits for its partner.


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
        self._offers: AsyncValues | None = None
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

    def _opened(self) -> AsyncValues:
        if self._offers is None:
            self._offers = AsyncValues.of(self.group)
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

    def _newest(self, offers: AsyncValues, learners: Mapping[int, Values]) -> dict[int, AsyncValue]:
        """By learner: what was offered to it last in this round, of what has come since its last mix."""
        now = self._now()
        came = (offer for offer in offers.take() if offer.number[0] == now)
        return {offer.number[1]: offer for offer in came if offer.number[1] in learners}

    def _offer(self, offers: AsyncValues, receiver: int, values: Values, turn: int) -> None:
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
