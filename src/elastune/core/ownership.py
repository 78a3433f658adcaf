"""Who holds the state of what: each unit of a leaf has one worker that adds up its gradient, and some that hold it.

A *holder* has a unit's state (values and the optimizer's tensors) and updates it. The worker that adds up a unit's
gradient (its *adder*) is one of the holders, and sends the sum to the others; new values go to whoever computes with
the leaf and does not hold it. As many holders as workers is plain data parallelism; one is ZeRO; two survive a death,
at no byte more than one: what is sent as a gradient need not be sent as a value (2 (W-1)/W of the parameters a step).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from elastune.core.layout import Layout, Piece
from elastune.core.leaves import UNIT, Leaf, Split
from elastune.core.mesh import Mesh

T = TypeVar("T")
BUCKET_BYTES = 16 << 20
FIRST_BUCKET_BYTES = 1 << 20
ALONE = 1 << 20
"""Elements from which on a leaf that is gathered travels by itself: in one piece, so out of and into its own memory."""


@dataclass(frozen=True)
class Segment:
    """Elements ``start`` to ``stop`` (exclusive) of the flat leaf ``leaf`` (its index in the split)."""

    leaf: int
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

    leaves: tuple[int, ...]
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
    trained = [i for i in reversed(computed) if split.leaves[i].trained]
    groups: list[list[int]] = []
    room = 0
    for i in sorted(trained, key=lambda i: _turn(split.leaves[i])):
        leaf, last = split.leaves[i], split.leaves[groups[-1][-1]] if groups else None
        if last is None or room <= 0 or last.dtype != leaf.dtype or _turn(last) != _turn(leaf) or _turn(leaf)[1]:
            room = BUCKET_BYTES if groups else FIRST_BUCKET_BYTES
            groups.append([])
        groups[-1].append(i)
        room -= 4 * leaf.size
    return tuple(BucketPlan(tuple(group), _cut_at_units(split, group, workers)) for group in groups)


def _turn(leaf: Leaf) -> tuple[int, bool]:
    """When it leaves, and whether alone: the last block comes first, and of each one its small leaves do."""
    return (0, False) if leaf.gathered is None else (-leaf.gathered, leaf.size >= ALONE)


def _cut_at_units(split: Split, leaves: Sequence[int], parts: int) -> tuple[tuple[Segment, ...], ...]:
    """The leaves' elements in ``parts`` runs of about equal size that end where units do.

    A unit belongs to the part that it begins in.
    """
    total = sum(split.leaves[i].size for i in leaves)
    found: list[list[Segment]] = [[] for _ in range(parts)]
    before = 0
    for i in leaves:
        size = split.leaves[i].size
        start = 0
        while start < size:
            part = (before + start) * parts // total
            ends = -(-(part + 1) * total // parts) - before  # where the next part begins, in elements of this leaf
            stop = min(-(-ends // UNIT) * UNIT, size)
            found[part].append(Segment(i, start, stop))
            start = stop
        before += size
    return tuple(tuple(part) for part in found)


def holders(mesh: Mesh, copies: int, hosts: Sequence[object] = ()) -> tuple[tuple[int, ...], ...]:
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


def holders_inside(mesh: Mesh, rank: int, copies: int, hosts: Sequence[object] = ()) -> list[tuple[int, ...]]:
    """``holders`` within the batch group of ``rank``: by batch rank, in batch ranks."""
    group, of = mesh.batch_group(rank), holders(mesh, copies, hosts)
    return [tuple(group.index(other) for other in of[adder] if other in group) for adder in group]


@dataclass(frozen=True)
class Ward:
    """``holder`` holds the state of ``segment`` for others: it does not come by the sum with its batch group, so worker
    ``source`` of those that do sends it.
    """

    segment: Segment
    source: int
    holder: int


def wards(split: Split, mesh: Mesh, copies: int, hosts: Sequence[object] = ()) -> tuple[Ward, ...]:
    """What is held outside of the batch groups that compute with it, since inside there are too few ``holders``.

    Where every worker along the tensor axis computes with a leaf, each has its state: that counts. In order of leaves.
    """
    inner, places = mesh.tensor * mesh.pipeline, list(hosts) or list(range(mesh.workers))
    of = holders(mesh, copies, hosts)
    inside = [[other for other in own if other % inner == rank % inner] for rank, own in enumerate(of)]
    if all(_enough(each, places, copies) for each in inside):
        return ()
    found: list[Ward] = []
    for leaf, shares in _shares(split, mesh).items():
        edges = sorted({edge for segment, _ in shares for edge in (segment.start, segment.stop)})
        for start, stop in pairwise(edges):
            firsts = [first for segment, first in shares if segment.start <= start < segment.stop]
            there = {rank for first in firsts for rank in inside[first]}
            if not _enough(there, places, copies):
                outside = (rank for rank in of[firsts[0]] if rank not in there)
                found += [Ward(Segment(leaf, start, stop), firsts[0], rank) for rank in outside]
    return tuple(found)


def _shares(split: Split, mesh: Mesh) -> dict[int, list[tuple[Segment, int]]]:
    """By leaf: what the workers of each batch group hold alike, each with the first of those."""
    found: dict[int, list[tuple[Segment, int]]] = {}
    for place, (computed, plans) in enumerate(_plans(split, mesh)):
        for shard in range(mesh.shard):
            adders = range(shard, mesh.batch, mesh.shard)
            own = joined([segment for plan in plans for adder in adders for segment in plan.parts[adder]])
            for segment in (*own, *_untrained(split, computed)):
                found.setdefault(segment.leaf, []).append((segment, shard * mesh.tensor * mesh.pipeline + place))
    return dict(sorted(found.items()))


def _plans(split: Split, mesh: Mesh) -> list[tuple[tuple[int, ...], tuple[BucketPlan, ...]]]:
    """What each batch group computes with, and its buckets."""
    computed = [split.computed(mesh, place) for place in range(mesh.tensor * mesh.pipeline)]
    return [(leaves, buckets(split, leaves, mesh.batch)) for leaves in computed]


def _untrained(split: Split, computed: Sequence[int]) -> list[Segment]:
    """Leaves that get no gradients: all that compute with one hold it."""
    return [Segment(i, 0, split.leaves[i].size) for i in computed if not split.leaves[i].trained]


def held(split: Split, mesh: Mesh, copies: int, hosts: Sequence[object] = ()) -> tuple[tuple[Segment, ...], ...]:
    """By worker of ``mesh``: what it holds the state of, in order of leaves. ``hosts``: that of each rank.

    What it adds up is cut from what it has copies of, and that from its wards: their sums come apart.
    """
    found: dict[int, tuple[Segment, ...]] = {}
    for place, (computed, plans) in enumerate(_plans(split, mesh)):
        inside = holders_inside(mesh, place, copies, hosts)
        for own, rank in enumerate(mesh.batch_group(place)):
            adders = [adder for adder in range(mesh.batch) if own in inside[adder] and adder != own]
            added = [segment for plan in plans for segment in plan.parts[own]]
            copied = [segment for plan in plans for adder in adders for segment in plan.parts[adder]]
            found[rank] = (*joined(added), *joined([*copied, *_untrained(split, computed)]))
    for ward in wards(split, mesh, copies, hosts):
        found[ward.holder] += (ward.segment,)
    return tuple(_sorted(found[rank]) for rank in range(mesh.workers))


def state_layout(split: Split, mesh: Mesh, copies: int, hosts: Sequence[object] = ()) -> Layout:
    """The pieces of flat leaves that each worker of ``mesh`` holds; see ``held``."""
    return {rank: tuple(pieces(split, own)) for rank, own in enumerate(held(split, mesh, copies, hosts))}


def pieces(split: Split, segments: Sequence[Segment]) -> list[Piece]:
    """``segments`` as pieces of one-dimensional tensors that bear the leaves' names."""
    return [Piece(split.leaves[segment.leaf].name, ((segment.start, segment.stop),)) for segment in segments]


def by_leaf(parts: Iterable[tuple[Segment, T]]) -> dict[int, list[tuple[Segment, T]]]:
    """Segments, each with something of it, by their leaves."""
    found: dict[int, list[tuple[Segment, T]]] = {}
    for segment, of_it in parts:
        found.setdefault(segment.leaf, []).append((segment, of_it))
    return found


def _sorted(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    return tuple(sorted(segments, key=lambda segment: (segment.leaf, segment.start)))


def joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """In order, neighbours as one."""
    found: list[Segment] = []
    for segment in _sorted(segments):
        if found and found[-1].leaf == segment.leaf and found[-1].stop == segment.start:
            found[-1] = Segment(segment.leaf, found[-1].start, segment.stop)
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
        if segment.leaf not in earlier
    ]
    found += [
        Segment(i, 0, split.leaves[i].size)
        for i in computed
        if not split.leaves[i].trained and i not in earlier and i % mesh.batch == own
    ]
    return joined(found)
