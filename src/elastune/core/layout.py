"""Which worker holds which piece of a run's state: boxes of tensors by name, and what is left of them."""

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


class CopiesDiffer(Exception):
    """Workers that must hold the same bits do not: whatever the run came to would be worth nothing."""


class Unrecoverable(Exception):
    """Nobody holds ``pieces``: all workers must go back to a checkpoint."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        names = sorted({piece.name for piece in pieces})
        super().__init__(f"nobody holds all of {', '.join(names)}")


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
