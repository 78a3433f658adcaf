"""Sums over slots that go to their owners only, and the barrier that commits a step.

Every worker adds up its own slots along the canonical tree. Part c of each bucket's subtree sums goes to worker c
(all-to-all), the *reducer* of part c. It adds them in tree order, to the same bits as ``parallel.comm.exact``, and
sends the sum to the part's other owners. A remote owner is outside the batch group that adds up a gradient; the reducer
sends it the finished sum. The commit barrier ends the step: a worker enters it once all sums that it owns have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import fsum

import torch

from elastune.core.layout import UNIT, BucketPlan, RemoteOwner, Segment, Split, buckets, by_param_block
from elastune.core.mesh import Mesh
from elastune.core.slots import Deal, Fold, cut, subtrees, tree_sum
from elastune.parallel.comm.exact import SlotSums
from elastune.parallel.comm.group import Group, Work
from elastune.parallel.comm.norms import unit_squares

Owners = Sequence[tuple[int, ...]]
"""By batch rank: the batch ranks that own the sums that this rank adds up, itself first."""
Sums = Sequence[tuple[Segment, torch.Tensor]]
"""Segments of parameter blocks, each with its flat sum."""


class OwnedReducer:
    """Sums one worker's gradients over its batch group; each sum ends at its owners. ``regroup`` comes first.

    A step: ``begin``; for each slot ``begin_slot`` and ``put`` of every parameter block; then ``launch``, ``combine``
    and ``wait``. If one of these calls raises ``GroupBroken``, call ``drain`` before the next ``begin`` or ``regroup``.
    ``StreamedReducer`` has the same calls; ``parallel.comm.reducer.Reducer`` sends all sums to all workers.
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
        owners: Owners,
    ) -> None:
        """Sum on ``group`` from the next step on, over ``num_slots`` slots; ``plans`` give each part its reducer.

        A bucket whose parameter blocks stay together keeps its memory.
        """
        self.drain()
        earlier = {bucket.plan.param_blocks: bucket for bucket in self.buckets}
        self.group = group
        self.buckets = [earlier.get(plan.param_blocks) or OwnedBucket(plan, split, device) for plan in plans]
        self._bucket_of = {param_block: bucket for bucket in self.buckets for param_block in bucket.plan.param_blocks}
        for bucket, plan in zip(self.buckets, plans, strict=True):
            bucket.regroup(plan, group, num_slots, owners)

    def begin(self) -> None:
        """A step begins."""
        self._ready = set()
        for bucket in self.buckets:
            bucket.begin()

    def begin_pass(self, ending: Sequence[int]) -> None:
        """See ``StreamedReducer``. In this class no gradient leaves before this worker's last slot."""

    def begin_slot(self, slot: int, *, last: bool) -> None:
        """The next ``put`` calls belong to ``slot``; ``last``: this worker's last slot of the step."""
        self._slot, self._last, self._squares = slot, last, {}

    def put(self, param_block: int, gradient: torch.Tensor | None) -> None:
        """The gradient of ``param_block``; it is copied. Buckets of the last slot leave as they fill."""
        if self.measures:
            self._squares[param_block] = 0.0 if gradient is None else square(gradient)
        bucket = self._bucket_of[param_block]
        if bucket.put(param_block, gradient):
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
        """Add up this worker's parts, and start to send the sums to their other owners."""
        for bucket in self.buckets:
            bucket.combine()

    def squares(self) -> torch.Tensor:
        """The squares of all buckets, one after another; see ``OwnedBucket.squares``."""
        return torch.cat([torch.zeros(0, dtype=torch.float64), *(bucket.squares() for bucket in self.buckets)])

    def wait(self) -> None:
        """Wait until all sums that this worker owns have arrived."""
        for bucket in self.buckets:
            bucket.wait()

    @property
    def held(self) -> list[torch.Tensor]:
        """All sums that this worker owns."""
        return [bucket.held for bucket in self.buckets]

    def sums(self) -> list[tuple[Segment, torch.Tensor]]:
        """The same sums by segment of a parameter block; adjoining segments are joined."""
        return [
            (segment, bucket.held[at : at + segment.size]) for bucket in self.buckets for segment, at in bucket.places
        ]

    def drain(self) -> None:
        """Make sure that no operation of a broken step changes any memory any more."""
        if not self.group.drain() and self._renewed is not self.group:
            self._renewed = self.group
            for bucket in self.buckets:
                bucket.renew()


class OwnedBucket:
    """The gradients of some parameter blocks as one flat vector, laid out by ``plan``, without padding.

    After ``wait`` the vector ``held`` has the sums of all parts that this worker owns, first the part that it adds up.
    It stays as it is until the next step's gradients travel. ``places``: the segments in it, each with its start.
    """

    def __init__(self, plan: BucketPlan, split: Split, device: torch.device) -> None:
        self.plan = plan
        self.launched = False
        dtype: torch.dtype = getattr(torch, split.param_blocks[plan.param_blocks[0]].dtype)
        self.held = torch.zeros(0, dtype=dtype, device=device)
        self._sizes = [split.param_blocks[i].size for i in plan.param_blocks]
        self._shapes = [split.param_blocks[i].shape for i in plan.param_blocks]
        self.numel = sum(self._sizes)
        self._dtype, self._device = dtype, device
        self._received = self._ordered = torch.zeros(0, dtype=dtype)
        self._sums = SlotSums(lambda: torch.empty(self.numel, dtype=dtype, device=device), self._views)

    def regroup(self, plan: BucketPlan, group: Group, num_slots: int, owners: Owners) -> None:
        """Reduce on ``group`` from the next step on.

        ``plan`` is of the same parameter blocks and has one part for each worker of ``group``.
        """
        self.plan = plan
        self._group, self._num_slots = group, num_slots
        runs, rank = cut(num_slots, group.size), group.rank
        self._run = runs[rank]
        self._nodes = [node for run in runs for node in subtrees(run, num_slots)]
        self._parts_of = [len(subtrees(run, num_slots)) for run in runs]
        self._cuts = self.plan.sizes
        self._own_size = self._cuts[rank]
        self._copied = [reducer for reducer in range(group.size) if rank in owners[reducer] and reducer != rank]
        self._copiers = sorted(set(owners[rank]) - {rank})
        # True: no worker owns a sum that another worker adds up.
        self._keeps = all(part_owners == (reducer,) for reducer, part_owners in enumerate(owners))
        at = 0
        reduced: list[tuple[Segment, int]] = []
        copied: list[tuple[Segment, int]] = []
        for reducer in (rank, *self._copied):
            for segment in self.plan.parts[reducer]:
                (reduced if reducer == rank else copied).append((segment, at))
                at += segment.size
        self.places = [*_joined(reduced), *_joined(copied)]
        self.held = torch.zeros(at, dtype=self._dtype, device=self._device)
        self.begin()

    def begin(self) -> None:
        """A step begins: forget the last one's gradients, but for ``held``."""
        self._sums.begin(self._run, self._num_slots, self.plan.param_blocks)
        self._works: list[Work] = []
        self._sent: list[torch.Tensor] = []
        self.launched = False

    def renew(self) -> None:
        """Take other memory: a library may still use the memory of a broken step."""
        self._sums.forget()
        self._received = self._ordered = torch.zeros(0, dtype=self._dtype)
        self.held = self.held.clone()
        self._works, self._sent = [], []

    def put(self, param_block: int, gradient: torch.Tensor | None) -> bool:
        """The gradient of ``param_block`` for the current slot; see ``SlotSums.put``."""
        return self._sums.put(param_block, gradient)

    def end_slot(self, slot: int) -> None:
        """All gradients of ``slot`` are in."""
        self._sums.end_slot(slot)

    def launch(self) -> None:
        """Send every part to its reducer."""
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
        out_sizes = [count * self._own_size for count in self._parts_of]
        if self._received.numel() < sum(out_sizes) or self._received.device != group.wire:
            self._received = self._empty(sum(out_sizes))
        self._sent = [sent]
        out = self._received[: sum(out_sizes)]
        self._works = [group.all_to_all(out, sent, out_sizes, [len(parts) * n for n in self._cuts])]

    def combine(self) -> None:
        """Add up this worker's part in tree order, and start to send the sum to the part's other owners."""
        group = self._group
        if group.size == 1:
            self.held = self._sent[0]
            return
        self._works.pop().wait()
        received = self._received[: len(self._nodes) * self._own_size].view(len(self._nodes), self._own_size)
        rows = list(zip(self._nodes, received.unbind(0), strict=True))
        if self._keeps:
            self.held = tree_sum(rows, self._num_slots, torch.Tensor.add_).to(self._device)
            return
        reduced, copied = self.held.split([self._own_size, len(self.held) - self._own_size])
        total = tree_sum(rows, self._num_slots, _adds_into(reduced, len(rows) - 1))
        if total is not reduced:
            reduced.copy_(total)
        # ``total`` does not change before it has been sent, because the caller waits for that in ``wait``.
        copies = total if len(self._copiers) == 1 else total.repeat(len(self._copiers))
        sizes = [self._own_size if worker in self._copiers else 0 for worker in range(group.size)]
        out_sizes = [n if reducer in self._copied else 0 for reducer, n in enumerate(self._cuts)]
        received = copied if copied.device == group.wire else torch.empty_like(copied, device=group.wire)
        self._sent = [copies, received]
        self._works = [group.all_to_all(received, copies, out_sizes, sizes)]

    def squares(self) -> torch.Tensor:
        """The squared norm of each unit that this worker adds up, in order; float64, on the CPU."""
        segments = self.plan.parts[self._group.rank]
        values = self.held[: sum(segment.size for segment in segments)]
        return unit_squares(list(values.split([segment.size for segment in segments])) if segments else [])

    def wait(self) -> None:
        """Wait until ``held`` is complete."""
        for work in self._works:
            work.wait()
        if self._works and self._sent[-1].device != self.held.device:
            self.held[self._own_size :].copy_(self._sent[-1])
        self._works = []

    def _empty(self, numel: int) -> torch.Tensor:
        # Written at once: the system allocates memory at the first touch, which must not slow down a step.
        return torch.empty(numel, dtype=self._dtype, device=self._group.wire).zero_()

    def _views(self, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        pieces = flat.split(self._sizes)
        return {
            i: part.view(shape) for i, part, shape in zip(self.plan.param_blocks, pieces, self._shapes, strict=True)
        }


def _joined(places: Sequence[tuple[Segment, int]]) -> list[tuple[Segment, int]]:
    """Join segments that adjoin in a parameter block; they adjoin in the vector as well."""
    joined: list[tuple[Segment, int]] = []
    for segment, at in places:
        if joined and (joined[-1][0].param_block, joined[-1][0].stop) == (segment.param_block, segment.start):
            first, place = joined[-1]
            joined[-1] = Segment(segment.param_block, first.start, segment.stop), place
        else:
            joined.append((segment, at))
    return joined


def _adds_into(target: torch.Tensor, count: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """An addition whose ``count``-th call writes into ``target``, if that is on the device of the summands."""
    done = 0

    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal done
        done += 1
        return torch.add(a, b, out=target) if done == count and a.device == target.device else a.add_(b)

    return add


def square(gradient: torch.Tensor) -> float:
    """The squared norm of one parameter block's gradient."""
    flat = gradient.reshape(-1)
    flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    return float(torch.dot(flat, flat))


# --- sums for remote owners -------------------------------------------------------------------------------------------


class RemoteOwnerSums:
    """Sends finished sums to their remote owners, over ``group``; the received sums lie on ``device``.

    If a replica is alone along the batch axis, no other worker computes with its block or stage. The second owner of
    the block is then a worker that computes with another block: it receives the sum, but no gradients of slots.

    Each mesh needs a new object. If ``exchange`` raises ``GroupBroken``, call ``drain`` before the next ``exchange``.
    """

    def __init__(self, remote_owners: Sequence[RemoteOwner], split: Split, group: Group, device: torch.device) -> None:
        by_type: dict[str, list[RemoteOwner]] = {}
        for remote_owner in remote_owners:
            param_block = split.param_blocks[remote_owner.segment.param_block]
            if param_block.trained:
                by_type.setdefault(param_block.dtype, []).append(remote_owner)
        self._group = group
        self._lines = [_Line(by_type[name], getattr(torch, name), group, device) for name in sorted(by_type)]

    def exchange(self, sums: Sums) -> None:
        """Send the remote owners their part of this worker's ``sums``; return when its own remote sums have arrived."""
        sums_of = by_param_block(sums) if self._lines else {}
        pending = [(line, *line.start(sums_of)) for line in self._lines]
        for line, work, _ in pending:
            line.finish(work)

    def sums(self) -> list[tuple[Segment, torch.Tensor]]:
        """The received sums; they stay as they are until the next ``exchange``."""
        return [segment_sum for line in self._lines for segment_sum in line.sums()]

    @property
    def held(self) -> list[torch.Tensor]:
        """The memory of ``sums``."""
        return [line.held for line in self._lines]

    def drain(self) -> None:
        """Make sure that no operation of a broken exchange changes any memory any more."""
        if self._lines and not self._group.drain():
            for line in self._lines:
                line.renew()


class _Line:
    """The remote sums of one dtype, which travel as one collective."""

    def __init__(
        self, remote_owners: Sequence[RemoteOwner], dtype: torch.dtype, group: Group, device: torch.device
    ) -> None:
        self._group = group
        ranks = range(group.size)
        self._sent = [[w.segment for w in remote_owners if (w.source, w.owner) == (group.rank, to)] for to in ranks]
        by_source = [
            [w.segment for w in remote_owners if (w.source, w.owner) == (source, group.rank)] for source in ranks
        ]
        self._sizes, self._out_sizes = list(map(_size, self._sent)), list(map(_size, by_source))
        self._received = [segment for segments in by_source for segment in segments]
        self._buffer = torch.zeros(sum(self._out_sizes), dtype=dtype, device=group.wire)
        self.held = self._buffer.to(device)

    def start(self, sums: Mapping[int, Sums]) -> tuple[Work, torch.Tensor]:
        """The work, and the sent tensor, which the caller keeps until the work has ended."""
        parts = [
            part
            for segments in self._sent
            for segment in segments
            for part in _parts(sums[segment.param_block], segment)
        ]
        sent = torch.cat([self._buffer[:0], *(part.to(self._group.wire) for part in parts)])
        return self._group.all_to_all(self._buffer, sent, self._out_sizes, self._sizes), sent

    def finish(self, work: Work) -> None:
        work.wait()
        if self.held is not self._buffer:
            self.held.copy_(self._buffer)

    def sums(self) -> Iterable[tuple[Segment, torch.Tensor]]:
        return zip(self._received, self.held.split([segment.size for segment in self._received]), strict=True)

    def renew(self) -> None:
        self.held, self._buffer = self.held.clone(), torch.zeros_like(self._buffer)


def _size(segments: Sequence[Segment]) -> int:
    return sum(segment.size for segment in segments)


def _parts(sums: Sums, wanted: Segment) -> Iterator[torch.Tensor]:
    """The elements of ``wanted``, in order; ``sums`` of its parameter block contain all of them."""
    for segment, values in sorted(sums, key=lambda pair: pair[0].start):
        first, last = max(segment.start, wanted.start), min(segment.stop, wanted.stop)
        if first < last:
            yield values[first - segment.start : last - segment.start]


# --- the end of a step ------------------------------------------------------------------------------------------------


class CommitBarrier:
    """The end of a step's reduction: every worker sends its numbers to every other one, once its sums have arrived.

    A worker that has passed the barrier therefore knows that all owners have every sum: the step is committed. A
    worker sends its control numbers, the statistics of its slots, its used parameter blocks, and the squares of the
    units that it adds up. ``result`` has the same of the whole step. It is a vector of fixed length, whatever the
    mesh, and equal on all workers.

    Args:
        split: How the model is split into parameter blocks.
        control: How many control numbers each worker sends.
        statistics: How many statistics each slot has.
        num_slots: The slots of a step; None: one for each batch rank.
        deal: Which slots each batch rank has.
    """

    def __init__(self, split: Split, control: int, statistics: int, num_slots: int | None, deal: Deal = cut) -> None:
        self._split, self._deal = split, deal
        self._widths = control, statistics, len(split.trained), sum(split.param_blocks[i].units for i in split.trained)
        self._slots = num_slots
        starts = [0, *accumulate(split.param_blocks[i].units for i in split.trained)]
        self._first_unit = dict(zip(split.trained, starts, strict=False))
        self._place = {param_block: place for place, param_block in enumerate(split.trained)}
        self.result = torch.zeros(sum(self._widths), dtype=torch.float64)

    def regroup(self, everyone: Group, mesh: Mesh) -> None:
        """Meet these workers from the next step on."""
        self._group, self._mesh = everyone, mesh
        self.num_slots = self._slots or mesh.batch
        runs = self._deal(self.num_slots, mesh.batch)
        self._nodes = [subtrees(run, self.num_slots) for run in runs]
        self.run = runs[mesh.batch_rank(everyone.rank)]
        plans = {}
        self._units, self._lengths = [], []
        control, statistics, flags, _ = self._widths
        for rank in range(mesh.workers):
            computed = self._split.computed(mesh, rank)
            if computed not in plans:
                plans[computed] = buckets(self._split, computed, mesh.batch)
            parts = [plan.parts[mesh.batch_rank(rank)] for plan in plans[computed]]
            units = [self._units_of(segment) for part in parts for segment in part]
            self._units.append(torch.cat([torch.zeros(0, dtype=torch.int64), *units]))
            slot_numbers = len(self._nodes[mesh.batch_rank(rank)]) * statistics
            self._lengths.append(control + slot_numbers + flags + len(self._units[-1]))

    def _units_of(self, segment: Segment) -> torch.Tensor:
        first = self._first_unit[segment.param_block]
        return torch.arange(first + segment.start // UNIT, first - (-segment.stop // UNIT))

    def wait_for_all(
        self,
        control: Sequence[float],
        statistics: Mapping[int, torch.Tensor],
        used: Iterable[int],
        squares: torch.Tensor,
    ) -> None:
        """Send this worker's numbers, and wait for those of all workers; then ``result`` is complete.

        Args:
            control: This worker's control numbers.
            statistics: By slot, flat; slots that are left out count as zero.
            used: The parameter blocks that have gradients from this worker's passes.
            squares: The result of ``OwnedReducer.squares``.

        Raises:
            GroupBroken: If the group ends first. The step may be committed on other workers.
        """
        zero = torch.zeros(self._widths[1])
        fold: Fold[torch.Tensor] = Fold(self.run, self.num_slots, torch.add)
        for slot in self.run:
            fold.push(slot, statistics.get(slot, zero))
        flags = torch.zeros(self._widths[2], dtype=torch.float64)
        flags[[self._place[param_block] for param_block in used]] = 1.0
        sums = [value.double() for _, value in fold.parts]
        numbers = torch.cat([torch.tensor(control, dtype=torch.float64), *sums, flags, squares])
        self.result = self._assembled(self._gathered(numbers))

    def _gathered(self, numbers: torch.Tensor) -> list[torch.Tensor]:
        group = self._group
        if group.size == 1:
            return [numbers]
        out = torch.empty(sum(self._lengths), dtype=torch.float64, device=group.wire)
        copies = numbers.to(group.wire).repeat(group.size)
        group.all_to_all(out, copies, self._lengths, [len(numbers)] * group.size).wait()
        return list(out.cpu().split(self._lengths))

    def _assembled(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """The numbers of the whole step, from the numbers of all workers."""
        control, width, flags, _ = self._widths
        result = torch.zeros(sum(self._widths), dtype=torch.float64)
        total, used, squares = result[:control], result[control + width :][:flags], result[control + width + flags :]
        parts: list[tuple[range, torch.Tensor]] = []
        for rank, row in enumerate(rows):
            nodes = self._nodes[self._mesh.batch_rank(rank)]
            row_control, row_statistics, row_used, row_squares = row.split(
                [control, len(nodes) * width, flags, len(self._units[rank])]
            )
            total += row_control
            torch.maximum(used, row_used, out=used)
            squares[self._units[rank]] = row_squares
            if self._mesh.speaks(rank):
                parts += zip(nodes, row_statistics.float().view(-1, width), strict=True)
        result[control : control + width] = tree_sum(parts, self.num_slots, torch.add)
        return result

    @property
    def control(self) -> list[float]:
        """The sums of the control numbers over workers."""
        return self._result_part(0).tolist()

    @property
    def statistics(self) -> list[float]:
        """The sums of the statistics over slots."""
        return self._result_part(1).tolist()

    @property
    def used(self) -> frozenset[int]:
        """The parameter blocks that have gradients from any worker's passes."""
        flags = self._result_part(2).tolist()
        return frozenset(param_block for param_block, flag in zip(self._split.trained, flags, strict=True) if flag)

    @property
    def squares(self) -> torch.Tensor:
        """The squared norm of every unit of every trained parameter block, in order."""
        return self._result_part(3)

    def _result_part(self, place: int) -> torch.Tensor:
        start = sum(self._widths[:place])
        return self.result[start : start + self._widths[place]]
