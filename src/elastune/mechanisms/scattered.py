"""Tensors of a run's state that are not whole here: lying with several workers, or in files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from elastune.core.layout import intersection
from elastune.core.stretches import Stretch, whole_stretch


@dataclass(frozen=True)
class Scattered:
    """The tensor ``name`` of ``shape``, of which this worker has ``pieces`` to write: stretches with flat values.

    What has the same name is the same tensor (tied weights).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Stretch, torch.Tensor], ...]


class Stored(Protocol):
    """A tensor that lies elsewhere and is read in parts."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, stretch: Stretch) -> torch.Tensor:
        """The flat values of a stretch of it, in memory of their own."""
        ...


def elements(value: torch.Tensor | Stored, stretch: Stretch) -> torch.Tensor:
    """The flat values of a stretch of ``value``; of a tensor that is here perhaps a view.

    Raises:
        ValueError: Where ``value`` is no tensor that has them.
    """
    shape = tuple(value.shape)
    if len(shape) != len(stretch.box) or any(stop > size for (_, stop), size in zip(stretch.box, shape, strict=True)):
        raise ValueError(f"a part {stretch.box} of a tensor of shape {shape}")
    if not isinstance(value, torch.Tensor):
        return value.read(stretch)
    return value.detach()[tuple(slice(*edge) for edge in stretch.box)].reshape(-1)[stretch.start : stretch.stop]


def whole(value: torch.Tensor | Stored) -> torch.Tensor:
    """All of ``value``, in its shape."""
    if isinstance(value, torch.Tensor):
        return value
    return value.read(whole_stretch(value.shape)).view(value.shape)


def copy_common(to: Stretch, into: torch.Tensor, source: Stretch, values: torch.Tensor) -> None:
    """Copy what two stretches of one tensor have in common: out of the flat ``values`` of one ``into`` the other's."""
    if to.box == source.box:
        start, stop = max(to.start, source.start), min(to.stop, source.stop)
        if start < stop:
            into[start - to.start : stop - to.start] = values[start - source.start : stop - source.start]
        return
    for box, at in source.boxes:
        theirs = values[at : at + _size(box)].view(_shape(box))
        for own, place in to.boxes:
            common = intersection(own, box)
            if common is not None:
                room = into[place : place + _size(own)].view(_shape(own))
                room[_inside(common, own)] = theirs[_inside(common, box)]


def _shape(box: Sequence[tuple[int, int]]) -> list[int]:
    return [stop - start for start, stop in box]


def _size(box: Sequence[tuple[int, int]]) -> int:
    return prod(_shape(box))


def _inside(box: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))
