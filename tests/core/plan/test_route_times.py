"""The model of sums on their routes: closed forms where there are some, and the choices that follow from it."""

from __future__ import annotations

import pytest

from elastune.core.communication import Topology
from elastune.core.plan.links import HOP_S, HostLinks, Sums
from elastune.core.plan.links import best_topology as best
from elastune.core.plan.links import candidate_topologies as candidates
from elastune.core.plan.links import topology_seconds as seconds

MIB = 1 << 20
FAST, SLOW = 125e6, 25e6  # 1 Gbit/s and 200 Mbit/s


def links(*rates: float, latency_s: float = 1e-4) -> HostLinks:
    """Each host's own link is the bound."""
    names = tuple("abcdefgh"[: len(rates)])
    pairs = tuple(tuple(min(a, b) for b in rates) for a in rates)
    return HostLinks(names, tuple((latency_s,) * len(rates) for _ in rates), pairs)


def sums(found: HostLinks, each: int = 1, slots: int = 0) -> Sums:
    return Sums(2 * MIB, 4, tuple(name for name in found.hosts for _ in range(each)), slots)


def test_a_ring_takes_what_its_formula_says() -> None:
    """2 (W - 1) messages of a W-th each, over the slowest link."""
    equal = links(FAST, FAST, FAST, FAST)
    wanted = 6 * (1e-4 + HOP_S + 8 * MIB / 4 / FAST)
    assert seconds(Topology("ring", chunk_kib=8192), sums(equal), equal) == pytest.approx(wanted, rel=1e-6)


def test_a_star_of_one_chunk_takes_turns_at_its_root() -> None:
    equal = links(FAST, FAST, FAST)
    wanted = 2 * 2 * 8 * MIB / FAST + 2 * (1e-4 + HOP_S)
    assert seconds(Topology("star", chunk_kib=8192), sums(equal), equal) == pytest.approx(wanted, rel=1e-6)


def test_a_chain_of_many_chunks_takes_little_more_than_its_bytes() -> None:
    slow = links(FAST, FAST, FAST, SLOW)
    chain = Topology("parents", (0, 0, 1, 2), 256)
    assert 8 * MIB / SLOW < seconds(chain, sums(slow), slow) < 1.25 * 8 * MIB / SLOW


@pytest.mark.parametrize("slow_rank", [0, 1, 3])
def test_a_slow_host_becomes_a_leaf(slow_rank: int) -> None:
    rates = [FAST] * 4
    rates[slow_rank] = SLOW
    result = links(*rates)
    chosen, times = best(sums(result), result, Topology("native"))
    assert chosen.parents
    assert slow_rank not in [p for rank, p in enumerate(chosen.parents) if rank != p], (
        "it gives, and is given to by none"
    )
    assert times[str(chosen)] <= 0.75 * times["native"]


@pytest.mark.parametrize("slots", [0, 8])
def test_equal_links_leave_all_as_it_is(slots: int) -> None:
    equal = links(FAST, FAST, FAST, FAST)
    assert best(sums(equal, slots=slots), equal, Topology("native"))[0] == Topology("native")


def test_what_is_in_use_stays_unless_another_promises_enough() -> None:
    slow = links(FAST, FAST, FAST, SLOW)
    chosen, _ = best(sums(slow), slow, Topology("native"))
    others = [topology for topology in candidates(sums(slow), slow) if topology != chosen]
    near = min(others, key=lambda topology: seconds(topology, sums(slow), slow))
    assert best(sums(slow), slow, near)[0] == near
    equal = links(FAST, FAST, FAST, FAST)
    assert best(sums(equal), equal, Topology("star", chunk_kib=8192))[0] == Topology("native"), "and back"


def test_in_exact_mode_partial_sums_cost_their_bytes() -> None:
    equal = links(FAST, FAST, FAST, FAST)
    ring = Topology("ring", chunk_kib=8192)
    assert seconds(ring, sums(equal, slots=4), equal) > 1.2 * seconds(ring, sums(equal), equal)


def test_within_a_host_hardly_anything_is_spent() -> None:
    two = links(FAST, FAST)
    across = 8 * MIB / FAST  # half of it there and half back, both ways at once
    assert seconds(Topology("hierarchical"), sums(two, each=2), two) == pytest.approx(across, rel=0.1)


def test_what_is_small_is_left_as_it_is() -> None:
    slow = links(FAST, FAST, FAST, SLOW)
    few = Sums(1 << 12, 4, slow.hosts)
    assert best(few, slow, Topology("native"))[0] == Topology("native")


def test_noise_is_taken_for_equal_and_what_is_slow_is_not() -> None:
    rates = [[0.0, 9e8, 7e8, 2e7], [5e8, 0.0, 8e8, 2.5e7], [6e8, 4e8, 0.0, 2.2e7], [2e7, 2.4e7, 2.1e7, 0.0]]
    latency_s = [[0.0, 1e-4, 2e-4, 1e-4]] * 4
    result = HostLinks.steadied(("a", "b", "c", "d"), latency_s, rates)
    assert len({result.rates(name) for name in "abc"}) == 1
    assert result.of("a", "b") == result.of("c", "a")
    assert result.rates("d")[0] < 3e7
    assert result.of("a", "d")[1] < 3e7
    one_way = [[0.0, 9e8, 9e7], [9e8, 0.0, 9e8], [9e8, 9e8, 0.0]]
    assert HostLinks.steadied(("a", "b", "c"), [[1e-4] * 3] * 3, one_way).of("a", "c")[1] == 9e7, "this pair alone"
