"""Reference answers on layouts for the kits: which boxes must move from one layout to another, and who holds each.

Mechanisms move their state by plans of their own, along the axes of a mesh. The kits compare them with these answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastune.core.layout import Box, Layout, Piece, Unrecoverable, intersection, volume, without


@dataclass(frozen=True)
class Move:
    """``source`` sends ``piece`` to ``target``."""

    piece: Piece
    source: int
    target: int


def whole(name: str, shape: Sequence[int]) -> Piece:
    """All of a tensor."""
    return Piece(name, tuple((0, size) for size in shape))


def moves(have: Layout, want: Layout) -> list[Move]:
    """Return the moves from ``have`` to ``want``; the plan is equal on every worker.

    Elements that a worker holds stay there. Every other element comes to it once, from the owner that has sent least so
    far. Raises ``Unrecoverable`` if no worker holds an element.
    """
    owners = _owners(have)
    sent = dict.fromkeys(have, 0)
    plan: list[Move] = []
    lost: list[Piece] = []
    for target in sorted(want):
        present: dict[str, list[Box]] = {}
        for piece in have.get(target, ()):
            present.setdefault(piece.name, []).append(piece.box)
        for piece in want[target]:
            boxes = present.setdefault(piece.name, [])
            for missing in without([piece.box], boxes):
                fetched, absent = _fetch(Piece(piece.name, missing), target, owners.get(piece.name, ()), sent)
                plan += fetched
                lost += absent
            boxes.append(piece.box)
    if lost:
        raise Unrecoverable(lost)
    return plan


def _fetch(
    piece: Piece, target: int, owners: Sequence[tuple[int, Box]], sent: dict[int, int]
) -> tuple[list[Move], list[Piece]]:
    """Moves that bring ``piece`` to ``target``, and the parts of it that no worker holds."""
    plan: list[Move] = []
    left = [piece.box]
    # A stable sort: of equally busy holders the first comes first, on every worker.
    for source, owned in sorted(owners, key=lambda owner: sent[owner[0]]):
        for box in left:
            if (part := intersection(box, owned)) is not None:
                plan.append(Move(Piece(piece.name, part), source, target))
                sent[source] += volume(part)
        left = without(left, [owned])
    return plan, [Piece(piece.name, box) for box in left]


def redundancy(layout: Layout) -> int:
    """Return the smallest number of workers that hold any one element; 0 for an empty layout.

    With 2 or more, the loss of one worker loses no element.
    """
    least: list[int] = []
    for boxes in _owners(layout).values():
        counted: list[tuple[Box, set[int]]] = []  # disjoint boxes, each with its holders
        for worker, box in boxes:
            new = without([box], [other for other, _ in counted])
            split: list[tuple[Box, set[int]]] = []
            for other, workers in counted:
                if (part := intersection(other, box)) is not None:
                    split.append((part, workers | {worker}))
                split += [(rest, workers) for rest in without([other], [box])]
            counted = split + [(rest, {worker}) for rest in new]
        least += [len(workers) for _, workers in counted]
    return min(least, default=0)


def _owners(layout: Layout) -> dict[str, list[tuple[int, Box]]]:
    """The (worker, box) pairs of each tensor, in order of workers."""
    boxes: dict[str, list[tuple[int, Box]]] = {}
    for worker in sorted(layout):
        for piece in layout[worker]:
            boxes.setdefault(piece.name, []).append((worker, piece.box))
    return boxes
