"""Sums over slots that go to their owners only, and the barrier that commits a step.

Every worker adds up its own slots along the canonical tree. Part c of each bucket's subtree sums goes to worker c,
which adds them in tree order, to the same bits as ``comm.exact``. The part's other owners get the sum from there.
A remote owner is a worker outside the batch group that adds up a gradient. It is sent the finished sum.
The commit barrier ends the step: each worker passes it once all sums that it owns have arrived.
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

# [owned] Sums over slots that stop at their holders: each part of a bucket is added up by one worker, in canonical order.
#
# Every worker adds up its slots along the canonical tree. Of each bucket, part c of every worker's subtree sums goes to
# worker c (all-to-all), which adds them in tree order, to the bits that ``comm.exact`` comes to. From there the sum goes
# to the part's other holders only. What all must know of a step goes through the ``CommitBarrier``.

Owners = Sequence[tuple[int, ...]]
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
        dtype: torch.dtype = getattr(torch, split.param_blocks[plan.param_blocks[0]].dtype)
        self.held = torch.zeros(0, dtype=dtype, device=device)
        self._sizes = [split.param_blocks[i].size for i in plan.param_blocks]
        self._shapes = [split.param_blocks[i].shape for i in plan.param_blocks]
        self.numel = sum(self._sizes)
        self._dtype, self._device = dtype, device
        self._received = self._ordered = torch.zeros(0, dtype=dtype)
        self._sums = SlotSums(lambda: torch.empty(self.numel, dtype=dtype, device=device), self._views)

    def regroup(self, plan: BucketPlan, group: Group, num_slots: int, owners: Owners) -> None:
        """Reduce on ``group`` from the next step on. ``plan``: of the same leaves, a part for each of its workers."""
        self.plan = plan
        self._group, self._num_slots = group, num_slots
        runs, rank = cut(num_slots, group.size), group.rank
        self._run = runs[rank]
        self._nodes = [node for run in runs for node in subtrees(run, num_slots)]
        self._parts_of = [len(subtrees(run, num_slots)) for run in runs]
        self._cuts = self.plan.sizes
        self._mine = self._cuts[rank]
        self._copied = [reducer for reducer in range(group.size) if rank in owners[reducer] and reducer != rank]
        self._copiers = sorted(set(owners[rank]) - {rank})
        self._keeps = all(
            each == (reducer,) for reducer, each in enumerate(owners)
        )  # nobody holds what another adds up
        at = 0
        own: list[tuple[Segment, int]] = []
        copied: list[tuple[Segment, int]] = []
        for reducer in (rank, *self._copied):
            for segment in self.plan.parts[reducer]:
                (own if reducer == rank else copied).append((segment, at))
                at += segment.size
        self.places = [*_joined(own), *_joined(copied)]
        self.held = torch.zeros(at, dtype=self._dtype, device=self._device)
        self.begin()

    def begin(self) -> None:
        """A step begins: forget the last one's gradients, but for ``held``."""
        self._sums.begin(self._run, self._num_slots, self.plan.param_blocks)
        self._works: list[Work] = []
        self._sent: list[torch.Tensor] = []
        self.launched = False

    def renew(self) -> None:
        """A library may still use the memory of a step that broke: take other memory."""
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
        out_sizes = [n if reducer in self._copied else 0 for reducer, n in enumerate(self._cuts)]
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
        return {
            i: part.view(shape) for i, part, shape in zip(self.plan.param_blocks, pieces, self._shapes, strict=True)
        }


def _joined(places: Sequence[tuple[Segment, int]]) -> list[tuple[Segment, int]]:
    """Neighbours in a leaf, which are neighbours in the vector as well, as one."""
    found: list[tuple[Segment, int]] = []
    for segment, at in places:
        if found and (found[-1][0].param_block, found[-1][0].stop) == (segment.param_block, segment.start):
            first, place = found[-1]
            found[-1] = Segment(segment.param_block, first.start, segment.stop), place
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
        owners: Owners,
    ) -> None:
        """Sum on ``group`` from the next step on, over ``num_slots`` slots; ``plans`` say who adds up what.

        Where leaves stay together the memory of their bucket is there already.
        """
        self.drain()
        there = {bucket.plan.param_blocks: bucket for bucket in self.buckets}
        self.group = group
        self.buckets = [there.get(plan.param_blocks) or OwnedBucket(plan, split, device) for plan in plans]
        self._bucket_of = {param_block: bucket for bucket in self.buckets for param_block in bucket.plan.param_blocks}
        for bucket, plan in zip(self.buckets, plans, strict=True):
            bucket.regroup(plan, group, num_slots, owners)

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


# [wards] Sums to those that hold a state for others: workers that are not in the batch group which adds up its gradient.
#
# Where a replica is alone along the batch, nobody else computes with a block or a stage; its second holder is a worker
# that computes with another one. It is sent the sum, no values, and no sooner than all of it is added up.

Sums = Sequence[tuple[Segment, torch.Tensor]]
"""Segments of leaves, each with its flat sum."""


class RemoteOwnerSums:
    """What ``remote_owners`` say travels over ``group``, to lie on ``device``; it is made anew for each mesh.

    Where ``exchange`` raises ``GroupBroken`` there must be a ``drain`` before the next one.
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
        """Send what of ``sums``, this worker's, others hold as well; return once all that it holds for them is here."""
        found = by_param_block(sums) if self._lines else {}
        under_way = [(line, *line.start(found)) for line in self._lines]
        for line, work, _ in under_way:
            line.finish(work)

    def sums(self) -> list[tuple[Segment, torch.Tensor]]:
        """What has come; it stays as it is until the next ``exchange``."""
        return [each for line in self._lines for each in line.sums()]

    @property
    def held(self) -> list[torch.Tensor]:
        """The memory of ``sums``."""
        return [line.held for line in self._lines]

    def drain(self) -> None:
        """See that nothing of an exchange that broke changes any memory any more."""
        if self._lines and not self._group.drain():
            for line in self._lines:
                line.renew()


class _Line:
    """What travels of one dtype, as one collective."""

    def __init__(
        self, remote_owners: Sequence[RemoteOwner], dtype: torch.dtype, group: Group, device: torch.device
    ) -> None:
        self._group = group
        ranks = range(group.size)
        self._sent = [[w.segment for w in remote_owners if (w.source, w.owner) == (group.rank, to)] for to in ranks]
        came = [[w.segment for w in remote_owners if (w.source, w.owner) == (source, group.rank)] for source in ranks]
        self._sizes, self._out_sizes = list(map(_size, self._sent)), list(map(_size, came))
        self._came = [segment for each in came for segment in each]
        self._room = torch.zeros(sum(self._out_sizes), dtype=dtype, device=group.wire)
        self.held = self._room.to(device)

    def start(self, sums: Mapping[int, Sums]) -> tuple[Work, torch.Tensor]:
        """The work, and what is kept as long as it may be read."""
        parts = [part for each in self._sent for segment in each for part in _parts(sums[segment.param_block], segment)]
        sent = torch.cat([self._room[:0], *(part.to(self._group.wire) for part in parts)])
        return self._group.all_to_all(self._room, sent, self._out_sizes, self._sizes), sent

    def finish(self, work: Work) -> None:
        work.wait()
        if self.held is not self._room:
            self.held.copy_(self._room)

    def sums(self) -> Iterable[tuple[Segment, torch.Tensor]]:
        return zip(self._came, self.held.split([segment.size for segment in self._came]), strict=True)

    def renew(self) -> None:
        self.held, self._room = self.held.clone(), torch.zeros_like(self._room)


def _size(segments: Sequence[Segment]) -> int:
    return sum(segment.size for segment in segments)


def _parts(sums: Sums, wanted: Segment) -> Iterator[torch.Tensor]:
    """The elements of ``wanted``, in order; all of them are in its leaf's ``sums``."""
    for segment, values in sorted(sums, key=lambda each: each[0].start):
        first, last = max(segment.start, wanted.start), min(segment.stop, wanted.stop)
        if first < last:
            yield values[first - segment.start : last - segment.start]


# [gate] The end of a step's reduction: what all workers must know of it, and that everything has arrived.


class CommitBarrier:
    """What every worker tells every other one of a step, once all that it adds up or holds a copy of has come.

    So whoever comes through knows that each sum lies with all its holders: the step is committed. A worker tells its
    control numbers, the statistics of its slots, which leaves it has used, and the squares of the units that it adds
    up. ``result`` has the same of the whole step: a vector of a fixed length, whatever the mesh, equal on all workers.
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
            told = len(self._nodes[mesh.batch_rank(rank)]) * statistics
            self._lengths.append(control + told + flags + len(self._units[-1]))

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
        """Tell, and wait until all have told.

        Args:
            control: This worker's numbers.
            statistics: By slot, flat; slots that are left out count as zero.
            used: The leaves that this worker's passes have given gradients.
            squares: As ``OwnedReducer.squares`` gives them.
        """
        zero = torch.zeros(self._widths[1])
        fold: Fold[torch.Tensor] = Fold(self.run, self.num_slots, torch.add)
        for slot in self.run:
            fold.push(slot, statistics.get(slot, zero))
        flags = torch.zeros(self._widths[2], dtype=torch.float64)
        flags[[self._place[param_block] for param_block in used]] = 1.0
        sums = [value.double() for _, value in fold.parts]
        mine = torch.cat([torch.tensor(control, dtype=torch.float64), *sums, flags, squares])
        self.result = self._assembled(self._gathered(mine))

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        group = self._group
        if group.size == 1:
            return [mine]
        out = torch.empty(sum(self._lengths), dtype=torch.float64, device=group.wire)
        copies = mine.to(group.wire).repeat(group.size)
        group.all_to_all(out, copies, self._lengths, [len(mine)] * group.size).wait()
        return list(out.cpu().split(self._lengths))

    def _assembled(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole step's, from all workers'."""
        control, width, flags, _ = self._widths
        found = torch.zeros(sum(self._widths), dtype=torch.float64)
        whole, used, squares = found[:control], found[control + width :][:flags], found[control + width + flags :]
        parts: list[tuple[range, torch.Tensor]] = []
        for rank, row in enumerate(rows):
            nodes = self._nodes[self._mesh.batch_rank(rank)]
            own, told, theirs, rest = row.split([control, len(nodes) * width, flags, len(self._units[rank])])
            whole += own
            torch.maximum(used, theirs, out=used)
            squares[self._units[rank]] = rest
            if self._mesh.speaks(rank):
                parts += zip(nodes, told.float().view(-1, width), strict=True)
        found[control : control + width] = tree_sum(parts, self.num_slots, torch.add)
        return found

    @property
    def control(self) -> list[float]:
        """The sums over workers."""
        return self._result_part(0).tolist()

    @property
    def statistics(self) -> list[float]:
        """The sums over slots."""
        return self._result_part(1).tolist()

    @property
    def used(self) -> frozenset[int]:
        """The leaves that any worker's passes have given gradients."""
        flags = self._result_part(2).tolist()
        return frozenset(param_block for param_block, flag in zip(self._split.trained, flags, strict=True) if flag)

    @property
    def squares(self) -> torch.Tensor:
        """Of every unit of every trained leaf, in order."""
        return self._result_part(3)

    def _result_part(self, place: int) -> torch.Tensor:
        start = sum(self._widths[:place])
        return self.result[start : start + self._widths[place]]
