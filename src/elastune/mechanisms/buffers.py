"""A model's buffers in the course of a step: BatchNorm's running statistics, counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Buffers:
    """What a step's passes do to buffers, so that it can be averaged, or taken back.

    Where slots run apart, each begins on the buffers of the step's start; floating-point buffers then move by the
    weighted mean over slots of what each slot's passes changed. Others (counters) must not depend on data and move as
    in the step's first pass, since workers may need different numbers of passes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._all = list(module.buffers())
        self._start = [b.detach().clone() for b in self._all]
        self._counters: list[torch.Tensor] | None = None

    @property
    def floats(self) -> list[torch.Tensor]:
        """Those that training may average, in a fixed order."""
        return [b for b in self._all if b.is_floating_point()]

    def begin_step(self) -> None:
        """A step begins here."""
        self._counters = None
        if self._all:
            torch._foreach_copy_(self._start, self._all)

    def restore(self) -> None:
        """As they were at the step's start: for the next slot, or for good.

        Not noted by autograd: in a pipeline other slots' passes are under way, and their graphs stay good.
        """
        if self._all:
            torch._foreach_copy_([b.data for b in self._all], self._start)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever moves them inside (a part of the model that is run again, say) is taken back.

        Not noted by autograd: the graph of the pass that is under way stays good.
        """
        before = [b.detach().clone() for b in self._all]
        yield
        for buffer, value in zip(self._all, before, strict=True):
            buffer.data.copy_(value)

    def passed(self) -> None:
        """A forward pass has run; the step's first one decides on counters."""
        if self._counters is None:
            self._counters = [b.clone() for b in self._all if not b.is_floating_point()]

    def moves(self, weight: float) -> list[torch.Tensor]:
        """How far a slot's passes have moved the floating-point buffers, times the slot's ``weight``."""
        floats = [(b.detach(), s) for b, s in zip(self._all, self._start, strict=True) if b.is_floating_point()]
        if not floats:
            return []
        buffers, starts = map(list, zip(*floats, strict=True))
        return list(torch._foreach_mul(torch._foreach_sub(buffers, starts), weight))

    def move(self, moved: Sequence[torch.Tensor]) -> None:
        """From the step's start by ``moved``, the sums of ``moves`` over all slots."""
        starts = [s for b, s in zip(self._all, self._start, strict=True) if b.is_floating_point()]
        counters = [b for b in self._all if not b.is_floating_point()]
        if starts:
            torch._foreach_copy_(self.floats, torch._foreach_add(starts, list(moved)))
        if counters and self._counters:
            torch._foreach_copy_(counters, self._counters)


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One flat float64 CPU vector of all values."""
    return torch.cat([t.detach().double().cpu().reshape(-1) for t in tensors])


def unflatten(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Write what ``flatten`` made back into ``tensors``."""
    at = 0
    for t in tensors:
        t.copy_(flat[at : at + t.numel()].view(t.shape))
        at += t.numel()
