"""Learners that average with one other learner at a time: gossip and pair averaging.

Gossip takes one neighbour, a different one in each mix. Pair averaging draws the pairs anew in each mix. In ``fast``
mode no worker waits for its partner (``AsyncPairAveraging``).
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

Flat = dict[int, torch.Tensor]
"""By learner: some of its parameters as one vector."""


class PeerAveraging(Local):
    """The base: in a mix the parameters of a learner become the mean of its own and its source's, as both were before.

    A subclass chooses the ``sources``.
    """

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        super().__init__(plan, like, group)
        self._buckets = plan_buckets([value.detach() for value in like])

    @abstractmethod
    def sources(self, turn: int) -> Sequence[int]:
        """By learner: the learner whose values it takes, or itself if it takes none. The same on every worker."""

    def mix(self, learners: Mapping[int, Values], turn: int) -> None:
        sources = self.sources(turn)
        pending: list[tuple[list[int], Flat, Work, _PeerExchange]] = []
        for places in self._buckets:
            carried = {learner: _flat([values[i] for i in places]) for learner, values in learners.items()}
            exchange = _PeerExchange(self.plan, sources, self.group, carried)
            pending.append((places, carried, exchange.start(), exchange))
        for places, carried, work, exchange in pending:
            work.wait()
            available = carried | exchange.received()
            for learner, values in learners.items():
                if sources[learner] != learner:
                    mean = (carried[learner] + available[sources[learner]]) / 2
                    _spread(mean, [values[i] for i in places])


class Gossip(PeerAveraging):
    """In its t-th mix learner i takes the values of learner i - 2^t: an exponential graph with one neighbour at a time.

    So the values of n learners reach all learners within log2 n mixes. Every learner gives one half and takes one
    half, so the weights of push-sum stay 1 and the mean of all learners does not change. (Source: Assran et al.,
    "Stochastic Gradient Push", ICML 2019, arXiv 1811.10792, appendix A; the mean at a round's end is that of Chen et
    al., arXiv 2105.09080.)
    """

    def sources(self, turn: int) -> list[int]:
        learners = self.plan.learners
        hop = 1 << turn % max(1, (learners - 1).bit_length())
        return [(learner - hop) % learners for learner in range(learners)]


class PairAveraging(PeerAveraging):
    """In each mix random pairs of learners take their mean; if the number of learners is odd, one stays alone.

    The pairs come from the run's seed and are the same on every worker. (After Lian et al., "Asynchronous Decentralized
    Parallel SGD", ICML 2018, arXiv 1710.06952. There a learner meets another whenever it is ready. Here all meet at
    once, so the result does not depend on which worker is quick. For ``fast`` mode see ``AsyncPairAveraging``.)
    """

    def sources(self, turn: int) -> list[int]:
        learners = list(range(self.plan.learners))
        random.Random(derive(self.seed, "pairs", self.rounds, turn)).shuffle(learners)
        sources = list(range(self.plan.learners))
        for first, second in zip(learners[::2], learners[1::2], strict=False):
            sources[first], sources[second] = second, first
        return sources


class AsyncPairAveraging(PairAveraging):
    """Pair averaging for ``fast`` mode: no learner waits for its partner.

    In its t-th mix a learner takes the mean with the newest partner values that have arrived since its last mix, if
    any. Then it offers its own new values to its partner of turn t. Pairs are those of ``PairAveraging``, so every
    learner gives once in each mix. But it takes the values that have arrived, and not its partner's present values. If
    all workers run in step, these are the values of the partner of the last turn.

    A learner takes only values of the same round. If a worker or its link is slow, other workers take fewer values
    from it and do not wait. Learners of one worker meet at once. If all learners are on one worker, or the backend is
    NCCL, this is ``PairAveraging``.

    (After Lian et al., "Asynchronous Decentralized Parallel SGD", ICML 2018, arXiv 1710.06952. There one learner of a
    pair answers the other in the middle of its own step, so their sum stays the same. Here both give when they mix. So
    the mean over learners leans towards the quick ones, until the round's end takes all equally.)
    """

    def __init__(self, plan: SyncPlan, like: Values, group: Group) -> None:
        super().__init__(plan, like, group)
        self._offers: AsyncValues | None = None
        self._use = 0  # the number of this user of the group's offers; offers of an earlier strategy are not for it

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
        """Average the pairs whose learners are both on this worker."""
        for learner, values in learners.items():
            if learner < sources[learner] and sources[learner] in learners:
                for value, other in zip(values, learners[sources[learner]], strict=True):
                    value.lerp_(other, 0.5)
                    other.copy_(value)

    def _newest(self, offers: AsyncValues, learners: Mapping[int, Values]) -> dict[int, AsyncValue]:
        """By learner: the newest offer to it in this round that has arrived since its last mix."""
        now = self._now()
        of_this_round = (offer for offer in offers.take() if offer.number[0] == now)
        return {offer.number[1]: offer for offer in of_this_round if offer.number[1] in learners}

    def _offer(self, offers: AsyncValues, receiver: int, values: Values, turn: int) -> None:
        ranks = (rank for rank in range(self.group.size) if receiver in self.plan.carried(self.group.size, rank))
        offers.make(next(ranks), (self._now(), receiver, turn), _bytes(values))

    def _now(self) -> int:
        """This round of this strategy on this group, as one number."""
        return self._use * 2**32 + self.rounds

    def finish(self) -> None:
        """Drop the offers that were not taken."""
        if self._offers is not None:
            self._offers.take()

    def regroup(self, group: Group) -> None:
        if group is not self.group:
            self._offers = None
        super().regroup(group)


class _PeerExchange:
    """The exchange of one bucket, after which every worker has the values of its learners' sources.

    ``flat``: this worker's learners.
    """

    def __init__(self, plan: SyncPlan, sources: Sequence[int], group: Group, flat: Flat) -> None:
        self._group, self._flat = group, flat
        self._like = next(iter(flat.values()))
        carried = [plan.carried(group.size, rank) for rank in range(group.size)]
        this_worker = carried[group.rank]

        def wanted(giver: range, taker: range) -> list[int]:
            """The learners of ``giver`` that ``taker`` needs, in order."""
            return [] if giver == taker else sorted({sources[learner] for learner in taker} & set(giver))

        self._sends = [wanted(this_worker, taker) for taker in carried]  # by rank
        self._receives = [wanted(giver, this_worker) for giver in carried]

    def start(self) -> Work:
        """Send the values that other workers need. Raises ``GroupBroken``."""
        if self._group.size == 1:
            return Work(self._group, None)
        parts = [self._flat[learner] for learners in self._sends for learner in learners]
        numel, wire = self._like.numel(), self._group.wire
        self._sent = torch.cat([*parts, self._like[:0]]).to(wire)
        self._room = torch.empty(sum(map(len, self._receives)) * numel, dtype=self._like.dtype, device=wire)
        sizes = [len(learners) * numel for learners in self._sends]
        out_sizes = [len(learners) * numel for learners in self._receives]
        return self._group.all_to_all(self._room, self._sent, out_sizes, sizes)

    def received(self) -> Flat:
        """The values of other workers' learners, after the work of ``start``."""
        taken = [learner for learners in self._receives for learner in learners]
        if not taken:
            return {}
        rows = self._room.to(self._like.device).view(len(taken), -1)
        return dict(zip(taken, rows, strict=True))


def _flat(values: Values) -> torch.Tensor:
    return torch.cat([value.detach().reshape(-1) for value in values])


def _spread(flat: torch.Tensor, values: Values) -> None:
    for value, piece in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(piece.view_as(value))


def _bytes(values: Values) -> torch.Tensor:
    """All values in a row, copied, as bytes."""
    return torch.cat([value.detach().reshape(-1).view(torch.uint8) for value in values]).cpu()


def _tensors(row: torch.Tensor, like: Values) -> list[torch.Tensor]:
    """The tensors from which ``_bytes`` made ``row``; ``like`` gives dtypes, shapes and devices."""
    if len(row) != sum(value.nbytes for value in like):
        raise RuntimeError(f"a learner of {len(row)} bytes was offered, not of {sum(value.nbytes for value in like)}")
    pieces = row.split([value.nbytes for value in like])
    # Copied, because the start of a piece may not be aligned for its dtype.
    return [
        piece.clone().view(value.dtype).view(value.shape).to(value.device)
        for piece, value in zip(pieces, like, strict=True)
    ]
