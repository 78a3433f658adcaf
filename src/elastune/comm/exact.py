"""Sums over slots in canonical order: the same bits for any number of workers, at the bandwidth of a ring.

Every worker adds up its slots along the canonical tree. Of each bucket, chunk c of every worker's subtree sums goes to
worker c (all-to-all), which adds them in tree order and returns the result to all (all-gather): 2(W-1)/W of the data,
as a ring all-reduce moves, but in ONE order of additions. Where several workers are on each of several hosts that goes
by levels (``comm.levels``): within each host, then among hosts, and back. By the routes of a topology (``comm.relay``)
the same sums are made on other ways. Buckets leave while the backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from elastune.comm.group import Group, Work
from elastune.comm.levels import climb
from elastune.comm.reducer import SLACK, Bucket, Reducer, plan
from elastune.comm.relay import Relay
from elastune.comm.slot_sums import SlotSums
from elastune.comm.staging import Crossing, outbox
from elastune.core.slots import Deal, cut, node_sum


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.add_(b)


class ExactBucket(Bucket):
    """Flat vectors are padded with zeros to a multiple of the worker count."""

    def __init__(
        self,
        members: list[int],
        like: Sequence[torch.Tensor],
        num_slots: int,
        group: Group,
        deal: Deal = cut,
        *,
        hold: bool,
        first: int = 0,
    ) -> None:
        super().__init__(members, like, group, hold=hold)
        self._num_slots, self._deal, self._first = num_slots, deal, first
        self._slots = SlotSums(lambda: self._room(self._device), self._cut)
        self._buffer = self._room(group.wire) if hold else torch.zeros(0, dtype=self._dtype, device=group.wire)
        self.regroup(group)

    def renew(self) -> None:
        super().renew()
        self._slots.forget()
        self._buffer = torch.zeros_like(self._buffer)
        self._cut_buffer()

    def regroup(self, group: Group) -> None:
        self._group = group
        runs = self._deal(self._num_slots, group.size)
        self._run = runs[group.rank]
        self._length = -(-self._numel // group.size) * group.size
        if self._length > self._numel + SLACK:
            raise ValueError(f"{group.size} workers are too many to sum {self._numel} numbers exactly")
        routed = group.size > 1 and bool(group.routes)
        self._levels = (group.levels or (group,)) if group.size > 1 and not routed else ()
        sizes = [level.size for level in self._levels]
        self._legs = climb(runs, self._num_slots, sizes, group.rank, self._length) if sizes else []
        like = self._sets[0][: self._numel]
        self._relay = Relay(group, like, self._first + self.members[0], runs, self._num_slots) if routed else None
        self.rounds = max(1, 2 * len(sizes) - 1)
        arriving = [len(leg.nodes) * leg.piece for leg in self._legs]
        gathered = [leg.piece for leg in self._legs[:-1]]  # what the levels above return
        needed = sum(arriving) + sum(gathered)
        if self._buffer.numel() < needed:
            self._buffer = self._buffer.new_zeros(needed)
        self._arriving, self._gathered = arriving, gathered
        self._cut_buffer()
        self.begin()

    def _cut_buffer(self) -> None:
        sizes = [*self._arriving, *self._gathered]
        pieces = self._buffer[: sum(sizes)].split(sizes) if sizes else ()
        self._received, self._returned = pieces[: len(self._arriving)], pieces[len(self._arriving) :]

    def begin(self) -> None:
        self._slots.begin(self._run, self._num_slots, self.members)
        self._work: Work | None = None
        self.combined = 0
        self._sent: list[torch.Tensor] = []  # they may be read until the step is over
        self.launched = False

    def put(self, index: int, value: torch.Tensor | None) -> bool:
        return self._slots.put(index, value)

    @property
    def here(self) -> torch.Tensor:
        return self._slots.here[: self._numel]

    def end_slot(self, slot: int) -> None:
        self._slots.end_slot(slot)

    def launch(self) -> None:
        """Send every piece to the worker that gathers it."""
        self.launched = True
        if self._relay is not None:
            parts = [value[: self._numel] for value in self._slots.parts()]
            if not self._staged:
                self._relay.start(parts, self._sets[self._turn][: self._numel])
            elif parts:
                self._sent.append(outbox(stacked := torch.stack(parts), self._group.wire))
                self._crossing = Crossing(stacked, self._sent[-1])
            return
        if not self._legs:
            return
        sent = self._laid_out([value[: self._length] for value in self._slots.parts()], 0)
        if self._staged:
            self._sent.append(outbox(sent, self._group.wire))
            self._crossing = Crossing(sent, self._sent[-1])
        else:
            self._sent.append(sent)
            self._climb(0)

    def depart(self) -> None:
        if self._relay is not None and self._staged:
            if self._sent:
                self._crossing.wait()
            parts = [part for sent in self._sent for part in sent.unbind(0)]
            self._relay.start(parts, self._sets[self._turn][: self._numel])
        elif self._staged and self._legs:
            self._crossing.wait()
            self._climb(0)

    @property
    def climbs_early(self) -> bool:
        return len(self._legs) > 1 and not self._staged

    def _laid_out(self, parts: list[torch.Tensor], at: int) -> torch.Tensor:
        """The sums of several nodes, piece by piece as those of the level ``at`` gather them."""
        if len(parts) == 1:
            return parts[0]
        return torch.stack([part.view(self._levels[at].size, -1) for part in parts], dim=1).view(-1)

    def _climb(self, at: int) -> None:
        """Send what was laid out last to the workers of level ``at``."""
        leg, level = self._legs[at], self._levels[at]
        sizes = [len(nodes) * leg.piece for nodes in leg.bring]
        own = [sizes[level.rank]] * level.size
        self._work = level.all_to_all(self._received[at], self._sent[-1], sizes, own)

    def combine(self) -> None:
        """Add this worker's piece in tree order, and send the sums on: up, and from the top back to all."""
        if not self._legs:
            return
        assert self._work is not None
        self._work.wait()
        top, at = len(self._legs) - 1, self.combined
        self.combined += 1
        if at > top:
            self._descend(2 * top - at, self._returned[2 * top - at])
            return
        leg = self._legs[at]
        rows = list(zip(leg.nodes, self._received[at].view(len(leg.nodes), leg.piece).unbind(0), strict=True))
        sums = [node_sum([row for row in rows if row[0].start in node], node, _add) for node in leg.sums]
        if at == top:
            self._descend(top, sums[0])
        else:
            self._sent.append(self._laid_out(sums, at + 1))
            self._climb(at + 1)

    def _descend(self, at: int, piece: torch.Tensor) -> None:
        """Start to return the sums of this worker's piece to the workers of level ``at``."""
        room = self._sets[self._turn][: self._length] if at == 0 else self._returned[at - 1]
        self._work = self._levels[at].all_gather(room, piece)

    def settle(self) -> bool:
        return self._relay is None or self._relay.settle()

    def wait(self) -> None:
        if self._relay is not None:
            self._relay.wait()
        elif self._group.size > 1:
            assert self._work is not None
            self._work.wait()

    def _sums(self) -> torch.Tensor:
        if self._group.size > 1:
            return super()._sums()
        (total,) = self._slots.parts()
        return total[: self._numel]


class ExactReducer(Reducer[ExactBucket]):
    """Sums a list of tensors over the slots of all workers. See ``Reducer`` and ``Bucket``.

    Slots without samples are left out: they count as zero. ``like`` gives shapes, dtypes and devices; tensors should
    come in about the order in which ``put`` will bring them. ``deal``: which slots each worker has. ``lane``:
    a number of its own for each of several alike whose sums are under way at once.
    """

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        num_slots: int,
        group: Group,
        gradients: int = 0,
        *,
        hold: bool = False,
        deal: Deal = cut,
        lane: int = 0,
        bucket_bytes: int | None = None,
    ) -> None:
        first, members = lane * len(like), plan(like, bucket_bytes)
        buckets = [ExactBucket(each, like, num_slots, group, deal, hold=hold, first=first) for each in members]
        super().__init__(buckets, group, gradients)

    def begin_with(self, slots: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Start a step, and put all that this worker has, by slot."""
        self.begin()
        for slot, values in sorted(slots.items()):
            self.begin_slot(slot, last=slot == max(slots))
            for place, value in enumerate(values):
                self.put(place, value)
