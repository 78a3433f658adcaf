from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.core.sync_plan import SyncPlan, fragments_of, send_schedule


@given(sizes=st.lists(st.integers(0, 10_000), min_size=1, max_size=40), count=st.integers(1, 40))
def test_every_tensor_is_in_one_fragment_and_none_is_much_heavier(sizes: list[int], count: int) -> None:
    count = min(count, len(sizes))
    result = fragments_of(sizes, count)
    assert sorted(place for places in result for place in places) == list(range(len(sizes)))
    assert all(places == sorted(places) and places for places in result)
    weights = [sum(sizes[place] for place in places) for places in result]
    assert max(weights) <= sum(sizes) / count + max(sizes), "no tensor is cut"


def test_more_fragments_than_tensors_are_refused() -> None:
    with pytest.raises(UserError, match="fragments=3, 2 parameters"):
        fragments_of([4, 4], 3)


def test_evenly_staggered_in_turn() -> None:
    assert send_schedule(200, 4, 1) == {50: 0, 100: 1, 150: 2}
    assert send_schedule(20, 2, 2) == {5: 0, 10: 1, 15: 0}
    assert send_schedule(7, 1, 1) == {}


@given(fragments=st.integers(1, 9), cycles=st.integers(1, 9), delay=st.integers(1, 9), more=st.integers(1, 30))
def test_a_fragment_is_back_before_the_next_leaves(fragments: int, cycles: int, delay: int, more: int) -> None:
    """And each is exchanged ``cycles`` times, the round's end included."""
    if cycles * fragments == 1:
        return
    every = cycles * fragments * delay + cycles * fragments - 1 + more
    plan = SyncPlan("diloco", 2, every, fragments=fragments, cycles=cycles, delay=delay)
    leaves = send_schedule(plan.every, fragments, cycles)
    steps = [*sorted(leaves), plan.every]
    assert all(later - earlier > delay for earlier, later in pairwise(steps))
    assert [list(leaves.values()).count(each) for each in range(fragments)] == [cycles] * (fragments - 1) + [cycles - 1]
