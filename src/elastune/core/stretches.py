"""Stretches: runs of a box's elements in C order, and the boxes that they fill.

Sharded state is cut flat; where it lies in a tensor as plain PyTorch has it is what a checkpoint tells, so that it can
be read by workers that cut it otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from elastune.core.layout import Box, volume, without


@dataclass(frozen=True)
class Stretch:
    """Elements ``start`` to ``stop`` (exclusive) of the part ``box`` of a tensor, flattened in C order."""

    box: Box
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    @property
    def boxes(self) -> list[tuple[Box, int]]:
        """What it fills, as boxes of the tensor, each with the place of its first element in the stretch.

        Each box is contiguous in the stretch; of a box of n dimensions there are at most 2n - 1.
        """
        shape = [stop - start for start, stop in self.box]
        corner = [start for start, _ in self.box]
        found = []
        for local, at in _filled(shape, self.start, self.stop):
            moved = tuple((first + start, first + stop) for (start, stop), first in zip(local, corner, strict=True))
            found.append((moved, at - self.start))
        return found


def whole_stretch(shape: Sequence[int]) -> Stretch:
    """All of a tensor."""
    return Stretch(tuple((0, size) for size in shape), 0, prod(shape))


def fills(shape: Sequence[int], stretches: Iterable[Stretch]) -> bool:
    """Whether each element of a tensor of ``shape`` is in exactly one of ``stretches``."""
    boxes = [box for stretch in stretches for box, _ in stretch.boxes]
    goal = whole_stretch(shape)
    return sum(map(volume, boxes)) == goal.size and not without([goal.box], boxes)


def _filled(shape: Sequence[int], start: int, stop: int) -> list[tuple[Box, int]]:
    """Boxes of a tensor of ``shape``, each with the flat place of its first element."""
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [(((start, stop),) if shape else (), start)]
    row = prod(shape[1:])
    found: list[tuple[Box, int]] = []
    at = start
    while at < stop:
        first, inside = divmod(at, row)
        if inside or stop - at < row:  # a part of one row
            end = min(stop, (first + 1) * row)
            inner = _filled(shape[1:], inside, inside + end - at)
            found += [(((first, first + 1), *box), first * row + place) for box, place in inner]
        else:
            last = stop // row
            end = last * row
            found.append((((first, last), *((0, size) for size in shape[1:])), at))
        at = end
    return found
