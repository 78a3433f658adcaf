"""Plans of transfers: each byte once, from those that have it, spread over all that can send."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.core.layout import UNIT
from elastune.parallel.mechanisms.owned.placement import LONGEST, Item, Transfer, plan_transfers, rounds

ITEM = Item(0, True)
MEGA = 256 * UNIT


def received(plan: Sequence[Sequence[Transfer]], workers: int) -> list[list[tuple[Item, int, int]]]:
    results: list[list[tuple[Item, int, int]]] = [[] for _ in range(workers)]
    for hop in plan:
        for transfer in hop:
            results[transfer.target].append((transfer.item, transfer.start, transfer.stop))
    return results


def elements(holdings: dict[Item, list[tuple[int, int]]]) -> set[tuple[Item, int]]:
    return {(item, i) for item, ranges in holdings.items() for start, stop in ranges for i in range(start, stop)}


@st.composite
def _holdings(draw: st.DrawFn, workers: int) -> list[dict[Item, list[tuple[int, int]]]]:
    results = []
    for _ in range(workers):
        of: dict[Item, list[tuple[int, int]]] = {}
        for item in (Item(0, True), Item(0, False), Item(1, True)):
            ends = sorted(draw(st.sets(st.integers(0, 12), max_size=4)))
            ranges = list(zip(ends[::2], ends[1::2], strict=False))
            if ranges:
                of[item] = ranges
        results.append(of)
    return results


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 5), st.sampled_from([1, UNIT, 20 * UNIT]))
def test_each_missing_element_comes_once_and_from_somebody_that_has_it(
    data: st.DataObject, workers: int, scale: int
) -> None:
    small_have, small_want = data.draw(_holdings(workers)), data.draw(_holdings(workers))

    def scaled(of: list[dict[Item, list[tuple[int, int]]]]) -> list[dict[Item, list[tuple[int, int]]]]:
        return [{item: [(a * scale, b * scale) for a, b in ranges] for item, ranges in each.items()} for each in of]

    plan = plan_transfers(
        scaled(small_have), scaled(small_want), {Item(0, True): 4, Item(0, False): 8, Item(1, True): 4}
    )
    had = [elements(of) for of in small_have]
    lost = {(item, i // scale) for item, a, b in plan.lost for i in range(a, b, scale)}
    assert lost == set().union(*(elements(of) for of in small_want)) - set().union(*had)
    came: list[list[tuple[Item, int]]] = [[] for _ in range(workers)]
    has = [{(item, i * scale) for item, i in of} for of in had]  # the beginning of each scaled element
    for hop in plan.hops:
        for t in hop:
            assert t.source != t.target
            begun = {(t.item, i) for i in range(-(-t.start // scale) * scale, t.stop, scale)}
            assert begun <= has[t.source], "nobody sends what he does not have by then"
            came[t.target] += sorted(begun)
        for rank in range(workers):
            has[rank] |= set(came[rank])
    for rank in range(workers):
        missing = elements(small_want[rank]) - had[rank] - lost
        assert sorted(came[rank]) == sorted((item, i * scale) for item, i in missing), "each once"
    sizes = [sum(t.stop - t.start for hop in plan.hops for t in hop if t.target == rank) for rank in range(workers)]
    assert sizes == [scale * len(elements(small_want[r]) - had[r] - lost) for r in range(workers)]


@pytest.mark.parametrize(("owners", "joiners"), [(1, 1), (1, 3), (1, 7), (2, 6), (3, 1), (4, 4)])
def test_sending_is_spread_over_all_that_can_send(owners: int, joiners: int) -> None:
    size = 12 * MEGA
    have = [{ITEM: [(0, size)]}] * owners + [{}] * joiners
    want = [{}] * owners + [{ITEM: [(0, size)]}] * joiners
    plan = plan_transfers(have, want, {ITEM: 4})
    sent = [0] * (owners + joiners)
    for hop in plan.hops:
        for t in hop:
            sent[t.source] += t.stop - t.start
    assert sum(sent) == joiners * size, "the minimum: once to each"
    senders = owners + (joiners if joiners > owners else 0)
    ideal = max(joiners * size / senders, size / owners if senders > owners else 0)
    assert max(sent) <= ideal + 2 * LONGEST


def test_what_is_there_stays_and_nothing_moves() -> None:
    have = [{ITEM: [(0, 8)]}, {ITEM: [(8, 16)]}]
    assert plan_transfers(have, have, {ITEM: 4}).hops == ((), ())


def test_what_nobody_has_is_lost_even_where_it_has_no_bytes() -> None:
    moments = Item(3, False)
    assert plan_transfers([{}, {}], [{moments: [(0, 8)]}, {}], {moments: 0}).lost == ((moments, 0, 8),)


def test_rounds_are_bounded_and_full() -> None:
    size = 40 * MEGA
    plan = plan_transfers([{ITEM: [(0, size)]}, {}, {}, {}], [{}] + [{ITEM: [(0, size)]}] * 3, {ITEM: 4})
    limit = 8 * MEGA * 4
    count = 0
    for hop in plan.hops:
        result = rounds(hop, {ITEM: 4}, limit)
        assert sum(map(len, result)) == len(hop)
        for moving in result:
            for end in ("source", "target"):
                for rank in range(4):
                    assert sum(4 * (t.stop - t.start) for t in moving if getattr(t, end) == rank) <= limit
        count += len(result)
    assert count <= 2 + -(-2 * size // (8 * MEGA))
