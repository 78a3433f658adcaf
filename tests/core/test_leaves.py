"""Leaves, and who holds what: all of it, evenly, cut where units end, wherever it lies."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.layout import (
    UNIT,
    ParamBlock,
    Piece,
    Split,
    buckets,
    cut_by_cost,
    held,
    owners,
    pieces,
    undivided_blocks,
    unit_heads,
)
from elastune.core.mesh import Mesh
from elastune.testing.kits.mechanism import moves, redundancy

BLOCKS = 4
SIZES = (UNIT * 5 + 7, 3, UNIT, 2 * UNIT + 1, 11)


def split() -> Split:
    """Three layers; the middle one's first tensor in virtual blocks."""
    whole = [
        ParamBlock(f"layer{i}.{j}", f"layer{i}.{j}", ((0, n),), layer=i) for i in range(3) for j, n in enumerate(SIZES)
    ]
    cut = [
        ParamBlock(f"up#{b}", "up", ((b * UNIT, (b + 1) * UNIT),), layer=1, block=b, trained=b != 2)
        for b in range(BLOCKS)
    ]
    return Split((*whole, *cut), BLOCKS, (1.0, 2.0, 1.0))


def state_layout(split: Split, mesh: Mesh, copies: int) -> dict[int, tuple[Piece, ...]]:
    """The pieces of flat parameter blocks that each worker holds."""
    return {rank: tuple(pieces(split, segments)) for rank, segments in enumerate(held(split, mesh, copies))}


MESHES = st.builds(Mesh, st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))


@given(MESHES, st.integers(1, 3))
def test_everything_has_holders_wherever_workers_compute_with_it(mesh: Mesh, copies: int) -> None:
    layout = state_layout(split(), mesh, copies)
    everything = pieces(split(), held(split(), Mesh(), 1)[0])
    assert moves(layout, {mesh.workers: tuple(everything)}), "nothing is lost"
    assert redundancy(layout) >= min(copies, mesh.workers)


@given(MESHES)
def test_cuts_are_at_units(mesh: Mesh) -> None:
    for bucket in buckets(split(), split().computed(mesh, 0), mesh.batch):
        for segment in (segment for part in bucket.parts for segment in part):
            assert segment.start % UNIT == 0
            assert segment.stop % UNIT == 0 or segment.stop == split().param_blocks[segment.param_block].size
        flat = [(s.param_block, at) for part in bucket.parts for s in part for at in (s.start, s.stop)]
        assert [param_block for param_block, at in flat if at == 0] == list(bucket.param_blocks), (
            "parts follow each other in the vector"
        )
        assert all(b == (a[0], a[1]) or b[1] == 0 for a, b in list(pairwise(flat))[1::2])


def test_shares_are_even() -> None:
    large = undivided_blocks([("a", (1000, 1000), "float32", True), ("b", (777, 1234), "float32", True)])
    sizes = [sum(s.size for s in own) for own in held(large, Mesh(shard=4), 1)]
    assert max(sizes) - min(sizes) <= 4 * UNIT


def test_copies_are_on_other_hosts_where_there_are_any() -> None:
    assert owners(Mesh(shard=4), 2, "aabb") == ((0, 2), (1, 3), (2, 0), (3, 1)), "and each holds as much"
    assert owners(Mesh(shard=4), 2, "aaaa")[3] == (3, 0)
    assert owners(Mesh(data=2, shard=2), 2)[0] == (0, 2), "the data axis has copies of its own"
    assert owners(Mesh(data=2, shard=2), 2, "abab")[0] == (0, 2, 1), "but not on another host"
    assert set(owners(Mesh(data=3), 1)[1]) == {0, 1, 2}
    assert owners(Mesh(), 2) == ((0,),)


def test_copies_are_with_other_parts_of_the_model_where_a_replica_is_alone() -> None:
    assert owners(Mesh(tensor=4), 2) == ((0, 1), (1, 2), (2, 3), (3, 0))
    assert owners(Mesh(tensor=2, pipeline=2), 2, "aabb") == ((0, 2), (1, 3), (2, 0), (3, 1))
    assert owners(Mesh(shard=2, tensor=2), 2)[0] == (0, 2), "first with those that compute with the same"
    assert owners(Mesh(shard=2, tensor=2), 2, "abab")[0] == (0, 1), "but not on the same host"


def test_any_death_leaves_a_copy() -> None:
    meshes = Mesh(shard=3), Mesh(data=2, shard=2), Mesh(shard=2, tensor=2), Mesh(tensor=3), Mesh(tensor=2, pipeline=3)
    for mesh in meshes:
        layout = state_layout(split(), mesh, 2)
        for dead in range(mesh.workers):
            left = {rank: own for rank, own in layout.items() if rank != dead}
            assert moves(left, layout)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=7), st.data())
def test_a_pipeline_is_cut_where_the_dearest_stage_is_cheapest(costs: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))

    def dearest(edges: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) for a, b in pairwise((0, *edges, len(costs))))

    result = cut_by_cost(costs, parts)
    assert [i for part in result for i in part] == list(range(len(costs)))
    best = min(dearest(edges) for edges in combinations(range(1, len(costs)), parts - 1))
    assert max(sum(costs[i] for i in part) for part in result) == pytest.approx(best)


def test_workers_along_the_tensor_axis_share_blocks_unevenly_where_they_must() -> None:
    results = [split().computed(Mesh(tensor=3), rank) for rank in range(3)]
    blocks = [
        [split().param_blocks[i].block for i in own if split().param_blocks[i].block is not None] for own in results
    ]
    assert blocks == [[0], [1], [2, 3]]


@given(st.integers(1, 40), st.integers(1, 3000), st.integers(1, 6))
def test_heads_make_every_unit_whole_where_it_begins(rows: int, length: int, workers: int) -> None:
    most = -(-rows // workers)
    edges = [min(rows, most * worker) * length for worker in range(workers + 1)]
    has = [range(low, high) for low, high in pairwise(edges)]
    here = [set(own) for own in has]
    for worker, reducer, head in unit_heads(has):
        here[worker] -= set(head)
        here[reducer] |= set(head)
    for first in range(0, rows * length, UNIT):
        owner = next(worker for worker, own in enumerate(has) if first in own)
        assert set(range(first, min(first + UNIT, rows * length))) <= here[owner]
    assert sum(map(len, here)) == rows * length
