"""Data parallelism with bit-exact sums: weights do not depend on how many workers there are, or were."""

from __future__ import annotations

import torch
from torch import nn

from elastune.comm.exact import ExactReducer
from elastune.comm.group import Group
from elastune.core.errors import UserError
from elastune.core.shares import Share
from elastune.mechanisms.base import Replica, float_buffers


class ExactReplica(Replica):
    """Every slot is run by itself, on the buffers of the step's start; sums follow the canonical tree.

    Buffers: each slot normalises (BatchNorm) over its own samples. Floating-point buffers move by the weighted mean
    over slots of what each slot's pass changed; others (counters) must not depend on data and move as in the step's
    first pass, since workers may need different numbers of passes.
    """

    def __init__(self, module: nn.Module, group: Group, num_slots: int) -> None:
        super().__init__(module, group)
        self._buffers = list(module.buffers())
        # Gradients come about in reverse order of definition; what is known last rides in the last bucket.
        self._order = list(reversed(range(len(self.params))))
        self._tail = torch.zeros(len(self.params) + 1, device=self.params[0].device)
        like = [self.params[i] for i in self._order] + float_buffers(module) + [self._tail]
        self._reducer = ExactReducer([t.detach() for t in like], num_slots, group)
        self._place = {i: place for place, i in enumerate(self._order)}
        self._seen: set[int] = set()
        self._collecting = False
        for i, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(lambda p, i=i: self._collect(i, p))

    def begin(self, share: Share, *, starts_step: bool) -> None:
        if starts_step:
            self._reducer.begin()
            self._start = [b.detach().clone() for b in self._buffers]
            self._counters: list[torch.Tensor] | None = None
            self._slot_weight = 0.0
        elif self._slot_weight == 0.0 and self._buffers:  # a new slot, not a further piece of one
            torch._foreach_copy_(self._buffers, self._start)

    def backward(self, loss: torch.Tensor, share: Share) -> None:
        self._refuse_leftovers()
        if self._counters is None:
            self._counters = [b.clone() for b in self._buffers if not b.is_floating_point()]
        self._slot_weight += share.weight
        if share.weight:
            self._restore_gradients()
            if share.ends_slot:
                self._reducer.begin_slot(share.slot, last=share.ends_step)
                self._seen.clear()
            self._collecting = share.ends_slot
            try:
                (loss * share.weight).backward()
            finally:
                self._collecting = False
            if share.ends_slot:
                self._end_slot()
            else:
                self._hide_gradients()
        if share.ends_step:
            self._finish_step()

    def _collect(self, i: int, p: torch.Tensor) -> None:
        """Take a finished gradient to the reducer while the backward pass goes on."""
        if not self._collecting:
            return
        assert p.grad is not None
        if p.grad.is_sparse:
            raise UserError("exact mode sums dense gradients", "a sparse gradient", "use sparse=False or --mode fast")
        if i in self._seen:
            rule = "exact mode needs a parameter's whole gradient at once"
            raise UserError(rule, "a second part of one", "use checkpoint(..., use_reentrant=False) or --mode fast")
        self._seen.add(i)
        self._reducer.put(self._place[i], p.grad)
        p.grad = None

    def _end_slot(self) -> None:
        """What the backward pass did not bring: unused parameters, buffers, and the tail of flags."""
        self._tail.zero_()
        for i in self._order:
            if i not in self._seen:
                p = self.params[i]
                self._reducer.put(self._place[i], p.grad)
                if p.grad is not None:
                    self._seen.add(i)
                p.grad = None
        used = sorted(self._seen)
        if len(used) == len(self.params):
            self._tail[:-1] = 1.0
        else:
            self._tail[used] = 1.0
        self._tail[-1] = self.stop
        at = len(self.params)
        floats = [(b, s) for b, s in zip(self._buffers, self._start, strict=True) if b.is_floating_point()]
        for j, (buffer, start) in enumerate(floats):
            self._reducer.put(at + j, (buffer.detach() - start) * self._slot_weight)
        self._reducer.put(at + len(floats), self._tail)
        self._slot_weight = 0.0

    def _finish_step(self) -> None:
        sums = self._reducer.finish()
        self.wait_s = self._reducer.wait_s
        *used, self.stop_votes = sums[-1].tolist()
        for i, p in enumerate(self.params):
            p.grad = sums[self._place[i]] if used[i] > 0 else None
        moved, counters = iter(sums[len(self.params) : -1]), iter(self._counters or ())
        for buffer, start in zip(self._buffers, self._start, strict=True):
            if buffer.is_floating_point():
                torch.add(start, next(moved), out=buffer)
            else:
                buffer.copy_(next(counters))

    def settle(self) -> None:
        """Nothing to do: every step leaves equal buffers everywhere."""
