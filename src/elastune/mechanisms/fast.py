"""Data parallelism at full speed: torch's DistributedDataParallel, with shares weighted so that the mean is global."""

from __future__ import annotations

import time
import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastune.comm.group import Group
from elastune.core.errors import UserError
from elastune.core.shares import Share
from elastune.mechanisms.base import Replica, flatten, float_buffers, unflatten


class FastReplica(Replica):
    """A worker's slots run as one pass; equal to ``exact`` up to rounding for models without dropout or BatchNorm.

    Buffers: BatchNorm normalises over what the worker runs in one pass. Before evaluation and checkpoints, not at every
    step, floating-point buffers are averaged evenly over workers and others (counters) become those of rank 0.
    """

    def __init__(self, module: nn.Module, group: Group) -> None:
        super().__init__(module, group)
        self._ddp: DistributedDataParallel | None = None
        if group.size > 1:
            device = self.params[0].device
            ids = [device] if device.type == "cuda" else None
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", FutureWarning
                )  # renamed in torch 2.13, the old name serves all versions
                self._ddp = DistributedDataParallel(module, device_ids=ids, broadcast_buffers=False)
            self.model = self._ddp
        self._votes = torch.zeros(1, device=group.wire)

    def begin(self, share: Share, *, starts_step: bool) -> None:
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = share.ends_step

    def backward(self, loss: torch.Tensor, share: Share) -> None:
        self._refuse_leftovers()
        self._restore_gradients()
        # DDP divides the sum by the number of workers; the weights are already parts of the global batch.
        scaled = loss * (share.weight * self.group.size)
        if not share.ends_step:
            scaled.backward()
            self._hide_gradients()
            return
        self._votes.fill_(self.stop)
        vote = self.group.all_reduce(self._votes)
        scaled.backward()
        self._refuse_unused()
        started = time.perf_counter()
        if vote is not None:
            vote.wait()
        self.stop_votes = float(self._votes)
        self.wait_s = time.perf_counter() - started

    def _refuse_unused(self) -> None:
        """DDP would go on with gradients that are not reduced, and complain a step later."""
        if self._ddp is not None and any(p.grad is None for p in self.params):
            unused = [name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
            rule = "in fast mode every worker's pass must use every parameter"
            raise UserError(rule, f"{', '.join(unused[:3])} unused", "use --mode exact, or freeze what is not trained")

    def settle(self) -> None:
        if self.group.size > 1:
            for buffer in self.module.buffers():
                if not buffer.is_floating_point():
                    self.group.broadcast(buffer)
        buffers = float_buffers(self.module)
        if self.group.size > 1 and buffers:
            flat = flatten(buffers).to(self.group.wire)
            self.group.all_reduce(flat).wait()
            unflatten((flat / self.group.size).cpu(), buffers)
