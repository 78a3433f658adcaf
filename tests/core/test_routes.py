"""Routes of chunks: every sum is complete, everybody gets it, and nobody waits for ever, whatever is slow."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.core.communication import MOST_CHUNKS, Hop, Route, Topology, chunks_of, relay_steps, routes_of
from elastune.core.slots import cut, subtrees

NAMES = ["ring", "tree", "binary_tree", "star", "hierarchical"]


@st.composite
def trees(draw: st.DrawFn) -> Topology:
    """Any tree over up to nine ranks, in any numbering."""
    count = draw(st.integers(2, 9))
    order = draw(st.permutations(range(count)))
    parents = [order[0]] * count
    for at in range(1, count):
        parents[order[at]] = order[draw(st.integers(0, at - 1))]
    return Topology.of_parents(parents)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[Route, ...], int, int]:
    """Routes, workers and chunks."""
    if draw(st.booleans()):
        topology = draw(trees())
        workers = len(topology.parents)
    else:
        topology, workers = Topology.parse(draw(st.sampled_from(NAMES))), draw(st.integers(2, 9))
    hosts = draw(st.lists(st.sampled_from("abc"), min_size=workers, max_size=workers))
    return routes_of(topology, workers, hosts), workers, draw(st.integers(1, 12))


@settings(max_examples=300)
@given(case=cases(), seed=st.randoms(use_true_random=False))
def test_every_sum_is_complete_and_reaches_everybody(case: tuple[tuple[Route, ...], int, int], seed: object) -> None:
    """Workers act in a random order, each by its own list alone; a message is received only where it is waited for."""
    routes, workers, chunks = case
    lists = {rank: deque(relay_steps(routes, chunks, rank)) for rank in range(workers)}
    has = {(rank, chunk): Counter([rank]) for rank in range(workers) for chunk in range(chunks)}
    total: dict[tuple[int, int], Counter[int]] = {}
    under_way: dict[Hop, Counter[int]] = {}
    sent: set[Hop] = set()
    while any(lists.values()):
        able = [r for r, left in lists.items() if left and (left[0].arrives is None or left[0].arrives in under_way)]
        assert able, "everybody waits"
        rank = seed.choice(able)  # type: ignore[attr-defined]
        stop = lists[rank].popleft()
        if (hop := stop.arrives) is not None:
            assert hop.to == rank
            came = under_way.pop(hop)
            if hop.up:
                has[rank, hop.chunk] += came
            else:
                total[rank, hop.chunk] = came
        for hop in stop.leaves:
            assert hop.source == rank != hop.to
            assert hop not in sent, "twice"
            sent.add(hop)
            route = routes[hop.chunk % len(routes)]
            if stop.completes:
                assert set(has[rank, hop.chunk]) == route.below(rank), "all that comes here has come"
            if route.root == rank:
                total[rank, hop.chunk] = has[rank, hop.chunk]
            under_way[hop] = has[rank, hop.chunk].copy() if hop.up else total[rank, hop.chunk]
    assert not under_way, "sent to somebody who does not wait for it"
    assert total == {(rank, chunk): Counter(range(workers)) for rank in range(workers) for chunk in range(chunks)}


@given(case=cases())
def test_each_chunk_crosses_as_many_hops_as_there_are_others_each_way(
    case: tuple[tuple[Route, ...], int, int],
) -> None:
    routes, workers, chunks = case
    hops = Counter(
        (hop.chunk, hop.up)
        for rank in range(workers)
        for stop in relay_steps(routes, chunks, rank)
        for hop in stop.leaves
    )
    assert hops == {(chunk, up): workers - 1 for chunk in range(chunks) for up in (True, False)}


def test_shapes_are_what_their_names_say() -> None:
    def parents(name: str, workers: int) -> tuple[int, ...]:
        (route,) = routes_of(Topology.parse(name), workers)
        assert route.up == route.down
        return route.up

    assert parents("star", 4) == (0, 0, 0, 0)
    assert parents("tree", 8) == (0, 0, 0, 2, 0, 4, 4, 6)
    assert parents("binary_tree", 7) == (0, 0, 1, 1, 0, 4, 4)
    assert parents("parents=[2,2,2]", 3) == (2, 2, 2)
    ring = routes_of(Topology.parse("ring"), 3)
    assert [route.up for route in ring] == [(0, 2, 0), (1, 1, 0), (1, 2, 2)]
    assert [route.down for route in ring] == [(0, 0, 1), (2, 1, 1), (2, 0, 2)]


def test_hosts_gather_before_anything_crosses() -> None:
    routes = routes_of(Topology.parse("hierarchical"), 5, "aabbb")
    assert len(routes) == 6
    for route in routes:
        crossing = [rank for rank, parent in enumerate(route.up) if "aabbb"[rank] != "aabbb"[parent]]
        assert len(crossing) == 1, "one hop between two hosts"
    assert {route.root for route in routes} == {0, 1, 2, 3, 4}, "nobody gathers all chunks"


@pytest.mark.parametrize("workers", [4, 8])
def test_ranks_below_one_have_slots_that_lie_side_by_side(workers: int) -> None:
    """So that in exact mode one sum, or hardly more, travels for all of them."""
    runs = cut(workers, workers)
    for name, most in (("tree", 1), ("star", 1), ("binary_tree", 2)):
        (route,) = routes_of(Topology.parse(name), workers)
        for rank in range(workers):
            slots = {slot for below in route.below(rank) for slot in runs[below]}
            assert len(subtrees(slots, workers)) <= most, (name, rank)


def test_no_routes_where_the_backend_has_its_own_way() -> None:
    for text, workers in (("auto", 4), ("native", 4), ("tree", 1), ("parents=[0,0,0]", 4)):
        assert routes_of(Topology.parse(text), workers) == ()


def test_chunks_are_whole_turns_of_all_routes() -> None:
    assert chunks_of(1 << 20, 4, 1, 512) == 8
    assert chunks_of(1 << 20, 4, 3, 512) == 9
    assert chunks_of(10, 4, 4, 512) == 4
    assert chunks_of(3, 4, 4, 512) == 3
    assert chunks_of(0, 4, 4, 512) == 1
    assert chunks_of(1 << 40, 4, 3, 1) == MOST_CHUNKS


def test_first_comes_what_needs_nothing_then_what_comes_first() -> None:
    (route,) = routes_of(Topology.parse("parents=[0,0,1]"), 3)
    stops = relay_steps((route,), 2, 1)
    results = [
        (stop.arrives and (stop.arrives.chunk, stop.arrives.up), [hop.to for hop in stop.leaves]) for stop in stops
    ]
    assert results == [((0, True), [0]), ((1, True), [0]), ((0, False), [2]), ((1, False), [2])]
    (param_block, *_) = relay_steps((route,), 2, 2)
    assert param_block.arrives is None
