"""Sums over slots in canonical order: the same bits for any number of workers, at the bandwidth of a ring.

Every worker adds up its slots along the canonical tree. Of each bucket, chunk c of every worker's subtree sums goes to
worker c (all-to-all), which adds them in tree order and returns the result to all (all-gather): 2(W-1)/W of the data,
as a ring all-reduce moves, but in ONE order of additions. Buckets leave while the backward pass still runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastune.comm.group import Group, Work
from elastune.comm.reducer import SLACK, Bucket, Reducer, plan
from elastune.comm.slot_sums import SlotSums
from elastune.comm.staging import Crossing, outbox
from elastune.core.slots import Deal, cut, subtrees, tree_sum


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.add_(b)


class _Bucket(Bucket):
    """Flat vectors are padded with zeros to a multiple of the worker count."""

    def __init__(
        self, members: list[int], like: Sequence[torch.Tensor], num_slots: int, group: Group, deal: Deal, *, hold: bool
    ) -> None:
        super().__init__(members, like, group, hold=hold)
        self._num_slots, self._deal = num_slots, deal
        self._slots = SlotSums(lambda: self._room(self._device), self._cut)
        self._received: torch.Tensor
        self._buffer = self._room(group.wire) if hold else torch.zeros(0, dtype=self._dtype, device=group.wire)
        self.regroup(group)

    def renew(self) -> None:
        super().renew()
        self._slots.forget()
        self._buffer = torch.zeros_like(self._buffer)
        self._received = self._buffer[: self._received.numel()]

    def regroup(self, group: Group) -> None:
        self._group = group
        runs = self._deal(self._num_slots, group.size)
        self._run = runs[group.rank]
        self._nodes = [node for run in runs for node in subtrees(run, self._num_slots)]
        self._parts_of = [len(subtrees(run, self._num_slots)) for run in runs]
        self._chunk = -(-self._numel // group.size)
        self._length = self._chunk * group.size
        if self._length > self._numel + SLACK:
            raise ValueError(f"{group.size} workers are too many to sum {self._numel} numbers exactly")
        needed = len(self._nodes) * self._chunk if group.size > 1 else 0
        if self._buffer.numel() < needed:
            self._buffer = self._buffer.new_zeros(needed)
        self._received = self._buffer[:needed]
        self.begin()

    def begin(self) -> None:
        self._slots.begin(self._run, self._num_slots, self.members)
        self._work: Work | None = None
        self._sent: torch.Tensor | None = None
        self.launched = False

    def put(self, index: int, value: torch.Tensor | None) -> bool:
        return self._slots.put(index, value)

    @property
    def here(self) -> torch.Tensor:
        return self._slots.here[: self._numel]

    def end_slot(self, slot: int) -> None:
        self._slots.end_slot(slot)

    def launch(self) -> None:
        """Send every chunk to the worker that adds it up."""
        self.launched = True
        parts, size = [value[: self._length] for value in self._slots.parts()], self._group.size
        if size == 1:
            return
        sent = parts[0] if len(parts) == 1 else torch.stack([p.view(size, -1) for p in parts], dim=1).view(-1)
        self._sizes_sent = [len(parts) * self._chunk] * size
        if self._staged:
            self._sent = outbox(sent, self._group.wire)
            self._crossing = Crossing(sent, self._sent)
        else:
            self._sent = sent
            self._send()

    def depart(self) -> None:
        if self._staged and self._group.size > 1:
            self._crossing.wait()
            self._send()

    def _send(self) -> None:
        assert self._sent is not None
        out_sizes = [count * self._chunk for count in self._parts_of]
        self._work = self._group.all_to_all(self._received, self._sent, out_sizes, self._sizes_sent)

    def combine(self) -> None:
        """Add this worker's chunk in tree order and start returning it to all."""
        if self._group.size == 1:
            return
        assert self._work is not None
        self._work.wait()
        rows = zip(self._nodes, self._received.view(len(self._nodes), self._chunk).unbind(0), strict=True)
        total = tree_sum(list(rows), self._num_slots, _add)
        self._work = self._group.all_gather(self._sets[self._turn][: self._length], total)

    def wait(self) -> None:
        if self._group.size > 1:
            assert self._work is not None
            self._work.wait()

    def _sums(self) -> torch.Tensor:
        if self._group.size > 1:
            return super()._sums()
        (total,) = self._slots.parts()
        return total[: self._numel]


class ExactReducer(Reducer[_Bucket]):
    """Sums a list of tensors over the slots of all workers. See ``Reducer`` and ``Bucket``.

    Slots without samples are left out: they count as zero. ``like`` gives shapes, dtypes and devices; tensors should
    come in about the order in which ``put`` will bring them. ``deal``: which slots each worker has.
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
    ) -> None:
        buckets = [_Bucket(members, like, num_slots, group, deal, hold=hold) for members in plan(like)]
        super().__init__(buckets, group, gradients)
