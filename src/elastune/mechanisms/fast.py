"""Data parallelism at full speed: torch's DistributedDataParallel, with shares weighted so that the mean is global."""

from __future__ import annotations

import time
import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastune.comm.group import Group, Work
from elastune.core.errors import UserError
from elastune.core.shares import Share
from elastune.mechanisms.base import Replica, flatten, float_buffers, unflatten

VOTE_EVERY_S = 0.5
MOST_STEPS = 50  # a pause (a long evaluation) must not hide that steps became slow


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
                # broadcast_buffers was renamed in torch 2.13; the old name serves all versions.
                warnings.simplefilter("ignore", FutureWarning)
                self._ddp = DistributedDataParallel(module, device_ids=ids, broadcast_buffers=False)
            self.model = self._ddp
        self._votes = torch.zeros(2, device=group.wire)
        self._steps_to_vote = 0
        self._steps_since_vote = 0
        self._voted_at = time.perf_counter()

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
        vote = self._start_vote()
        scaled.backward()
        self._refuse_unused()
        started = time.perf_counter()
        self._end_vote(vote)
        self.wait_s = time.perf_counter() - started

    def _start_vote(self) -> Work:
        """DDP's reduction carries gradients only, so the wish to stop travels beside it, but not at every step."""
        self.stop_votes = self.stop if self.group.size == 1 else 0.0
        self._steps_since_vote += 1
        if self.group.size == 1 or self._steps_to_vote > 0:
            self._steps_to_vote -= 1
            return None
        now = time.perf_counter()
        self._votes[0], self._votes[1] = self.stop, (now - self._voted_at) / self._steps_since_vote
        self._voted_at, self._steps_since_vote = now, 0
        return self.group.all_reduce(self._votes)

    def _end_vote(self, vote: Work) -> None:
        if vote is not None:
            vote.wait()
            self.stop_votes, step_s = self._votes.tolist()
            # All workers read the same sum, so all vote again at the same step.
            self._steps_to_vote = min(MOST_STEPS, int(VOTE_EVERY_S * self.group.size / max(step_s, 1e-9)))

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
