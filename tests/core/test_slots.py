"""Slots: partition and canonical tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.slots import Deal, Fold, TreeSum, cut, dealt, subtrees, tree_sum


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_cut_tiles_with_sizes_that_differ_by_at_most_one(total: int, parts: int) -> None:
    ranges = cut(total, parts)
    assert [i for r in ranges for i in r] == list(range(total))
    assert len(ranges) == parts
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize(("total", "parts"), [(-1, 2), (3, 0)])
def test_cut_refuses_nonsense(total: int, parts: int) -> None:
    with pytest.raises(ValueError, match="cut needs"):
        cut(total, parts)


def written(num_slots: int, workers: int, deal: Deal = cut) -> str:
    """The sum as text: where the parentheses stand is the order of additions."""
    parts: list[tuple[range, str]] = []
    for run in deal(num_slots, workers):
        fold = Fold(run, num_slots, lambda a, b: f"({a}+{b})")
        for slot in run:
            fold.push(slot, str(slot))
        assert [node for node, _ in fold.parts] == subtrees(run, num_slots)
        parts += fold.parts
    return tree_sum(parts, num_slots, lambda a, b: f"({a}+{b})")


@given(st.integers(1, 70), st.data())
def test_order_of_additions_does_not_depend_on_workers(num_slots: int, data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, num_slots))
    assert written(num_slots, workers) == written(num_slots, workers, dealt) == written(num_slots, 1)


@given(st.integers(1, 40), st.data())
def test_nor_on_the_order_in_which_slots_come(num_slots: int, data: st.DataObject) -> None:
    """Those that never come are zero."""
    there = data.draw(st.permutations(range(num_slots)))[: data.draw(st.integers(0, num_slots))]
    result = TreeSum[str](num_slots, lambda a, b: f"({a}+{b})")
    for slot in there:
        result.put(slot, str(slot))
    parts = [(range(slot, slot + 1), str(slot) if slot in there else "0.0") for slot in range(num_slots)]
    assert result.total(lambda: "0.0") == tree_sum(parts, num_slots, lambda a, b: f"({a}+{b})")


@given(st.integers(1, 200), st.integers(1, 40))
def test_few_sums_of_slots_that_are_dealt_out_wait_for_others(num_slots: int, workers: int) -> None:
    """Once all workers have ended one, those that have fewer a pass later."""
    hands = dealt(num_slots, workers)
    assert sorted(slot for hand in hands for slot in hand) == list(range(num_slots))
    passes = max(map(len, hands))
    result = TreeSum[int](num_slots, lambda a, b: a + b)
    for number in range(passes):
        for hand in hands:
            if (own := number - passes + len(hand)) >= 0:
                result.put(hand[own], 1)
        assert len(result) <= 1 + num_slots.bit_length()
    assert result.total(lambda: 0) == num_slots


def test_dealt_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="dealt needs"):
        dealt(3, 0)


def test_the_tree_of_eight_and_of_five() -> None:
    assert written(8, 3) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert written(5, 2) == "(((0+1)+(2+3))+4)"


@given(st.integers(1, 200), st.data())
def test_subtrees_tile_their_run_and_stay_few(num_slots: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, num_slots - 1))
    stop = data.draw(st.integers(start + 1, num_slots))
    nodes = subtrees(range(start, stop), num_slots)
    assert [slot for node in nodes for slot in node] == list(range(start, stop))
    assert len(nodes) <= 2 * max(1, (num_slots - 1).bit_length())


def test_a_missing_part_is_an_error() -> None:
    with pytest.raises(ValueError, match="no value for slot 1"):
        tree_sum([(range(1), 1), (range(2, 4), 2)], 4, lambda a, b: a + b)
