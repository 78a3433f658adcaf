"""State to where it belongs, over real groups: any mesh to any other, a death in it, and what is lost."""

from __future__ import annotations

import signal
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.soaked import soaked

from elastune.core.layout import UNIT, CopiesDiffer, ParamBlock, Segment, Split, Unrecoverable, held
from elastune.core.mesh import Mesh
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.parallel.mechanisms.owned.placement import VALUES, PlacedState, Shard, StateRequest, bring, meet
from elastune.testing.worker_processes import Worker, processes

BLOCKS = 4
SIZES = [3 * UNIT + 5, 17, 40 * UNIT, 2 * UNIT, 9 * UNIT + 1, 1]


def model() -> Split:
    """Three layers; two of the leaves of each are divided along the tensor axis, one is not trained."""
    param_blocks = []
    for layer in range(3):
        for number, size in enumerate(SIZES):
            for block in range(BLOCKS) if number in (0, 2) else [None]:
                name = f"{layer}.{number}.{block}"
                param_blocks.append(ParamBlock(name, name, ((0, size),), layer=layer, block=block, trained=number != 3))
    return Split(tuple(param_blocks), BLOCKS, (1.0, 2.0, 1.0))


SPLIT = model()
KINDS = {VALUES: torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float64}


def truth(segment: Segment, name: str) -> torch.Tensor:
    """What must be there: a number that tells leaf, place and kind."""
    start = 1_000_003 * segment.param_block + 7_919 * sorted(KINDS).index(name)
    return torch.arange(start + segment.start, start + segment.stop).remainder(2**24).to(KINDS[name])


def has_state(param_block: int) -> bool:
    """One leaf was never used, and what is not trained has none."""
    return SPLIT.param_blocks[param_block].trained and param_block % 5 != 1


def shares_of(mesh: Mesh, rank: int, copies: int) -> list[Shard]:
    results = []
    for segment in held(SPLIT, mesh, copies)[rank]:
        names = ["exp_avg", "exp_avg_sq"] if has_state(segment.param_block) else []
        results.append(Shard(segment, {name: truth(segment, name) for name in names}, held=True))
    for param_block in SPLIT.computed(mesh, rank):
        whole = Segment(param_block, 0, SPLIT.param_blocks[param_block].size)
        results.append(Shard(whole, {VALUES: truth(whole, VALUES)}, held=False))
    return results


def wanted(mesh: Mesh, rank: int, copies: int) -> StateRequest:
    whole = tuple(
        Segment(param_block, 0, SPLIT.param_blocks[param_block].size) for param_block in SPLIT.computed(mesh, rank)
    )
    return StateRequest(held(SPLIT, mesh, copies)[rank], whole)


def facts_of(shards: list[Shard]) -> dict[int, Any]:
    return {s.segment.param_block: {"step": ["float32", float(s.segment.param_block)]} for s in shards if s.held}


def check(placed: PlacedState, want: StateRequest, before: list[Shard]) -> None:
    assert [s.segment for s in placed.shards if s.held] == list(want.holds)
    for shard in placed.shards:
        names = (
            {VALUES} if not shard.held else {"exp_avg", "exp_avg_sq"} if has_state(shard.segment.param_block) else set()
        )
        assert set(shard.tensors) == names
        for name, tensor in shard.tensors.items():
            assert torch.equal(tensor, truth(shard.segment, name)), (shard.segment, name)
    for segment in want.holds:
        assert placed.facts[segment.param_block] == {"step": ["float32", float(segment.param_block)]}
    there = {
        (s.segment.param_block, i)
        for s in (*before, *placed.shards)
        if VALUES in s.tensors
        for i in range(s.segment.start, s.segment.stop, UNIT)
    }
    assert {(s.param_block, i) for s in want.values for i in range(s.start, s.stop, UNIT)} <= there


CHAIN = [
    *(Mesh(shard=4), Mesh(data=2, shard=2), Mesh(data=2, tensor=2), Mesh(tensor=2, pipeline=2), Mesh(shard=3)),
    *(Mesh(pipeline=3), Mesh(tensor=4), Mesh(data=1), Mesh(data=4), Mesh(shard=2, tensor=2), Mesh(tensor=3)),
]


def walk(worker: Worker, copies: int) -> None:
    """From mesh to mesh; who has no place in one comes back as a joiner without anything."""
    group = worker.form("all")
    for before, after in pairwise(CHAIN):
        had = shares_of(before, worker.rank, copies) if worker.rank < before.workers else []
        stays = worker.rank < after.workers
        want = [wanted(after, r, copies) if r < after.workers else StateRequest((), ()) for r in range(worker.size)]
        version = 7 if had else -1
        placed = bring(group, SPLIT, version, had, facts_of(had), want)
        meet(group, SPLIT, placed, exact=True)
        assert placed.version == 7
        if stays:
            check(placed, want[worker.rank], had)
        else:
            assert not placed.shards
        least = missing_bytes(before, after, copies)
        assert placed.bytes == least, (str(before), str(after))
        worker.meet(str(before) + str(after))
    worker.send("done")


def missing_bytes(before: Mesh, after: Mesh, copies: int) -> int:
    """What has to move, counted in another way: unit by unit."""
    total = 0
    for rank in range(after.workers):
        units: dict[int, torch.Tensor] = {}
        if rank < before.workers:
            units = _elements(held(SPLIT, before, copies)[rank])
        state = _elements(held(SPLIT, after, copies)[rank])
        total += sum((12 if has_state(param_block) else 0) * n for param_block, n in _left(state, units).items())
        had = set(SPLIT.computed(before, rank)) if rank < before.workers else set()
        total += sum(4 * SPLIT.param_blocks[i].size for i in SPLIT.computed(after, rank) if i not in had)
    return total


def _elements(segments: tuple[Segment, ...]) -> dict[int, torch.Tensor]:
    results: dict[int, torch.Tensor] = {}
    for segment in segments:
        mask = results.setdefault(
            segment.param_block, torch.zeros(SPLIT.param_blocks[segment.param_block].size, dtype=torch.bool)
        )
        mask[segment.start : segment.stop] = True
    return results


def _left(want: dict[int, torch.Tensor], have: dict[int, torch.Tensor]) -> dict[int, int]:
    return {
        param_block: int((mask & ~have[param_block]).sum() if param_block in have else mask.sum())
        for param_block, mask in want.items()
    }


@pytest.mark.parametrize("copies", [2, *soaked(1)])
def test_any_mesh_to_any_other_moves_the_least_and_keeps_every_bit(copies: int) -> None:
    with processes(4, walk, copies) as them:
        for rank in range(4):
            assert them.receive(rank) == ("done",)
        them.all_end_well()


def die_and_go_on(worker: Worker) -> None:
    """Worker 3 dies while state moves; the others, in a new group, still have all that they had."""
    before, after = Mesh(shard=4), Mesh(shard=3)
    had = shares_of(before, worker.rank, 2)
    group = worker.form("all")
    if worker.rank == 3:
        Group.exchange = lambda *_: worker.send("dying") or worker.receive()  # type: ignore[method-assign,assignment]
    want = [wanted(Mesh(shard=2, data=2), r, 2) for r in range(4)]
    broken = False
    try:
        meet(group, SPLIT, bring(group, SPLIT, 7, had, facts_of(had), want), exact=True)
    except GroupBroken:
        broken = True
    assert broken
    group.abandon()
    group.drain()
    for shard in had:
        assert all(torch.equal(tensor, truth(shard.segment, name)) for name, tensor in shard.tensors.items())
    group = GlooFactory("lo", 60.0).form(worker.store, "rest", worker.rank, 3)
    want = [wanted(after, r, 2) for r in range(3)]
    placed = bring(group, SPLIT, 7, had, facts_of(had), want)
    meet(group, SPLIT, placed, exact=True)
    check(placed, want[worker.rank], had)
    # Both holders of something gone: all are told, and what.
    group2 = GlooFactory("lo", 60.0).form(worker.store, "two", worker.rank, 3)
    mine = had if worker.rank == 0 else []
    with pytest.raises(Unrecoverable, match=r"no worker holds all of .*\.2\."):
        bring(group2, SPLIT, 7 if mine else -1, mine, facts_of(mine), want)
    # What is older than the newest counts for nothing: worker 1 has all of version 6, worker 0 of version 7.
    everything = shares_of(Mesh(), 0, 1)
    if worker.rank == 1:
        everything = [Shard(s.segment, {n: t + 1 for n, t in s.tensors.items()}, s.held) for s in everything]
    mine = everything if worker.rank < 2 else []
    version = (7, 6, -1)[worker.rank]
    placed = bring(group2, SPLIT, version, mine, facts_of(mine), want)
    check(placed, want[worker.rank], mine if worker.rank == 0 else [])
    worker.send("done")


def test_a_death_in_it_changes_nothing_and_what_is_lost_is_told() -> None:
    with processes(4, die_and_go_on) as them:
        assert them.receive(3) == ("dying",)
        them.signal(3, signal.SIGKILL)
        for rank in range(3):
            assert them.receive(rank) == ("done",)
        them.all_end_well(0, 1, 2)


def differ_in_a_bit(worker: Worker) -> None:
    """What lies on two workers is not the same on both, in the optimizer's state or in values; nothing moves."""
    group, mesh = worker.form("all"), Mesh(data=2, shard=2)
    want = [wanted(mesh, rank, 2) for rank in range(4)]
    for kind, result in (("exp_avg_sq", "optimizer state"), (VALUES, "values")):
        had = shares_of(mesh, worker.rank, 2)
        if worker.rank == 2:
            tampered = next(shard for shard in had if kind in shard.tensors)
            tampered.tensors[kind][-1:].view(torch.uint8)[0] ^= 1
        placed = bring(group, SPLIT, 7, had, facts_of(had), want)
        assert not placed.bytes
        with pytest.raises(CopiesDiffer, match=rf"{result} of 0\.\d\.\S+ that ranks .* have differ"):
            meet(group, SPLIT, placed, exact=True)
        meet(group, SPLIT, placed, exact=False)
    worker.send("done")


def test_copies_that_differ_in_a_bit_are_told_by_all() -> None:
    with processes(4, differ_in_a_bit) as them:
        for rank in range(4):
            assert them.receive(rank) == ("done",)
        them.all_end_well()
