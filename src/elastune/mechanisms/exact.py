"""Data parallelism with bit-exact sums: weights do not depend on how many workers there are, or were."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from elastune.comm.exact import ExactReducer
from elastune.comm.group import Group
from elastune.comm.reducer import Pair
from elastune.core.batch_slices import BatchSlice
from elastune.core.errors import UserError
from elastune.mechanisms.base import PART, Replica, float_buffers


class ExactReplica(Replica):
    """Every slot is run by itself, on the buffers of the step's start; sums follow the canonical tree.

    Buffers: each slot normalises (BatchNorm) over its own samples. Floating-point buffers move by the weighted mean
    over slots of what each slot's pass changed; others (counters) must not depend on data and move as in the step's
    first pass, since workers may need different numbers of passes.
    """

    drifts = False

    def __init__(
        self, module: nn.Module, group: Group, num_slots: int, control: int = 0, *, elastic: bool = False
    ) -> None:
        super().__init__(module, group, control)
        self._one_slot = num_slots == 1
        like = [self.params[i] for i in self._order] + float_buffers(module) + [self._tail]
        self._reducer: ExactReducer = ExactReducer(
            [t.detach() for t in like], num_slots, group, len(self.params), hold=elastic
        )
        self._counters: list[torch.Tensor] | None = None
        self._slot_weight = 0.0

    def begin(self, share: BatchSlice, *, starts_step: bool) -> None:
        super().begin(share, starts_step=starts_step)
        if starts_step:
            self._counters = None
            self._slot_weight = 0.0
        elif self._slot_weight == 0.0 and self._buffers:  # a new slot, not a further piece of one
            torch._foreach_copy_(self._buffers, self._start)

    def backward(self, loss: torch.Tensor, share: BatchSlice) -> None:
        self._refuse_leftovers()
        if self._counters is None:
            self._counters = [b.clone() for b in self._buffers if not b.is_floating_point()]
        self._slot_weight += share.weight
        if share.weight:
            self._slot_loss(loss, share)
        if share.ends_step:
            sums = self._reducer.finish()
            self.wait_s = self._reducer.wait_s
            self._apply(sums)

    def _slot_loss(self, loss: torch.Tensor, share: BatchSlice) -> None:
        pieces_are_parts = self._measures and self._one_slot
        if share.ends_slot:
            self._reducer.begin_slot(share.slot, last=share.ends_step)
        norms: Pair | None = None
        if pieces_are_parts:
            norms = self._backward_apart(loss, share.weight)
            self._seen.clear()
        elif share.ends_slot:
            self._restore_gradients()
            self._reduced_backward(loss, share.weight)
        else:
            self._restore_gradients()
            (loss * share.weight).backward()
        self._add_part(norms, loss, share.weight)
        if share.ends_slot:
            self._end_slot(share)
        else:
            self._hide_gradients()

    def _dense(self, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.is_sparse:
            raise UserError("exact mode sums dense gradients", "a sparse gradient", "use sparse=False or --mode fast")
        return gradient

    def _end_slot(self, share: BatchSlice) -> None:
        floats = [(b, s) for b, s in zip(self._buffers, self._start, strict=True) if b.is_floating_point()]
        moved = [(b.detach() - start) * self._slot_weight for b, start in floats]
        self._put_gradients()
        if self._measures and not self._one_slot:
            self._add_norms(self._reducer.slot_norms(), self._slot_weight)
        self._put_rest(moved, with_control=share.ends_step)
        self._slot_weight = 0.0
        self._part = [0.0] * len(PART)

    def _move_buffers(self, moved: Sequence[torch.Tensor]) -> None:
        moves, counters = iter(moved), iter(self._counters or ())
        for buffer, start in zip(self._buffers, self._start, strict=True):
            if buffer.is_floating_point():
                torch.add(start, next(moves), out=buffer)
            else:
                buffer.copy_(next(counters))
