"""Plans of moves, checked element by element."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastune.core.layout import Box, Layout, Piece, Unrecoverable, intersection, without
from elastune.testing.kits.mechanism import Move, moves, redundancy, whole

SHAPES = {"matrix": (5, 4), "vector": (6,), "scalar": ()}
Element = tuple[str, tuple[int, ...]]


def elements(piece: Piece) -> set[Element]:
    return {(piece.name, at) for at in product(*(range(start, stop) for start, stop in piece.box))}


def all_of(pieces: tuple[Piece, ...]) -> set[Element]:
    return {element for piece in pieces for element in elements(piece)}


def box_in(name: str) -> st.SearchStrategy[Box]:
    edges = [st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda e: (min(e), max(e))) for n in SHAPES[name]]
    return st.tuples(*edges)


pieces = st.sampled_from(sorted(SHAPES)).flatmap(lambda name: st.builds(Piece, st.just(name), box_in(name)))
layouts = st.dictionaries(st.integers(0, 4), st.lists(pieces, max_size=5).map(tuple), max_size=4)
WHOLE = tuple(whole(name, shape) for name, shape in SHAPES.items())


def held_after(have: Layout, plan: list[Move], worker: int) -> set[Element]:
    return all_of(have.get(worker, ())) | {x for m in plan if m.target == worker for x in elements(m.piece)}


@given(layouts, layouts)
@example({0: WHOLE}, {1: WHOLE})
def test_everything_that_is_missing_comes_once(have: Layout, want: Layout) -> None:
    held = {worker: all_of(own) for worker, own in have.items()}
    anywhere = set().union(*held.values())
    missing = {worker: all_of(own) - held.get(worker, set()) for worker, own in want.items()}
    try:
        plan = moves(have, want)
    except Unrecoverable as error:
        lost = all_of(error.pieces)
        assert lost == set().union(*missing.values()) - anywhere
        assert lost
        return
    assert set().union(*missing.values()) <= anywhere
    for worker, own in want.items():
        came = [element for move in plan if move.target == worker for element in elements(move.piece)]
        assert len(came) == len(set(came)), "an element comes once"
        assert set(came) == missing[worker], "what is there stays, and nothing comes that is not wanted"
        assert held_after(have, plan, worker) >= all_of(own)
    for move in plan:
        assert elements(move.piece) <= held[move.source]
        assert move.piece.size > 0
        assert move.target in want


@given(layouts, layouts)
def test_every_worker_finds_the_same_plan(have: Layout, want: Layout) -> None:
    def plan(have: Layout, want: Layout) -> object:
        try:
            return moves(have, want)
        except Unrecoverable as error:
            return error.pieces

    assert plan(have, want) == plan(dict(reversed(have.items())), dict(reversed(want.items())))


@given(st.integers(1, 4), st.integers(1, 8))
def test_joiners_are_served_evenly(owners: int, joiners: int) -> None:
    state = (whole("state", ()),)
    plan = moves(dict.fromkeys(range(owners), state), dict.fromkeys(range(owners, owners + joiners), state))
    sent = [sum(move.source == owner for move in plan) for owner in range(owners)]
    assert sum(sent) == joiners
    assert max(sent) - min(sent) <= 1


def test_a_reshape_moves_what_changes_its_place() -> None:
    """From two halves by rows to two halves by columns: each worker fetches a quarter."""
    rows = {i: (Piece("w", ((2 * i, 2 * i + 2), (0, 4))),) for i in range(2)}
    columns = {i: (Piece("w", ((0, 4), (2 * i, 2 * i + 2))),) for i in range(2)}
    assert moves(rows, columns) == [
        Move(Piece("w", ((2, 4), (0, 2))), source=1, target=0),
        Move(Piece("w", ((0, 2), (2, 4))), source=0, target=1),
    ]


def test_what_nobody_holds_is_named() -> None:
    have = {0: (Piece("w", ((0, 2), (0, 4))),)}
    with pytest.raises(Unrecoverable, match="no worker holds all of b, w") as error:
        moves(have, {1: (whole("w", (4, 4)), whole("b", (4,)))})
    assert error.value.pieces == (Piece("w", ((2, 4), (0, 4))), whole("b", (4,)))


@given(layouts)
@example({0: WHOLE, 1: WHOLE, 2: (Piece("vector", ((0, 3),)),)})
@example({0: (whole("vector", (6,)), whole("vector", (6,)))})
def test_redundancy_counts_the_holders_of_every_element(layout: Layout) -> None:
    held = {worker: all_of(own) for worker, own in layout.items()}
    counts = [sum(element in own for own in held.values()) for element in set().union(*held.values())]
    assert redundancy(layout) == min(counts, default=0)


@given(box_in("matrix"), st.lists(box_in("matrix"), max_size=4))
def test_what_is_left_of_a_box(box: Box, others: list[Box]) -> None:
    left = without([box], others)
    results = [element for rest in left for element in elements(Piece("m", rest))]
    assert len(results) == len(set(results))
    assert set(results) == all_of((Piece("m", box),)) - all_of(tuple(Piece("m", other) for other in others))
    for other in others:
        common = intersection(box, other)
        both = all_of((Piece("m", box),)) & all_of((Piece("m", other),))
        assert both == (set() if common is None else elements(Piece("m", common)))
