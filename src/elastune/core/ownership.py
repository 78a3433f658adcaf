"""Who holds the state of what: each unit of a leaf has one worker that adds up its gradient, and some that hold it.

A *holder* has a unit's state (values and the optimizer's tensors) and updates it. The worker that adds up a unit's
gradient (its *adder*) is one of the holders, and sends the sum to the others; new values go to whoever computes with
the leaf and does not hold it. As many holders as workers is plain data parallelism; one is ZeRO; two survive a death,
at no byte more than one: what is sent as a gradient need not be sent as a value (2 (W-1)/W of the parameters a step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastune.core.layout import Layout, Piece
from elastune.core.leaves import UNIT, Split
from elastune.core.mesh import Mesh

BUCKET_BYTES = 16 << 20
FIRST_BUCKET_BYTES = 1 << 20


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
    one dtype each.
    """
    groups: list[list[int]] = []
    room = 0
    for i in reversed([i for i in computed if split.leaves[i].trained]):
        leaf = split.leaves[i]
        if not groups or room <= 0 or split.leaves[groups[-1][0]].dtype != leaf.dtype:
            room = BUCKET_BYTES if groups else FIRST_BUCKET_BYTES
            groups.append([])
        groups[-1].append(i)
        room -= 4 * leaf.size
    return tuple(BucketPlan(tuple(group), _cut_at_units(split, group, workers)) for group in groups)


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


def holders(mesh: Mesh, adder: int, copies: int, hosts: Sequence[object] = ()) -> tuple[int, ...]:
    """The batch ranks that hold what batch rank ``adder`` adds up, itself first.

    All that differ from it in the data axis alone hold the same; where those are fewer than ``copies``, further workers
    of other hosts are added (``hosts``: the host of each batch rank), of its own where there are no others.
    """
    own = [data * mesh.shard + adder % mesh.shard for data in range(mesh.data)]
    own.remove(adder)
    found = [adder, *own]
    others = [(adder + step) % mesh.batch for step in range(1, mesh.batch)]
    places = list(hosts) or list(range(mesh.batch))
    while len(found) < min(copies, mesh.batch):
        left = [rank for rank in others if rank not in found]
        taken = {places[rank] for rank in found}
        found.append(next((rank for rank in left if places[rank] not in taken), left[0]))
    return tuple(found)


def held(split: Split, mesh: Mesh, rank: int, copies: int, hosts: Sequence[object] = ()) -> tuple[Segment, ...]:
    """What worker ``rank`` of ``mesh`` holds the state of, in order of leaves; what it adds up is cut from the rest.

    ``hosts``: the host of each rank of the mesh. A leaf that is not trained is held by all that compute with it.
    """
    computed = split.computed(mesh, rank)
    own = mesh.batch_rank(rank)
    batch_hosts = [hosts[member] for member in mesh.batch_group(rank)] if hosts else ()
    held_by = [holders(mesh, adder, copies, batch_hosts) for adder in range(mesh.batch)]
    added: list[Segment] = []
    copied = [Segment(i, 0, split.leaves[i].size) for i in computed if not split.leaves[i].trained]
    for bucket in buckets(split, computed, mesh.batch):
        for adder, part in enumerate(bucket.parts):
            if own in held_by[adder]:
                (added if adder == own else copied).extend(part)
    return tuple(sorted((*_joined(added), *_joined(copied)), key=lambda segment: (segment.leaf, segment.start)))


def state_layout(split: Split, mesh: Mesh, copies: int, hosts: Sequence[object] = ()) -> Layout:
    """The pieces of flat leaves that each worker of ``mesh`` holds; see ``held``."""
    return {rank: tuple(pieces(split, held(split, mesh, rank, copies, hosts))) for rank in range(mesh.workers)}


def pieces(split: Split, segments: Sequence[Segment]) -> list[Piece]:
    """``segments`` as pieces of one-dimensional tensors that bear the leaves' names."""
    return [Piece(split.leaves[segment.leaf].name, ((segment.start, segment.stop),)) for segment in segments]


def _joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """In order, neighbours as one."""
    found: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: (segment.leaf, segment.start)):
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
    return _joined(found)
