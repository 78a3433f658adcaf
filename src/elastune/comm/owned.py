"""Sums over slots that stop at their holders: each part of a bucket is added up by one worker, in canonical order.

Every worker adds up its slots along the canonical tree. Of each bucket, part c of every worker's subtree sums goes to
worker c (all-to-all), which adds them in tree order, to the bits that ``comm.exact`` comes to. From there the sum goes
to the part's other holders only. What all must know of a step goes through the ``Gate``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum

import torch

from elastune.comm.group import Group, Work
from elastune.comm.slot_sums import SlotSums
from elastune.comm.units import unit_squares
from elastune.core.leaves import Split
from elastune.core.ownership import BucketPlan, Segment
from elastune.core.slots import cut, subtrees, tree_sum

Holders = Sequence[tuple[int, ...]]
"""By batch rank: the batch ranks that hold what that one adds up, itself first."""


def _adds_into(target: torch.Tensor, count: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Additions, of which the last of ``count`` goes to ``target``, where that is on their device."""
    done = 0

    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal done
        done += 1
        return torch.add(a, b, out=target) if done == count and a.device == target.device else a.add_(b)

    return add


def square(gradient: torch.Tensor) -> float:
    """The squared norm of one leaf's gradient."""
    flat = gradient.reshape(-1)
    flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    return float(torch.dot(flat, flat))


class OwnedBucket:
    """Some leaves' gradients as one flat vector, laid out as ``plan`` says, without padding.

    After ``wait`` the vector ``held`` has the sums of all parts that this worker holds, first the one that it adds up;
    it stays as it is until the next step's gradients travel. ``places``: the segments in it, each with the place where
    it begins.
    """

    def __init__(self, plan: BucketPlan, split: Split, device: torch.device) -> None:
        self.plan = plan
        self.launched = False
        dtype: torch.dtype = getattr(torch, split.leaves[plan.leaves[0]].dtype)
        self.held = torch.zeros(0, dtype=dtype, device=device)
        self._sizes = [split.leaves[i].size for i in plan.leaves]
        self._shapes = [split.leaves[i].shape for i in plan.leaves]
        self.numel = sum(self._sizes)
        self._dtype, self._device = dtype, device
        self._received = self._ordered = torch.zeros(0, dtype=dtype)
        self._sums = SlotSums(lambda: torch.empty(self.numel, dtype=dtype, device=device), self._views)

    def regroup(self, plan: BucketPlan, group: Group, num_slots: int, holders: Holders) -> None:
        """Reduce on ``group`` from the next step on. ``plan``: of the same leaves, a part for each of its workers."""
        self.plan = plan
        self._group, self._num_slots = group, num_slots
        runs, rank = cut(num_slots, group.size), group.rank
        self._run = runs[rank]
        self._nodes = [node for run in runs for node in subtrees(run, num_slots)]
        self._parts_of = [len(subtrees(run, num_slots)) for run in runs]
        self._cuts = self.plan.sizes
        self._mine = self._cuts[rank]
        self._copied = [adder for adder in range(group.size) if rank in holders[adder] and adder != rank]
        self._copiers = sorted(set(holders[rank]) - {rank})
        self._keeps = all(each == (adder,) for adder, each in enumerate(holders))  # nobody holds what another adds up
        at = 0
        own: list[tuple[Segment, int]] = []
        copied: list[tuple[Segment, int]] = []
        for adder in (rank, *self._copied):
            for segment in self.plan.parts[adder]:
                (own if adder == rank else copied).append((segment, at))
                at += segment.size
        self.places = [*_joined(own), *_joined(copied)]
        self.held = torch.zeros(at, dtype=self._dtype, device=self._device)
        self.begin()

    def begin(self) -> None:
        """A step begins: forget the last one's gradients, but for ``held``."""
        self._sums.begin(self._run, self._num_slots, self.plan.leaves)
        self._works: list[Work] = []
        self._sent: list[torch.Tensor] = []
        self.launched = False

    def renew(self) -> None:
        """A library may still use the memory of a step that broke: take other memory."""
        self._sums.forget()
        self._received = self._ordered = torch.zeros(0, dtype=self._dtype)
        self.held = self.held.clone()
        self._works, self._sent = [], []

    def put(self, leaf: int, gradient: torch.Tensor | None) -> bool:
        """The gradient of ``leaf`` for the current slot; see ``SlotSums.put``."""
        return self._sums.put(leaf, gradient)

    def end_slot(self, slot: int) -> None:
        """All gradients of ``slot`` are in."""
        self._sums.end_slot(slot)

    def launch(self) -> None:
        """Send every part to the worker that adds it up."""
        self.launched = True
        parts, group = self._sums.parts(), self._group
        if group.size == 1:
            self._sent = parts
            return
        sent = parts[0]
        if len(parts) > 1:
            pieces = [part.split(self._cuts) for part in parts]
            if self._ordered.numel() != len(parts) * self.numel:
                self._ordered = torch.empty(len(parts) * self.numel, dtype=self._dtype, device=self._device)
            sent = self._ordered
            torch.cat([piece[worker] for worker in range(group.size) for piece in pieces], out=sent)
        sent = sent.to(group.wire)
        out_sizes = [count * self._mine for count in self._parts_of]
        if self._received.numel() < sum(out_sizes) or self._received.device != group.wire:
            self._received = self._empty(sum(out_sizes))
        self._sent = [sent]
        out = self._received[: sum(out_sizes)]
        self._works = [group.all_to_all(out, sent, out_sizes, [len(parts) * n for n in self._cuts])]

    def combine(self) -> None:
        """Add up this worker's part in tree order; where others hold it too, start to send it to them."""
        group = self._group
        if group.size == 1:
            self.held = self._sent[0]
            return
        self._works.pop().wait()
        received = self._received[: len(self._nodes) * self._mine].view(len(self._nodes), self._mine)
        rows = list(zip(self._nodes, received.unbind(0), strict=True))
        if self._keeps:
            self.held = tree_sum(rows, self._num_slots, torch.Tensor.add_).to(self._device)
            return
        own, others = self.held.split([self._mine, len(self.held) - self._mine])
        total = tree_sum(rows, self._num_slots, _adds_into(own, len(rows) - 1))
        if total is not own:
            own.copy_(total)
        # Nothing changes it before it has gone: ``wait`` is for that, too.
        copies = total if len(self._copiers) == 1 else total.repeat(len(self._copiers))
        sizes = [self._mine if worker in self._copiers else 0 for worker in range(group.size)]
        out_sizes = [n if adder in self._copied else 0 for adder, n in enumerate(self._cuts)]
        room = others if others.device == group.wire else torch.empty_like(others, device=group.wire)
        self._sent = [copies, room]
        self._works = [group.all_to_all(room, copies, out_sizes, sizes)]

    def squares(self) -> torch.Tensor:
        """The squared norm of each unit that this worker adds up, in order; float64, on the CPU."""
        own = self.plan.parts[self._group.rank]
        values = self.held[: sum(segment.size for segment in own)]
        return unit_squares(list(values.split([segment.size for segment in own])) if own else [])

    def wait(self) -> None:
        """Until ``held`` is complete."""
        for work in self._works:
            work.wait()
        if self._works and self._sent[-1].device != self.held.device:
            self.held[self._mine :].copy_(self._sent[-1])
        self._works = []

    def _empty(self, numel: int) -> torch.Tensor:
        # Written to at once: the system gives memory at the first touch, which is not to fall into a step.
        return torch.empty(numel, dtype=self._dtype, device=self._group.wire).zero_()

    def _views(self, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        pieces = flat.split(self._sizes)
        return {i: part.view(shape) for i, part, shape in zip(self.plan.leaves, pieces, self._shapes, strict=True)}


def _joined(places: Sequence[tuple[Segment, int]]) -> list[tuple[Segment, int]]:
    """Neighbours in a leaf, which are neighbours in the vector as well, as one."""
    found: list[tuple[Segment, int]] = []
    for segment, at in places:
        if found and (found[-1][0].leaf, found[-1][0].stop) == (segment.leaf, segment.start):
            first, place = found[-1]
            found[-1] = Segment(segment.leaf, first.start, segment.stop), place
        else:
            found.append((segment, at))
    return found


class OwnedReducer:
    """The buckets of one worker's leaves over its batch group. See ``OwnedBucket`` and ``comm.reducer.Reducer``.

    A step: ``begin``; for each slot ``begin_slot`` and ``put`` of every leaf; then ``launch``, ``combine``, ``wait``.
    Where one of them raises ``GroupBroken`` there must be a ``drain`` before the next ``begin`` or ``regroup``.
    """

    def __init__(self) -> None:
        self.buckets: list[OwnedBucket] = []
        self.group = Group()
        self._bucket_of: dict[int, OwnedBucket] = {}
        self._ready: set[int] = set()
        self._slot, self._last = 0, False
        self.measures = False
        self._squares: dict[int, float] = {}
        self._renewed: Group | None = None

    def regroup(
        self,
        plans: Sequence[BucketPlan],
        split: Split,
        device: torch.device,
        group: Group,
        num_slots: int,
        holders: Holders,
    ) -> None:
        """Sum on ``group`` from the next step on, over ``num_slots`` slots; ``plans`` say who adds up what.

        Where leaves stay together the memory of their bucket is there already.
        """
        self.drain()
        there = {bucket.plan.leaves: bucket for bucket in self.buckets}
        self.group = group
        self.buckets = [there.get(plan.leaves) or OwnedBucket(plan, split, device) for plan in plans]
        self._bucket_of = {leaf: bucket for bucket in self.buckets for leaf in bucket.plan.leaves}
        for bucket, plan in zip(self.buckets, plans, strict=True):
            bucket.regroup(plan, group, num_slots, holders)

    def begin(self) -> None:
        """A step begins."""
        self._ready = set()
        for bucket in self.buckets:
            bucket.begin()

    def begin_pass(self, ending: Sequence[int]) -> None:
        """See ``StreamedReducer``. Here nothing leaves before this worker's last slot."""

    def begin_slot(self, slot: int, *, last: bool) -> None:
        """What is ``put`` from here on is of ``slot``; ``last``: this worker has no further one in this step."""
        self._slot, self._last, self._squares = slot, last, {}

    def put(self, leaf: int, gradient: torch.Tensor | None) -> None:
        """The gradient of ``leaf``; it is copied. Buckets of the last slot leave as they fill."""
        if self.measures:
            self._squares[leaf] = 0.0 if gradient is None else square(gradient)
        bucket = self._bucket_of[leaf]
        if bucket.put(leaf, gradient):
            bucket.end_slot(self._slot)
            if self._last:
                self._launch_in_order(bucket)

    def _launch_in_order(self, ready: OwnedBucket) -> None:
        """Every worker must start its collectives in the same order, whatever order its gradients came in."""
        self._ready.add(id(ready))
        for bucket in self.buckets:
            if not bucket.launched:
                if id(bucket) not in self._ready:
                    return
                bucket.launch()

    def slot_square(self) -> float:
        """The squared norm of the gradients that were ``put`` for the current slot, where ``measures`` is true."""
        return fsum(self._squares.values())

    def launch(self) -> None:
        """This worker has no more to put."""
        for bucket in self.buckets:
            if not bucket.launched:
                bucket.launch()

    def combine(self) -> None:
        """Add up what this worker adds up; sums start for their other holders."""
        for bucket in self.buckets:
            bucket.combine()

    def squares(self) -> torch.Tensor:
        """Of all buckets, one after another; see ``OwnedBucket.squares``."""
        return torch.cat([torch.zeros(0, dtype=torch.float64), *(bucket.squares() for bucket in self.buckets)])

    def wait(self) -> None:
        """Until everything that this worker holds is here."""
        for bucket in self.buckets:
            bucket.wait()

    @property
    def held(self) -> list[torch.Tensor]:
        """All sums that this worker holds."""
        return [bucket.held for bucket in self.buckets]

    def sums(self) -> list[tuple[Segment, torch.Tensor]]:
        """The same: segments of leaves, neighbours joined, each with its sums."""
        return [
            (segment, bucket.held[at : at + segment.size]) for bucket in self.buckets for segment, at in bucket.places
        ]

    def drain(self) -> None:
        """See that nothing of a step that broke changes any memory any more."""
        if not self.group.drain() and self._renewed is not self.group:
            self._renewed = self.group
            for bucket in self.buckets:
                bucket.renew()
