"""Which worker holds which part of a model's state: tensor boxes, flat ranges, parameter blocks, owners.

A *parameter block* is what a backward pass gives one gradient for: a parameter, or one virtual block of a parameter
that the tensor axis divides. Blocks are fixed for a run and do not depend on the mesh, so that results do not depend
on it either. The state of a block (values, optimizer state) is flat. Workers hold ranges of it that begin at multiples
of ``UNIT`` elements, so that a norm or an update that is computed unit by unit does not depend on the owner.

An *owner* has a unit's state and updates it. The *reducer* adds up the unit's gradient: it is one of the owners, and
sends the sum to the others. New values go to the workers that compute with the block and do not own it. As many
owners as workers is plain data parallelism. One owner is ZeRO. Two owners survive the loss of a worker, at no
additional byte: what is sent as a gradient need not be sent as a value (2 (W-1)/W of the parameters a step).

Checkpoints describe flat ranges as boxes of the tensors of plain PyTorch, so that workers with another division can
read them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import TypeVar

from elastune.core.mesh import Mesh
from elastune.core.slots import cut

# Which worker holds which piece of a run's state: boxes of tensors by name, and what is left of them.

Box = tuple[tuple[int, int], ...]
"""From (inclusive) and to (exclusive) in each dimension of a tensor; a scalar's box is ()."""


@dataclass(frozen=True)
class Piece:
    """The part ``box`` of the tensor ``name`` of the whole state."""

    name: str
    box: Box

    @property
    def size(self) -> int:
        """How many elements it has."""
        return volume(self.box)


Layout = Mapping[int, tuple[Piece, ...]]
"""What each worker holds."""


class CopiesDiffer(Exception):
    """Workers that must hold the same bits do not: whatever the run came to would be worth nothing."""


class Unrecoverable(Exception):
    """Nobody holds ``pieces``: all workers must go back to a checkpoint."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        names = sorted({piece.name for piece in pieces})
        super().__init__(f"nobody holds all of {', '.join(names)}")


def intersection(a: Box, b: Box) -> Box | None:
    """What both boxes, of one tensor, have in common; None where that has no element."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def without(boxes: Iterable[Box], others: Iterable[Box]) -> list[Box]:
    """What is left of ``boxes`` once ``others`` are taken out: boxes that do not overlap where ``boxes`` do not."""
    left = [box for box in boxes if volume(box)]
    for other in others:
        left = [rest for box in left for rest in _cut_out(box, other)]
    return left


def volume(box: Box) -> int:
    """How many elements are in ``box``."""
    return prod(stop - start for start, stop in box)


def _cut_out(box: Box, other: Box) -> list[Box]:
    """``box`` without ``other``: what lies before and after it, dimension by dimension."""
    common = intersection(box, other)
    if common is None:
        return [box]
    found = []
    for i, ((start, stop), (first, last)) in enumerate(zip(box, common, strict=True)):
        for edge in ((start, first), (last, stop)):
            if edge[0] < edge[1]:
                found.append((*common[:i], edge, *box[i + 1 :]))
    return found


# Stretches: runs of a box's elements in C order, and the boxes that they fill.
#
# Sharded state is cut flat; where it lies in a tensor as plain PyTorch has it is what a checkpoint tells, so that it
# can be read by workers that cut it otherwise.


@dataclass(frozen=True)
class FlatRange:
    """Elements ``start`` to ``stop`` (exclusive) of the part ``box`` of a tensor, flattened in C order."""

    box: Box
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    @property
    def boxes(self) -> list[tuple[Box, int]]:
        """What it fills, as boxes of the tensor, each with the place of its first element in the stretch.

        Each box is contiguous in the stretch; of a box of n dimensions there are at most 2n - 1.
        """
        shape = [stop - start for start, stop in self.box]
        corner = [start for start, _ in self.box]
        found = []
        for local, at in _filled(shape, self.start, self.stop):
            moved = tuple((first + start, first + stop) for (start, stop), first in zip(local, corner, strict=True))
            found.append((moved, at - self.start))
        return found


def whole_range(shape: Sequence[int]) -> FlatRange:
    """All of a tensor."""
    return FlatRange(tuple((0, size) for size in shape), 0, prod(shape))


def fills(shape: Sequence[int], stretches: Iterable[FlatRange]) -> bool:
    """Whether each element of a tensor of ``shape`` is in exactly one of ``stretches``."""
    boxes = [box for stretch in stretches for box, _ in stretch.boxes]
    goal = whole_range(shape)
    return sum(map(volume, boxes)) == goal.size and not without([goal.box], boxes)


def _filled(shape: Sequence[int], start: int, stop: int) -> list[tuple[Box, int]]:
    """Boxes of a tensor of ``shape``, each with the flat place of its first element."""
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [(((start, stop),) if shape else (), start)]
    row = prod(shape[1:])
    found: list[tuple[Box, int]] = []
    at = start
    while at < stop:
        first, inside = divmod(at, row)
        if inside or stop - at < row:  # a part of one row
            end = min(stop, (first + 1) * row)
            inner = _filled(shape[1:], inside, inside + end - at)
            found += [(((first, first + 1), *box), first * row + place) for box, place in inner]
        else:
            last = stop // row
            end = last * row
            found.append((((first, last), *((0, size) for size in shape[1:])), at))
        at = end
    return found


# What a model is made of, whatever carries it: leaves, cut into units, and which worker computes with which of them.
#
# A *leaf* is what a backward pass gives one gradient for: a parameter, or one virtual block of a parameter that the
# tensor axis divides. Leaves are fixed for a run: they do not depend on the mesh, so nothing that is computed leaf by
# leaf shows it. A leaf's state (its values, the optimizer's tensors of its shape) is flat, and is held in ranges of it
# that begin at multiples of ``UNIT`` elements: whatever is computed unit by unit (a norm, an update) does not show who
# held what.

UNIT = 4096
"""Elements. Kernels with a tail of their own (fused optimizers) see no range that begins or ends inside of a unit, but
at a leaf's end."""


@dataclass(frozen=True)
class ParamBlock:
    """One leaf.

    Attributes:
        name: Unique in the model: the parameter's name, with ``#2`` behind it for virtual block 2.
        tensor: The parameter's name in the user's model.
        box: Which part of the parameter it is, of the shape that plain PyTorch gives it.
        dtype: As ``str(torch.dtype)`` without "torch.": "float32".
        layer: Its place among the layers that a pipeline may be cut between, from 0.
        block: Which virtual block of the tensor axis it is in; None: every worker along that axis computes with it.
        trained: Whether it gets gradients.
        gathered: With which block of the model its values are brought together when that runs; None: they are there.
    """

    name: str
    tensor: str
    box: Box
    dtype: str = "float32"
    layer: int = 0
    block: int | None = None
    trained: bool = True
    gathered: int | None = None

    @property
    def size(self) -> int:
        """How many elements it has."""
        return volume(self.box)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its values."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def units(self) -> int:
        """How many units it has, the last of them perhaps shorter."""
        return -(-self.size // UNIT)


@dataclass(frozen=True)
class Split:
    """How a model may be divided: its leaves in the order of its parameters.

    Attributes:
        leaves: All of them, of the whole model.
        blocks: Virtual blocks of the tensor axis, as slots are virtual workers; 1 where that axis divides nothing.
        costs: What each layer costs (seconds, or any unit): a pipeline is cut where the dearest stage is cheapest.
            Empty where a pipeline divides nothing.
        chunks: Runs of layers on each worker of an interleaved pipeline, where there are layers enough.
    """

    param_blocks: tuple[ParamBlock, ...]
    blocks: int = 1
    costs: tuple[float, ...] = ()
    chunks: int = 1

    def __post_init__(self) -> None:
        if len({param_block.name for param_block in self.param_blocks}) < len(self.param_blocks):
            raise ValueError("two leaves of one name")

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Indices of the leaves that get gradients."""
        return tuple(i for i, param_block in enumerate(self.param_blocks) if param_block.trained)

    def stages(self, pipeline: int) -> tuple[range, ...]:
        """The runs of layers of ``pipeline`` workers, in order of layers; run i lies on worker ``i % pipeline``.

        Raises:
            ValueError: Where there are fewer layers than workers.
        """
        layers = max(1, len(self.costs))
        chunks = max(1, min(self.chunks, layers // pipeline)) if pipeline > 1 else 1
        return cut_by_cost(self.costs or (1.0,), pipeline * chunks)

    def computed(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Indices of the leaves that worker ``rank`` of ``mesh`` computes with, in order."""
        at = mesh.coordinates(rank)
        layers = {layer for run in self.stages(mesh.pipeline)[at["pipeline"] :: mesh.pipeline] for layer in run}
        blocks = cut(self.blocks, mesh.tensor)[at["tensor"]]
        return tuple(
            i
            for i, param_block in enumerate(self.param_blocks)
            if param_block.layer in layers and (param_block.block is None or param_block.block in blocks)
        )


def gathered_in(split: Split, blocks: Sequence[Sequence[int]]) -> Split:
    """``split`` with leaves that are brought together: those of each of ``blocks``, by their indices."""
    block_of = {param_block: number for number, param_blocks in enumerate(blocks) for param_block in param_blocks}
    return replace(
        split,
        param_blocks=tuple(
            replace(param_block, gathered=block_of[i]) for i, param_block in enumerate(split.param_blocks)
        ),
    )


def undivided_blocks(parameters: Sequence[tuple[str, tuple[int, ...], str, bool]]) -> Split:
    """A model that nothing divides: ``parameters`` are (name, shape, dtype, trained)."""
    return Split(
        tuple(
            ParamBlock(name, name, tuple((0, size) for size in shape), dtype, trained=trained)
            for name, shape, dtype, trained in parameters
        )
    )


def unit_heads(rows: Sequence[range]) -> list[tuple[int, int, range]]:
    """What has to travel so that each unit of a leaf is whole on the worker that has its first element.

    ``rows``: the elements that each worker has, one worker's behind the other's. Each entry: from which worker, to
    which, and which elements; in order of elements.
    """
    found = []
    for worker, own in enumerate(rows):
        first = own.start // UNIT * UNIT
        if own and first < own.start:
            reducer = next(other for other, has in enumerate(rows) if first in has)
            found.append((worker, reducer, range(own.start, min(own.stop, first + UNIT))))
    return found


def cut_by_cost(costs: Sequence[float], parts: int) -> tuple[range, ...]:
    """``parts`` contiguous, non-empty ranges over ``costs`` of which the dearest is as cheap as can be.

    The linear partition problem, by dynamic programming over (parts, end); of equally good cuts the earliest.

    Raises:
        ValueError: Where there are fewer costs than parts.
    """
    total = len(costs)
    if not 1 <= parts <= total:
        raise ValueError(f"{total} costs in {parts} parts")
    sums = [0.0, *accumulate(costs)]
    dearest = [0.0] + [float("inf")] * total  # of the first ``end`` costs in as many parts as were looked at
    begins: list[list[int]] = []
    for part in range(1, parts + 1):
        found, begin = [float("inf")] * (total + 1), [0] * (total + 1)
        for end in range(part, total + 1):
            for start in range(part - 1, end):
                value = max(dearest[start], sums[end] - sums[start])
                if value < found[end]:
                    found[end], begin[end] = value, start
        dearest = found
        begins.append(begin)
    ranges, end = [], total
    for begin in reversed(begins):
        ranges.append(range(begin[end], end))
        end = begin[end]
    return tuple(reversed(ranges))


# Who holds the state of what: each unit of a leaf has one worker that adds up its gradient, and some that hold it.
#
# A *holder* has a unit's state (values and the optimizer's tensors) and updates it. The worker that adds up a unit's
# gradient (its *adder*) is one of the holders, and sends the sum to the others; new values go to whoever computes with
# the leaf and does not hold it. As many holders as workers is plain data parallelism; one is ZeRO; two survive a death,
# at no byte more than one: what is sent as a gradient need not be sent as a value (2 (W-1)/W of the parameters a step).

T = TypeVar("T")
BUCKET_BYTES = 16 << 20
FIRST_BUCKET_BYTES = 1 << 20
ALONE = 1 << 20
"""Elements from which on a leaf that is gathered travels by itself: in one piece, so out of and into its own memory."""


@dataclass(frozen=True)
class Segment:
    """Elements ``start`` to ``stop`` (exclusive) of the flat leaf ``param_block`` (its index in the split)."""

    param_block: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.stop - self.start


@dataclass(frozen=True)
class BucketPlan:
    """Leaves that are reduced together, as one flat vector.

    Attributes:
        leaves: Their indices, in the vector's order.
        parts: By batch rank: the segments that worker adds up. Parts follow each other in the vector.
    """

    param_blocks: tuple[int, ...]
    parts: tuple[tuple[Segment, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each part."""
        return tuple(sum(segment.size for segment in part) for part in self.parts)


def buckets(split: Split, computed: Sequence[int], workers: int) -> tuple[BucketPlan, ...]:
    """The buckets of workers that compute with the leaves ``computed``, ``workers`` of them along the batch.

    In about the order in which a backward pass brings gradients, the first one small so that sending starts early; of
    one dtype and, where leaves are gathered, of one block each.
    """
    trained = [i for i in reversed(computed) if split.param_blocks[i].trained]
    groups: list[list[int]] = []
    room = 0
    for i in sorted(trained, key=lambda i: _turn(split.param_blocks[i])):
        param_block, last = split.param_blocks[i], split.param_blocks[groups[-1][-1]] if groups else None
        if (
            last is None
            or room <= 0
            or last.dtype != param_block.dtype
            or _turn(last) != _turn(param_block)
            or _turn(param_block)[1]
        ):
            room = BUCKET_BYTES if groups else FIRST_BUCKET_BYTES
            groups.append([])
        groups[-1].append(i)
        room -= 4 * param_block.size
    return tuple(BucketPlan(tuple(group), _cut_at_units(split, group, workers)) for group in groups)


def _turn(param_block: ParamBlock) -> tuple[int, bool]:
    """When it leaves, and whether alone: the last block comes first, and of each one its small leaves do."""
    return (0, False) if param_block.gathered is None else (-param_block.gathered, param_block.size >= ALONE)


def _cut_at_units(split: Split, param_blocks: Sequence[int], parts: int) -> tuple[tuple[Segment, ...], ...]:
    """The leaves' elements in ``parts`` runs of about equal size that end where units do.

    A unit belongs to the part that it begins in.
    """
    total = sum(split.param_blocks[i].size for i in param_blocks)
    found: list[list[Segment]] = [[] for _ in range(parts)]
    before = 0
    for i in param_blocks:
        size = split.param_blocks[i].size
        start = 0
        while start < size:
            part = (before + start) * parts // total
            ends = -(-(part + 1) * total // parts) - before  # where the next part begins, in elements of this leaf
            stop = min(-(-ends // UNIT) * UNIT, size)
            found[part].append(Segment(i, start, stop))
            start = stop
        before += size
    return tuple(tuple(part) for part in found)


def owners(mesh: Mesh, copies: int, hosts: Sequence[object] = ()) -> tuple[tuple[int, ...], ...]:
    """By worker of ``mesh``: those that hold what it adds up.

    All that differ from it in the data axis alone do. Where these are fewer than ``copies``, or together on fewer hosts
    than could be (``hosts``: that of each rank), there are further ones: if possible on a host that has none yet and in
    the batch group, which computes with the same leaves; of those the one that holds the least.
    """
    inner, places = mesh.tensor * mesh.pipeline, list(hosts) or list(range(mesh.workers))
    loads = [1] * mesh.workers
    found: dict[int, tuple[int, ...]] = {}
    for first in range(mesh.shard * inner):
        own = list(mesh.group("data", first))
        while not _enough(own, places, copies):
            taken = {places[rank] for rank in own}
            added = min(
                (rank for rank in range(mesh.workers) if rank not in own),
                key=lambda rank: (
                    places[rank] in taken,
                    rank % inner != first % inner,
                    loads[rank],
                    (rank - first) % mesh.workers,
                ),
            )
            loads[added] += 1
            own.append(added)
        found |= dict.fromkeys(mesh.group("data", first), tuple(own))
    return tuple(found[rank] for rank in range(mesh.workers))


def _enough(ranks: Collection[int], places: Sequence[object], copies: int) -> bool:
    """Whether these are as many workers as there should be copies, on as many hosts, as far as there are so many."""
    hosts = {places[rank] for rank in ranks}
    return len(ranks) >= min(copies, len(places)) and len(hosts) >= min(copies, len(set(places)))


def owners_in_group(mesh: Mesh, rank: int, copies: int, hosts: Sequence[object] = ()) -> list[tuple[int, ...]]:
    """``owners`` within the batch group of ``rank``: by batch rank, in batch ranks."""
    group, of = mesh.batch_group(rank), owners(mesh, copies, hosts)
    return [tuple(group.index(other) for other in of[reducer] if other in group) for reducer in group]


@dataclass(frozen=True)
class RemoteOwner:
    """``owner`` holds the state of ``segment`` for others: it does not come by the sum with its batch group, so worker
    ``source`` of those that do sends it.
    """

    segment: Segment
    source: int
    owner: int


def remote_owners(split: Split, mesh: Mesh, copies: int, hosts: Sequence[object] = ()) -> tuple[RemoteOwner, ...]:
    """What is held outside of the batch groups that compute with it, since inside there are too few ``owners``.

    Where every worker along the tensor axis computes with a leaf, each has its state: that counts. In order of leaves.
    """
    inner, places = mesh.tensor * mesh.pipeline, list(hosts) or list(range(mesh.workers))
    of = owners(mesh, copies, hosts)
    inside = [[other for other in own if other % inner == rank % inner] for rank, own in enumerate(of)]
    if all(_enough(each, places, copies) for each in inside):
        return ()
    found: list[RemoteOwner] = []
    for param_block, shares in _shares(split, mesh).items():
        edges = sorted({edge for segment, _ in shares for edge in (segment.start, segment.stop)})
        for start, stop in pairwise(edges):
            firsts = [first for segment, first in shares if segment.start <= start < segment.stop]
            there = {rank for first in firsts for rank in inside[first]}
            if not _enough(there, places, copies):
                outside = (rank for rank in of[firsts[0]] if rank not in there)
                found += [RemoteOwner(Segment(param_block, start, stop), firsts[0], rank) for rank in outside]
    return tuple(found)


def _shares(split: Split, mesh: Mesh) -> dict[int, list[tuple[Segment, int]]]:
    """By leaf: what the workers of each batch group hold alike, each with the first of those."""
    found: dict[int, list[tuple[Segment, int]]] = {}
    for place, (computed, plans) in enumerate(_plans(split, mesh)):
        for shard in range(mesh.shard):
            reducers = range(shard, mesh.batch, mesh.shard)
            own = joined([segment for plan in plans for reducer in reducers for segment in plan.parts[reducer]])
            for segment in (*own, *_untrained(split, computed)):
                found.setdefault(segment.param_block, []).append((segment, shard * mesh.tensor * mesh.pipeline + place))
    return dict(sorted(found.items()))


def _plans(split: Split, mesh: Mesh) -> list[tuple[tuple[int, ...], tuple[BucketPlan, ...]]]:
    """What each batch group computes with, and its buckets."""
    computed = [split.computed(mesh, place) for place in range(mesh.tensor * mesh.pipeline)]
    return [(param_blocks, buckets(split, param_blocks, mesh.batch)) for param_blocks in computed]


def _untrained(split: Split, computed: Sequence[int]) -> list[Segment]:
    """Leaves that get no gradients: all that compute with one hold it."""
    return [Segment(i, 0, split.param_blocks[i].size) for i in computed if not split.param_blocks[i].trained]


def held(split: Split, mesh: Mesh, copies: int, hosts: Sequence[object] = ()) -> tuple[tuple[Segment, ...], ...]:
    """By worker of ``mesh``: what it holds the state of, in order of leaves. ``hosts``: that of each rank.

    What it adds up is cut from what it has copies of, and that from its wards: their sums come apart.
    """
    found: dict[int, tuple[Segment, ...]] = {}
    for place, (computed, plans) in enumerate(_plans(split, mesh)):
        inside = owners_in_group(mesh, place, copies, hosts)
        for own, rank in enumerate(mesh.batch_group(place)):
            reducers = [reducer for reducer in range(mesh.batch) if own in inside[reducer] and reducer != own]
            added = [segment for plan in plans for segment in plan.parts[own]]
            copied = [segment for plan in plans for reducer in reducers for segment in plan.parts[reducer]]
            found[rank] = (*joined(added), *joined([*copied, *_untrained(split, computed)]))
    for remote_owner in remote_owners(split, mesh, copies, hosts):
        found[remote_owner.owner] += (remote_owner.segment,)
    return tuple(_sorted(found[rank]) for rank in range(mesh.workers))


def state_layout(split: Split, mesh: Mesh, copies: int, hosts: Sequence[object] = ()) -> Layout:
    """The pieces of flat leaves that each worker of ``mesh`` holds; see ``held``."""
    return {rank: tuple(pieces(split, own)) for rank, own in enumerate(held(split, mesh, copies, hosts))}


def pieces(split: Split, segments: Sequence[Segment]) -> list[Piece]:
    """``segments`` as pieces of one-dimensional tensors that bear the leaves' names."""
    return [
        Piece(split.param_blocks[segment.param_block].name, ((segment.start, segment.stop),)) for segment in segments
    ]


def by_param_block(parts: Iterable[tuple[Segment, T]]) -> dict[int, list[tuple[Segment, T]]]:
    """Segments, each with something of it, by their leaves."""
    found: dict[int, list[tuple[Segment, T]]] = {}
    for segment, of_it in parts:
        found.setdefault(segment.param_block, []).append((segment, of_it))
    return found


def _sorted(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    return tuple(sorted(segments, key=lambda segment: (segment.param_block, segment.start)))


def joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """In order, neighbours as one."""
    found: list[Segment] = []
    for segment in _sorted(segments):
        if found and found[-1].param_block == segment.param_block and found[-1].stop == segment.start:
            found[-1] = Segment(segment.param_block, found[-1].start, segment.stop)
        else:
            found.append(segment)
    return tuple(found)


def written(split: Split, mesh: Mesh, rank: int) -> tuple[Segment, ...]:
    """What worker ``rank`` of ``mesh`` writes of a checkpoint, in order of leaves: of each unit there is one writer.

    It is the unit's adder, among the first of the batch groups that compute with its leaf; a leaf that is not trained
    has a writer there by its number. What a worker writes it also holds.
    """
    group = mesh.batch_group(rank)
    earlier = {i for other in range(min(group)) for i in split.computed(mesh, other)}
    computed = split.computed(mesh, rank)
    own = mesh.batch_rank(rank)
    found = [
        segment
        for bucket in buckets(split, computed, mesh.batch)
        for segment in bucket.parts[own]
        if segment.param_block not in earlier
    ]
    found += [
        Segment(i, 0, split.param_blocks[i].size)
        for i in computed
        if not split.param_blocks[i].trained and i not in earlier and i % mesh.batch == own
    ]
    return joined(found)
