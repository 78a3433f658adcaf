"""How sums climb by levels: who meets whom, what is brought, and what crosses from host to host."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.slots import Deal, cut, dealt, node_sum, tree_sum
from elastune.parallel.comm.exact import LevelLeg, climb, host_levels, level_ranks

LENGTH = 480


@pytest.mark.parametrize(
    ("hosts", "sizes"),
    [
        ("aabb", (2, 2)),
        ("aaabbb", (3, 2)),
        ("aabbcc", (2, 3)),
        ("", ()),
        ("aaaa", ()),
        ("abcd", ()),
        ("aab", ()),  # unequal
        ("abab", ()),  # not host by host
        ("aabbaa", ()),
    ],
)
def test_levels_are_those_of_equal_hosts(hosts: str, sizes: tuple[int, ...]) -> None:
    assert host_levels(hosts) == sizes


def test_first_the_neighbours_then_their_likes_elsewhere() -> None:
    assert level_ranks((2, 3), 3) == [(2, 3), (1, 3, 5)]
    assert level_ranks((3, 2), 4) == [(3, 4, 5), (1, 4)]
    assert level_ranks((2, 2, 2), 5) == [(4, 5), (5, 7), (1, 5)]
    assert level_ranks((), 3) == []


def legs_of(sizes: Sequence[int], slots: int, deal: Deal = cut) -> list[list[LevelLeg]]:
    workers = prod(sizes)
    return [climb(deal(slots, workers), slots, sizes, rank, LENGTH) for rank in range(workers)]


@given(
    sizes=st.sampled_from([(1,), (5,), (2, 2), (3, 2), (2, 3), (2, 2, 2), (1, 4), (4, 1)]),
    more=st.integers(0, 9),
    deal=st.sampled_from([cut, dealt]),
)
def test_every_worker_comes_to_the_canonical_sum(sizes: tuple[int, ...], more: int, deal: Deal) -> None:
    workers = prod(sizes)
    slots = workers + more

    def add(a: str, b: str) -> str:
        return f"({a}+{b})"

    wanted = tree_sum([(range(slot, slot + 1), str(slot)) for slot in range(slots)], slots, add)
    legs, runs = legs_of(sizes, slots, deal), deal(slots, workers)
    has = [dict.fromkeys(legs[rank][0].bring[level_ranks(sizes, rank)[0].index(rank)]) for rank in range(workers)]
    values = [
        {node: node_sum([(range(s, s + 1), str(s)) for s in runs[rank]], node, add) for node in has[rank]}
        for rank in range(workers)
    ]
    for level in range(len(sizes)):
        after = []
        for rank in range(workers):
            leg, meets = legs[rank][level], level_ranks(sizes, rank)[level]
            for other, brought in zip(meets, leg.bring, strict=True):
                assert list(values[other]) == list(brought)
            rows = [(node, value) for other in meets for node, value in values[other].items()]
            after.append({node: node_sum([r for r in rows if r[0].start in node], node, add) for node in leg.sums})
        values = after
    assert values == [{range(slots): wanted}] * workers
    assert [leg[-1].piece for leg in legs] == [LENGTH // workers] * workers


def crossing(sizes: Sequence[int], slots: int, each: int) -> float:
    """What each host, of ``each`` workers, sends to others in a reduction, over the length of what is summed."""
    sent, legs = 0.0, legs_of(sizes, slots)
    for rank, own in enumerate(legs):
        for leg, meets in zip(own, level_ranks(sizes, rank), strict=True):
            for other, brought in zip(meets, leg.bring, strict=True):
                if other // each != rank // each:
                    sent += (len(brought) + 1) * leg.piece / LENGTH  # to it on the way up, and back from it
    return sent * each / len(legs)


def test_fewer_bytes_cross_from_host_to_host() -> None:
    """The least is that of a ring of hosts, 2 (H - 1) / H: met where each host's slots are whole nodes of the tree."""
    assert (crossing([4], 4, 2), crossing([2, 2], 4, 2)) == (2.0, 1.0)
    assert (crossing([8], 8, 2), crossing([2, 4], 8, 2)) == (3.0, 1.5)
    assert (crossing([32], 32, 8), crossing([8, 4], 32, 8)) == (12.0, 1.5)
    assert crossing([6], 8, 2) == pytest.approx(8 / 3)
    assert crossing([2, 3], 8, 2) == pytest.approx(16 / 9)  # not whole: more than the least, 4 / 3


def test_levels_must_fit() -> None:
    with pytest.raises(ValueError, match="do not fit 4 workers"):
        climb(cut(8, 4), 8, (2, 3), 0, 8)
