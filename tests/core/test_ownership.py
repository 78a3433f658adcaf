"""Who holds what, and who writes what of a checkpoint: each unit has as many holders as copies, and one writer."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.core.layout import (
    ALONE,
    UNIT,
    ParamBlock,
    Segment,
    Split,
    buckets,
    gathered_in,
    held,
    remote_owners,
    undivided_blocks,
    written,
)
from elastune.core.mesh import Mesh

sizes = st.one_of(st.integers(1, 40), st.integers(UNIT - 1, 3 * UNIT + 1))


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """A model of some layers, of which some leaves are blocks of the tensor axis, and some are not trained."""
    blocks, layers = draw(st.sampled_from([1, 4])), draw(st.integers(4, 6))
    param_blocks: list[ParamBlock] = []
    for layer in range(layers):
        for kind in range(draw(st.integers(1, 3))):
            size, trained = draw(sizes), draw(st.booleans())
            cut = blocks > 1 and draw(st.booleans())
            for block in range(blocks) if cut else [None]:
                at = 0 if block is None else block * size
                name, of = f"{layer}.{kind}#{block}", f"{layer}.{kind}"
                param_blocks.append(ParamBlock(name, of, ((at, at + size),), layer=layer, block=block, trained=trained))
    return Split(tuple(param_blocks), blocks, (1.0,) * layers)


MESHES = st.builds(
    Mesh, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4])
)


@settings(max_examples=60, deadline=None)
@given(splits(), MESHES, st.integers(1, 3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_unit_has_holders_enough_on_hosts_enough(
    split: Split, mesh: Mesh, copies: int, most_hosts: int, dice: random.Random
) -> None:
    """As far as there are so many, wherever the workers are."""
    if split.blocks < mesh.tensor:
        mesh = Mesh(mesh.data, mesh.shard, 1, mesh.pipeline)
    hosts = [dice.randrange(most_hosts) for _ in range(mesh.workers)]
    results: dict[tuple[int, int], list[int]] = {}
    for rank, own in enumerate(held(split, mesh, copies, hosts)):
        for segment in own:
            assert segment.start % UNIT == 0
            for unit in range(segment.start, segment.stop, UNIT):
                results.setdefault((segment.param_block, unit), []).append(rank)
    for i, param_block in enumerate(split.param_blocks):
        for unit in range(0, param_block.size, UNIT):
            ranks = results[i, unit]
            assert len(set(ranks)) == len(ranks), "nobody holds it twice"
            assert len(ranks) >= min(copies, mesh.workers)
            assert len({hosts[rank] for rank in ranks}) >= min(copies, len(set(hosts)))
    inside = [_units(own) for own in held(split, mesh, 1)]
    for remote_owner in remote_owners(split, mesh, copies, hosts):
        assert copies > 1
        assert _units([remote_owner.segment]) <= inside[remote_owner.source], (
            "who sends its sum has it without others' help"
        )


def _units(segments: Iterable[Segment]) -> set[tuple[int, int]]:
    return {(s.param_block, unit) for s in segments for unit in range(s.start, s.stop, UNIT)}


@pytest.mark.parametrize("mesh", [Mesh(tensor=4), Mesh(pipeline=4), Mesh(tensor=2, pipeline=2)], ids=str)
@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abab", "abcd"])
def test_wards_are_spread(mesh: Mesh, hosts: str) -> None:
    """Layers of equal size: each worker holds its own part and another one's."""
    blocks = 4 if mesh.tensor > 1 else 1
    param_blocks = [
        ParamBlock(f"{layer}#{b}", str(layer), ((b, b + 1), (0, UNIT)), layer=layer, block=b if blocks > 1 else None)
        for layer in range(4)
        for b in range(blocks)
    ]
    split = Split(tuple(param_blocks), blocks, (1.0,) * 4)
    assert {sum(s.size for s in own) for own in held(split, mesh, 2, hosts)} == {4 * blocks * UNIT // 2}


def test_no_wards_where_the_batch_group_has_copies_enough() -> None:
    split = undivided_blocks([("a", (3 * UNIT,), "float32", True), ("b", (3,), "float32", False)])
    for mesh in (Mesh(data=2), Mesh(shard=3), Mesh(data=2, shard=2)):
        assert not remote_owners(split, mesh, 2)
    blocks = Split(tuple(ParamBlock(f"a#{b}", "a", ((b, b + 1), (0, UNIT)), block=b) for b in range(2)), 2)
    assert not remote_owners(blocks, Mesh(data=2, tensor=2), 2)
    assert not remote_owners(blocks, Mesh(data=2, tensor=2), 2, "aabb")
    assert remote_owners(blocks, Mesh(data=2, tensor=2), 2, "abab"), "replicas that lie across hosts"
    assert not remote_owners(split, Mesh(tensor=2), 2), "each computes with all of it"


@settings(max_examples=40, deadline=None)
@given(splits(), MESHES, st.integers(1, 3))
def test_each_element_has_one_writer_who_holds_it(split: Split, mesh: Mesh, copies: int) -> None:
    if split.blocks < mesh.tensor:
        mesh = Mesh(mesh.data, mesh.shard, 1, mesh.pipeline)
    spans: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(split.param_blocks))}
    for rank, own in enumerate(held(split, mesh, copies)):
        for segment in written(split, mesh, rank):
            spans[segment.param_block].append((segment.start, segment.stop))
            assert any(
                h.param_block == segment.param_block and h.start <= segment.start and segment.stop <= h.stop
                for h in own
            ), "a writer holds what it writes"
    for param_block, result in spans.items():
        edges = sorted(result)
        assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])], split.param_blocks[
            param_block
        ].name
        assert edges[-1][1] == split.param_blocks[param_block].size


def test_what_is_gathered_apart_is_in_buckets_apart() -> None:
    """Those of the last block first, and large leaves alone: they travel out of their own memory."""
    sizes = [("a", 3), ("b", ALONE), ("c", 5), ("d", 7), ("e", ALONE), ("f", 2)]
    split = undivided_blocks([(name, (size,), "float32", True) for name, size in sizes])
    gathered = gathered_in(split, [(0, 5), (1, 2), (3, 4)])
    names = ["".join(split.param_blocks[i].name for i in plan.param_blocks) for plan in buckets(gathered, range(6), 2)]
    assert names == ["d", "e", "c", "b", "fa"]
    for plan in buckets(gathered, range(6), 2):
        assert len(plan.param_blocks) > 1 or max(plan.sizes) - min(plan.sizes) <= UNIT, "each block is everybody's"
