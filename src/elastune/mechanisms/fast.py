"""Data parallelism at full speed: a worker's slots run as one pass, and gradients are summed in the backend's order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from elastune.comm.flat import FlatReducer
from elastune.comm.group import Group
from elastune.core.shares import Share
from elastune.mechanisms.base import Replica


class FastReplica(Replica):
    """Equal to ``exact`` up to rounding for models without dropout or BatchNorm.

    What torch's DistributedDataParallel does, overlap included, but on a group that may change under it. (A DDP over a
    group of one with a hook that reduces could be had too; it rebuilds its buckets after the first backward pass in the
    order that this worker saw, which nobody would then compare with the order that others saw.)

    Buffers: BatchNorm normalises over what the worker runs in one pass, so buffers drift apart.
    """

    drifts = True

    def __init__(self, module: nn.Module, group: Group, *, elastic: bool = False) -> None:
        super().__init__(module, group)
        self._reducer: FlatReducer | None = None
        if elastic or group.size > 1:
            like = [self.params[i] for i in self._order] + [self._tail]
            self._reducer = FlatReducer([t.detach() for t in like], group, hold=elastic)

    def backward(self, loss: torch.Tensor, share: Share) -> None:
        self._refuse_leftovers()
        self._restore_gradients()
        if self._reducer is not None and self.group.size > 1 and share.ends_step:
            self._reduce(self._reducer, loss, share)
            return
        (loss * share.weight).backward()
        if not share.ends_step:
            self._hide_gradients()
        else:
            self.totals = list(self.control)

    def _reduce(self, reducer: FlatReducer, loss: torch.Tensor, share: Share) -> None:
        if share.weight:
            self._reduced_backward(loss, share.weight)
        else:
            self._seen.clear()
        self._put_rest((), with_control=share.weight > 0)
        sums = reducer.finish()
        self.wait_s = reducer.wait_s
        self._apply(sums)

    def _move_buffers(self, moved: Sequence[torch.Tensor]) -> None:
        """Each worker's move by themselves."""
