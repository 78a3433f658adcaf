"""Which worker holds which part of a model's state: tensor boxes, flat ranges, parameter blocks, owners.

A *parameter block* is what a backward pass gives one gradient for: a parameter, or one virtual block of a parameter
that the tensor axis divides. Blocks are fixed for a run and do not depend on the mesh, so that results do not depend on
it either. The state of a block (values, optimizer state) is flat. Workers hold ranges of it that begin at multiples of
``UNIT`` elements. So a norm or an update that is computed unit by unit does not depend on the owner.

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

# Pieces of a run's state: boxes of tensors, by name.

Box = tuple[tuple[int, int], ...]
"""From (inclusive) and to (exclusive) in each dimension of a tensor; a scalar's box is ()."""


@dataclass(frozen=True)
class Piece:
    """The part ``box`` of the tensor ``name`` of the whole state."""

    name: str
    box: Box

    @property
    def size(self) -> int:
        """The number of its elements."""
        return volume(self.box)


Layout = Mapping[int, tuple[Piece, ...]]
"""The pieces that each worker holds."""


class CopiesDiffer(Exception):
    """Workers that must hold the same bits do not: the result of the run would be worthless."""


class Unrecoverable(Exception):
    """No worker holds ``pieces`` any more: all workers must go back to a checkpoint."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        names = sorted({piece.name for piece in pieces})
        super().__init__(f"no worker holds all of {', '.join(names)}")


def intersection(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes of one tensor; None where it has no element."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def without(boxes: Iterable[Box], others: Iterable[Box]) -> list[Box]:
    """Return the parts of ``boxes`` that are in none of ``others``. They do not overlap unless ``boxes`` do."""
    left = [box for box in boxes if volume(box)]
    for other in others:
        left = [rest for box in left for rest in _cut_out(box, other)]
    return left


def volume(box: Box) -> int:
    """Return the number of elements in ``box``."""
    return prod(stop - start for start, stop in box)


def _cut_out(box: Box, other: Box) -> list[Box]:
    """The parts of ``box`` outside of ``other``: before and after it, dimension by dimension."""
    common = intersection(box, other)
    if common is None:
        return [box]
    boxes = []
    for i, ((start, stop), (first, last)) in enumerate(zip(box, common, strict=True)):
        for edge in ((start, first), (last, stop)):
            if edge[0] < edge[1]:
                boxes.append((*common[:i], edge, *box[i + 1 :]))
    return boxes


# Flat ranges: contiguous elements of a box in C order, and the boxes that they fill. A checkpoint records sharded state
# as boxes of plain PyTorch's tensors, so that workers with another division can read it.


@dataclass(frozen=True)
class FlatRange:
    """Elements ``start`` to ``stop`` (exclusive) of the part ``box`` of a tensor, flattened in C order.

    Example:
        >>> FlatRange(((0, 4), (0, 8)), 4, 20).boxes
        [(((0, 1), (4, 8)), 0), (((1, 2), (0, 8)), 4), (((2, 3), (0, 4)), 12)]
    """

    box: Box
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of its elements."""
        return self.stop - self.start

    @property
    def boxes(self) -> list[tuple[Box, int]]:
        """Return the boxes of the tensor that the range fills, each with the place of its first element in the range.

        Each box is contiguous in the range; of a box of n dimensions there are at most 2n - 1.
        """
        shape = [stop - start for start, stop in self.box]
        corner = [start for start, _ in self.box]
        boxes = []
        for local, at in _filled(shape, self.start, self.stop):
            moved = tuple((first + start, first + stop) for (start, stop), first in zip(local, corner, strict=True))
            boxes.append((moved, at - self.start))
        return boxes


def whole_range(shape: Sequence[int]) -> FlatRange:
    """Return the range of all elements of a tensor of ``shape``."""
    return FlatRange(tuple((0, size) for size in shape), 0, prod(shape))


def fills(shape: Sequence[int], ranges: Iterable[FlatRange]) -> bool:
    """Return whether each element of a tensor of ``shape`` is in exactly one of ``ranges``."""
    boxes = [box for each in ranges for box, _ in each.boxes]
    goal = whole_range(shape)
    return sum(map(volume, boxes)) == goal.size and not without([goal.box], boxes)


def _filled(shape: Sequence[int], start: int, stop: int) -> list[tuple[Box, int]]:
    """Boxes of a tensor of ``shape``, each with the flat place of its first element."""
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [(((start, stop),) if shape else (), start)]
    row = prod(shape[1:])
    boxes: list[tuple[Box, int]] = []
    at = start
    while at < stop:
        first, inside = divmod(at, row)
        if inside or stop - at < row:  # a part of one row
            end = min(stop, (first + 1) * row)
            inner = _filled(shape[1:], inside, inside + end - at)
            boxes += [(((first, first + 1), *box), first * row + place) for box, place in inner]
        else:
            last = stop // row
            end = last * row
            boxes.append((((first, last), *((0, size) for size in shape[1:])), at))
        at = end
    return boxes


# Parameter blocks, cut into units, and the workers that compute with them.

UNIT = 4096
"""Elements of a unit. Fused optimizers compute the tail of a range by other code, so ranges end only where units or
blocks do."""


@dataclass(frozen=True)
class ParamBlock:
    """One parameter block: a parameter, or one virtual block of a parameter that the tensor axis divides.

    Attributes:
        name: Unique in the model: the parameter's name, with ``#2`` behind it for virtual block 2.
        tensor: The parameter's name in the user's model.
        box: The part of the parameter, in the shape that plain PyTorch gives it.
        dtype: As ``str(torch.dtype)`` without "torch.": "float32".
        layer: Its place among the layers that a pipeline may be cut between, from 0.
        block: Its virtual block along the tensor axis; None: every worker along that axis computes with it.
        trained: Whether it gets gradients.
        gathered: The block of the model together with which its values are gathered; None: they are not gathered.
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
        """The number of its elements."""
        return volume(self.box)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its values."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def units(self) -> int:
        """The number of its units; the last one may be shorter."""
        return -(-self.size // UNIT)


@dataclass(frozen=True)
class Split:
    """How a model may be divided.

    Attributes:
        param_blocks: All parameter blocks of the whole model, in the order of its parameters.
        blocks: Virtual blocks of the tensor axis, as slots are virtual workers; 1 where that axis divides nothing.
        costs: The cost of each layer, in seconds or any unit. A pipeline is cut where the most expensive stage is
            cheapest. Empty where a pipeline divides nothing.
        chunks: Runs of layers on each worker of an interleaved pipeline, where there are layers enough.
    """

    param_blocks: tuple[ParamBlock, ...]
    blocks: int = 1
    costs: tuple[float, ...] = ()
    chunks: int = 1

    def __post_init__(self) -> None:
        if len({param_block.name for param_block in self.param_blocks}) < len(self.param_blocks):
            raise ValueError("two parameter blocks of one name")

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The indices of the blocks that get gradients."""
        return tuple(i for i, param_block in enumerate(self.param_blocks) if param_block.trained)

    def stages(self, pipeline: int) -> tuple[range, ...]:
        """Return the runs of layers of ``pipeline`` workers, in order; run i lies on worker ``i % pipeline``.

        Raises:
            ValueError: Where there are fewer layers than workers.
        """
        layers = max(1, len(self.costs))
        chunks = max(1, min(self.chunks, layers // pipeline)) if pipeline > 1 else 1
        return cut_by_cost(self.costs or (1.0,), pipeline * chunks)

    def computed(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Return the indices of the blocks that worker ``rank`` of ``mesh`` computes with, in order."""
        at = mesh.coordinates(rank)
        layers = {layer for run in self.stages(mesh.pipeline)[at["pipeline"] :: mesh.pipeline] for layer in run}
        blocks = cut(self.blocks, mesh.tensor)[at["tensor"]]
        return tuple(
            i
            for i, param_block in enumerate(self.param_blocks)
            if param_block.layer in layers and (param_block.block is None or param_block.block in blocks)
        )


def gathered_in(split: Split, blocks: Sequence[Sequence[int]]) -> Split:
    """Return ``split`` with gathered parameter blocks: the indices in each of ``blocks`` are gathered together."""
    block_of = {param_block: number for number, param_blocks in enumerate(blocks) for param_block in param_blocks}
    return replace(
        split,
        param_blocks=tuple(
            replace(param_block, gathered=block_of[i]) for i, param_block in enumerate(split.param_blocks)
        ),
    )


def undivided_blocks(parameters: Sequence[tuple[str, tuple[int, ...], str, bool]]) -> Split:
    """Return a model that no axis divides. ``parameters`` are tuples of name, shape, dtype and ``trained``."""
    return Split(
        tuple(
            ParamBlock(name, name, tuple((0, size) for size in shape), dtype, trained=trained)
            for name, shape, dtype, trained in parameters
        )
    )


def unit_heads(rows: Sequence[range]) -> list[tuple[int, int, range]]:
    """Return the transfers after which each unit of a block is whole on the worker that has its first element.

    ``rows``: the elements of each worker, one range behind the other. Each transfer has the worker that sends, the
    worker that receives, and the elements, in order of elements.
    """
    heads = []
    for worker, elements in enumerate(rows):
        first = elements.start // UNIT * UNIT
        if elements and first < elements.start:
            reducer = next(other for other, has in enumerate(rows) if first in has)
            heads.append((worker, reducer, range(elements.start, min(elements.stop, first + UNIT))))
    return heads


def cut_by_cost(costs: Sequence[float], parts: int) -> tuple[range, ...]:
    """Return ``parts`` contiguous, non-empty ranges over ``costs``, so that the most expensive range is as cheap as
    possible.

    This is the linear partition problem, by dynamic programming over (parts, end). Of equally good cuts the earliest is
    taken.

    Raises:
        ValueError: Where there are fewer costs than parts.
    """
    total = len(costs)
    if not 1 <= parts <= total:
        raise ValueError(f"{total} costs in {parts} parts")
    sums = [0.0, *accumulate(costs)]
    dearest = [0.0] + [float("inf")] * total  # of the first ``end`` costs, in the parts so far
    begins: list[list[int]] = []
    for part in range(1, parts + 1):
        best, begin = [float("inf")] * (total + 1), [0] * (total + 1)
        for end in range(part, total + 1):
            for start in range(part - 1, end):
                value = max(dearest[start], sums[end] - sums[start])
                if value < best[end]:
                    best[end], begin[end] = value, start
        dearest = best
        begins.append(begin)
    ranges, end = [], total
    for begin in reversed(begins):
        ranges.append(range(begin[end], end))
        end = begin[end]
    return tuple(reversed(ranges))


# Owners: the workers that hold the state of each unit, one of which (the reducer) adds up its gradient.

T = TypeVar("T")
BUCKET_BYTES = 16 << 20
FIRST_BUCKET_BYTES = 1 << 20
ALONE = 1 << 20
"""Elements from which on a gathered block travels by itself, in one piece between its own buffers."""


@dataclass(frozen=True)
class Segment:
    """Elements ``start`` to ``stop`` (exclusive) of the flat parameter block with the index ``param_block``."""

    param_block: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of its elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class BucketPlan:
    """Parameter blocks that are reduced together, as one flat vector.

    Attributes:
        param_blocks: Their indices, in the vector's order.
        parts: By batch rank, the segments that the worker adds up. Parts follow each other in the vector.
    """

    param_blocks: tuple[int, ...]
    parts: tuple[tuple[Segment, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each part."""
        return tuple(sum(segment.size for segment in part) for part in self.parts)


def buckets(split: Split, computed: Sequence[int], workers: int) -> tuple[BucketPlan, ...]:
    """Return the buckets of ``workers`` workers along the batch that compute with the blocks ``computed``.

    Buckets come in about the order in which a backward pass makes gradients. The first one is small, so that sending
    starts early. A bucket has one dtype and, where blocks are gathered, one block of the model.
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
    """The turn of a block, and whether it travels alone. The last block of the model comes first, its small blocks
    before others.
    """
    return (0, False) if param_block.gathered is None else (-param_block.gathered, param_block.size >= ALONE)


def _cut_at_units(split: Split, param_blocks: Sequence[int], parts: int) -> tuple[tuple[Segment, ...], ...]:
    """The blocks' elements in ``parts`` runs of about equal size that end where units do.

    A unit belongs to the part in which it begins.
    """
    total = sum(split.param_blocks[i].size for i in param_blocks)
    runs: list[list[Segment]] = [[] for _ in range(parts)]
    before = 0
    for i in param_blocks:
        size = split.param_blocks[i].size
        start = 0
        while start < size:
            part = (before + start) * parts // total
            ends = -(-(part + 1) * total // parts) - before  # where the next part begins, in elements of this block
            stop = min(-(-ends // UNIT) * UNIT, size)
            runs[part].append(Segment(i, start, stop))
            start = stop
        before += size
    return tuple(tuple(part) for part in runs)


def owners(mesh: Mesh, copies: int, hosts: Sequence[object] = ()) -> tuple[tuple[int, ...], ...]:
    """Return the owners of what each worker of ``mesh`` adds up, by rank.

    All workers that differ from it in the data axis alone are owners. Where these are fewer than ``copies``, or on
    fewer hosts than possible, further workers join them. A worker on a host without an owner comes first. Then comes a
    worker of the same batch group, because it computes with the same blocks. Of these the one that holds the least is
    taken. ``hosts``: the host of each rank.
    """
    inner, places = mesh.tensor * mesh.pipeline, list(hosts) or list(range(mesh.workers))
    loads = [1] * mesh.workers
    by_rank: dict[int, tuple[int, ...]] = {}
    for first in range(mesh.shard * inner):
        holders = list(mesh.group("data", first))
        while not _enough(holders, places, copies):
            taken = {places[rank] for rank in holders}
            added = min(
                (rank for rank in range(mesh.workers) if rank not in holders),
                key=lambda rank: (
                    places[rank] in taken,
                    rank % inner != first % inner,
                    loads[rank],
                    (rank - first) % mesh.workers,
                ),
            )
            loads[added] += 1
            holders.append(added)
        by_rank |= dict.fromkeys(mesh.group("data", first), tuple(holders))
    return tuple(by_rank[rank] for rank in range(mesh.workers))


def _enough(ranks: Collection[int], places: Sequence[object], copies: int) -> bool:
    """Whether the workers are as many, and on as many hosts, as ``copies`` asks for and the mesh allows."""
    hosts = {places[rank] for rank in ranks}
    return len(ranks) >= min(copies, len(places)) and len(hosts) >= min(copies, len(set(places)))


def owners_in_group(mesh: Mesh, rank: int, copies: int, hosts: Sequence[object] = ()) -> list[tuple[int, ...]]:
    """Return ``owners`` within the batch group of ``rank``: by batch rank, as batch ranks."""
    group, of = mesh.batch_group(rank), owners(mesh, copies, hosts)
    return [tuple(group.index(other) for other in of[reducer] if other in group) for reducer in group]


@dataclass(frozen=True)
class RemoteOwner:
    """``owner`` holds the state of ``segment`` for workers outside of its batch group.

    The sum of its own batch group lacks the segment, so worker ``source`` of the other group sends it.
    """

    segment: Segment
    source: int
    owner: int


def remote_owners(split: Split, mesh: Mesh, copies: int, hosts: Sequence[object] = ()) -> tuple[RemoteOwner, ...]:
    """Return the owners outside of the batch groups that compute with a segment, in order of blocks.

    They are needed where the group itself has too few ``owners``. Where every worker along the tensor axis computes
    with a block, each has its state, and that counts.
    """
    inner, places = mesh.tensor * mesh.pipeline, list(hosts) or list(range(mesh.workers))
    of = owners(mesh, copies, hosts)
    inside = [[other for other in group if other % inner == rank % inner] for rank, group in enumerate(of)]
    if all(_enough(each, places, copies) for each in inside):
        return ()
    remote: list[RemoteOwner] = []
    for param_block, shares in _shares(split, mesh).items():
        edges = sorted({edge for segment, _ in shares for edge in (segment.start, segment.stop)})
        for start, stop in pairwise(edges):
            firsts = [first for segment, first in shares if segment.start <= start < segment.stop]
            holders = {rank for first in firsts for rank in inside[first]}
            if not _enough(holders, places, copies):
                outside = (rank for rank in of[firsts[0]] if rank not in holders)
                remote += [RemoteOwner(Segment(param_block, start, stop), firsts[0], rank) for rank in outside]
    return tuple(remote)


def _shares(split: Split, mesh: Mesh) -> dict[int, list[tuple[Segment, int]]]:
    """By parameter block: the segments that the workers of each batch group hold alike, each with the first of these
    workers.
    """
    shares: dict[int, list[tuple[Segment, int]]] = {}
    for place, (computed, plans) in enumerate(_plans(split, mesh)):
        for shard in range(mesh.shard):
            reducers = range(shard, mesh.batch, mesh.shard)
            held_alike = joined([segment for plan in plans for reducer in reducers for segment in plan.parts[reducer]])
            for segment in (*held_alike, *_untrained(split, computed)):
                shares.setdefault(segment.param_block, []).append(
                    (segment, shard * mesh.tensor * mesh.pipeline + place)
                )
    return dict(sorted(shares.items()))


def _plans(split: Split, mesh: Mesh) -> list[tuple[tuple[int, ...], tuple[BucketPlan, ...]]]:
    """For each batch group the blocks that it computes with, and its buckets."""
    computed = [split.computed(mesh, place) for place in range(mesh.tensor * mesh.pipeline)]
    return [(param_blocks, buckets(split, param_blocks, mesh.batch)) for param_blocks in computed]


def _untrained(split: Split, computed: Sequence[int]) -> list[Segment]:
    """Blocks without gradients: all workers that compute with one hold it."""
    return [Segment(i, 0, split.param_blocks[i].size) for i in computed if not split.param_blocks[i].trained]


def held(split: Split, mesh: Mesh, copies: int, hosts: Sequence[object] = ()) -> tuple[tuple[Segment, ...], ...]:
    """Return the segments whose state each worker of ``mesh`` holds, in order of blocks. ``hosts``: the host of each
    rank.

    Segments that a worker adds up, segments that it has copies of, and segments of remote owners stay separate, because
    their sums arrive separately.
    """
    segments: dict[int, tuple[Segment, ...]] = {}
    for place, (computed, plans) in enumerate(_plans(split, mesh)):
        inside = owners_in_group(mesh, place, copies, hosts)
        for at, rank in enumerate(mesh.batch_group(place)):
            reducers = [reducer for reducer in range(mesh.batch) if at in inside[reducer] and reducer != at]
            added = [segment for plan in plans for segment in plan.parts[at]]
            copied = [segment for plan in plans for reducer in reducers for segment in plan.parts[reducer]]
            segments[rank] = (*joined(added), *joined([*copied, *_untrained(split, computed)]))
    for remote_owner in remote_owners(split, mesh, copies, hosts):
        segments[remote_owner.owner] += (remote_owner.segment,)
    return tuple(_sorted(segments[rank]) for rank in range(mesh.workers))


def pieces(split: Split, segments: Sequence[Segment]) -> list[Piece]:
    """Return ``segments`` as pieces of one-dimensional tensors that have the names of the blocks."""
    return [
        Piece(split.param_blocks[segment.param_block].name, ((segment.start, segment.stop),)) for segment in segments
    ]


def by_param_block(parts: Iterable[tuple[Segment, T]]) -> dict[int, list[tuple[Segment, T]]]:
    """Return segments, each with its value, by their parameter blocks."""
    by_block: dict[int, list[tuple[Segment, T]]] = {}
    for segment, of_it in parts:
        by_block.setdefault(segment.param_block, []).append((segment, of_it))
    return by_block


def _sorted(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    return tuple(sorted(segments, key=lambda segment: (segment.param_block, segment.start)))


def joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return the segments in order, with neighbours joined."""
    merged: list[Segment] = []
    for segment in _sorted(segments):
        if merged and merged[-1].param_block == segment.param_block and merged[-1].stop == segment.start:
            merged[-1] = Segment(segment.param_block, merged[-1].start, segment.stop)
        else:
            merged.append(segment)
    return tuple(merged)


def written(split: Split, mesh: Mesh, rank: int) -> tuple[Segment, ...]:
    """Return the segments of a checkpoint that worker ``rank`` of ``mesh`` writes, in order of blocks.

    Each unit has one writer. It is the unit's reducer, in the first batch group that computes with the block. A block
    that is not trained gets its writer by its index. A worker holds everything that it writes.
    """
    group = mesh.batch_group(rank)
    earlier = {i for other in range(min(group)) for i in split.computed(mesh, other)}
    computed = split.computed(mesh, rank)
    batch_rank = mesh.batch_rank(rank)
    segments = [
        segment
        for bucket in buckets(split, computed, mesh.batch)
        for segment in bucket.parts[batch_rank]
        if segment.param_block not in earlier
    ]
    segments += [
        Segment(i, 0, split.param_blocks[i].size)
        for i in computed
        if not split.param_blocks[i].trained and i not in earlier and i % mesh.batch == batch_rank
    ]
    return joined(segments)
