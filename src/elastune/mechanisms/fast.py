"""Data parallelism at full speed: a worker's slots run as one pass, and gradients are summed in the backend's order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from elastune.comm.flat import FlatReducer
from elastune.comm.group import Group
from elastune.comm.reducer import Pair
from elastune.core.batch_slices import BatchSlice
from elastune.mechanisms.base import PART, Replica


class FastReplica(Replica):
    """Equal to ``exact`` up to rounding for models without dropout or BatchNorm.

    What torch's DistributedDataParallel does, overlap included, but on a group that may change under it. (A DDP over a
    group of one with a hook that reduces could be had too; it rebuilds its buckets after the first backward pass in the
    order that this worker saw, which nobody would then compare with the order that others saw.)

    Buffers: BatchNorm normalises over what the worker runs in one pass, so buffers drift apart.
    """

    drifts = True

    def __init__(self, module: nn.Module, group: Group, control: int = 0, *, elastic: bool = False) -> None:
        super().__init__(module, group, control)
        self._weight = 0.0
        self._reducer: FlatReducer | None = None
        if elastic or group.size > 1:
            like = [self.params[i] for i in self._order] + [self._tail]
            self._reducer = FlatReducer([t.detach() for t in like], group, len(self.params), hold=elastic)

    def begin(self, share: BatchSlice, *, starts_step: bool) -> None:
        super().begin(share, starts_step=starts_step)
        if starts_step:
            self._weight = 0.0

    def backward(self, loss: torch.Tensor, share: BatchSlice) -> None:
        self._refuse_leftovers()
        self._weight += share.weight
        if self._reducer is not None and self.group.size > 1:
            self._with_others(self._reducer, loss, share)
        else:
            self._alone(loss, share)

    def _alone(self, loss: torch.Tensor, share: BatchSlice) -> None:
        """Every share is a part of its own."""
        if share.weight == 1.0:  # an optimizer may evaluate the whole batch again and again
            self._part = [0.0] * len(PART)
        norms: Pair | None = None
        if self._measures:
            norms = self._backward_apart(loss, share.weight)
        else:
            self._restore_gradients()
            (loss * share.weight).backward()
        self._add_part(norms, loss, share.weight)
        if not share.ends_step:
            self._hide_gradients()
            return
        self.totals = list(self.control)
        if self.listened_to:
            self._find(self._part, self._norms_of_gradients() if self._measures else None)

    def _with_others(self, reducer: FlatReducer, loss: torch.Tensor, share: BatchSlice) -> None:
        """All that this worker runs in a step is one part."""
        self._restore_gradients()
        if share.weight:
            self._add_part(None, loss, share.weight)
        if not share.ends_step:
            (loss * share.weight).backward()
            self._hide_gradients()
            return
        if share.weight:
            self._reduced_backward(loss, share.weight)
        else:
            self._seen.clear()
        self._put_gradients()
        if self._measures and share.weight:
            self._add_norms(reducer.slot_norms(), self._weight)
        self._put_rest((), with_control=share.weight > 0)
        sums = reducer.finish()
        self.wait_s = reducer.wait_s
        self._apply(sums)

    def _move_buffers(self, moved: Sequence[torch.Tensor]) -> None:
        """Each worker's move by themselves."""
