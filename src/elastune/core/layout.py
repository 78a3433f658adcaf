"""Which worker holds which piece of a run's state, and what has to move where.

One plan serves every mechanism and every occasion: a joiner holds nothing yet, a reshape wants other boxes, a
checkpoint is one more holder, and a piece without a holder is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

Box = tuple[tuple[int, int], ...]
"""From (inclusive) and to (exclusive) in each dimension of a tensor; a scalar's box is ()."""


@dataclass(frozen=True)
class Piece:
    """The part ``box`` of the tensor ``name`` of the whole state."""

    name: str
    box: Box

    @property
    def size(self) -> int:
        """How many elements it has."""
        return volume(self.box)


Layout = Mapping[int, tuple[Piece, ...]]
"""What each worker holds."""


@dataclass(frozen=True)
class Move:
    """``source`` sends ``piece`` to ``target``."""

    piece: Piece
    source: int
    target: int


class CopiesDiffer(Exception):
    """Workers that must hold the same bits do not: whatever the run came to would be worth nothing."""


class Unrecoverable(Exception):
    """Nobody holds ``pieces``: all workers must go back to a checkpoint."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        names = sorted({piece.name for piece in pieces})
        super().__init__(f"nobody holds all of {', '.join(names)}")


def whole(name: str, shape: Sequence[int]) -> Piece:
    """All of a tensor."""
    return Piece(name, tuple((0, size) for size in shape))


def moves(have: Layout, want: Layout) -> list[Move]:
    """The way from ``have`` to ``want``: equal on every worker that asks.

    What a worker holds stays there. Every other element comes to it once, from the holder that has sent least so far.
    Raises ``Unrecoverable`` where nobody holds one.
    """
    holders = _holders(have)
    sent = dict.fromkeys(have, 0)
    plan: list[Move] = []
    lost: list[Piece] = []
    for target in sorted(want):
        there: dict[str, list[Box]] = {}
        for piece in have.get(target, ()):
            there.setdefault(piece.name, []).append(piece.box)
        for piece in want[target]:
            own = there.setdefault(piece.name, [])
            for missing in without([piece.box], own):
                fetched, absent = _fetch(Piece(piece.name, missing), target, holders.get(piece.name, ()), sent)
                plan += fetched
                lost += absent
            own.append(piece.box)
    if lost:
        raise Unrecoverable(lost)
    return plan


def _fetch(
    piece: Piece, target: int, holders: Sequence[tuple[int, Box]], sent: dict[int, int]
) -> tuple[list[Move], list[Piece]]:
    """Moves that bring ``piece`` to ``target``, and what of it nobody holds."""
    plan: list[Move] = []
    left = [piece.box]
    # A stable sort: of equally busy holders the first comes first, on every worker.
    for source, held in sorted(holders, key=lambda holder: sent[holder[0]]):
        for box in left:
            if (part := intersection(box, held)) is not None:
                plan.append(Move(Piece(piece.name, part), source, target))
                sent[source] += volume(part)
        left = without(left, [held])
    return plan, [Piece(piece.name, box) for box in left]


def redundancy(layout: Layout) -> int:
    """How many workers hold the element that fewest of them hold; 0 of an empty layout.

    With 2 or more, no death of one worker loses anything.
    """
    least: list[int] = []
    for held in _holders(layout).values():
        counted: list[tuple[Box, set[int]]] = []  # disjoint boxes, each with its holders
        for worker, box in held:
            new = without([box], [other for other, _ in counted])
            split: list[tuple[Box, set[int]]] = []
            for other, workers in counted:
                if (part := intersection(other, box)) is not None:
                    split.append((part, workers | {worker}))
                split += [(rest, workers) for rest in without([other], [box])]
            counted = split + [(rest, {worker}) for rest in new]
        least += [len(workers) for _, workers in counted]
    return min(least, default=0)


def intersection(a: Box, b: Box) -> Box | None:
    """What both boxes, of one tensor, have in common; None where that has no element."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def without(boxes: Iterable[Box], others: Iterable[Box]) -> list[Box]:
    """What is left of ``boxes`` once ``others`` are taken out: boxes that do not overlap where ``boxes`` do not."""
    left = [box for box in boxes if volume(box)]
    for other in others:
        left = [rest for box in left for rest in _cut_out(box, other)]
    return left


def volume(box: Box) -> int:
    """How many elements are in ``box``."""
    return prod(stop - start for start, stop in box)


def _cut_out(box: Box, other: Box) -> list[Box]:
    """``box`` without ``other``: what lies before and after it, dimension by dimension."""
    common = intersection(box, other)
    if common is None:
        return [box]
    found = []
    for i, ((start, stop), (first, last)) in enumerate(zip(box, common, strict=True)):
        for edge in ((start, first), (last, stop)):
            if edge[0] < edge[1]:
                found.append((*common[:i], edge, *box[i + 1 :]))
    return found


def _holders(layout: Layout) -> dict[str, list[tuple[int, Box]]]:
    """Who holds which boxes, by tensor, in order of workers."""
    found: dict[str, list[tuple[int, Box]]] = {}
    for worker in sorted(layout):
        for piece in layout[worker]:
            found.setdefault(piece.name, []).append((worker, piece.box))
    return found
