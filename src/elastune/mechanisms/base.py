"""The contract of a mechanism: how one replica lies on devices and how its gradients come to be summed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import nn

from elastune.comm.group import Group
from elastune.core.errors import UserError
from elastune.core.shares import Share


class Replica(ABC):
    """One worker's copy of the model.

    A step is one or more shares; for each: ``begin``, the user's forward pass through ``model``, ``backward``. Between
    the shares of a step no parameter has a gradient, so that whatever the user does with gradients there (clip, step,
    zero) does nothing; after the last share the gradients are those of the mean loss over the global batch.

    ``stop`` (set by the session before a step) is 1.0 where this worker wants training to stop; ``stop_votes`` is the
    sum over workers, known to all after the step. ``wait_s`` is the time the last step waited for the reduction.
    """

    def __init__(self, module: nn.Module, group: Group) -> None:
        self.module = module
        self.model: nn.Module = module
        self.group = group
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.stop = 0.0
        self.stop_votes = 0.0
        self.wait_s = 0.0
        self._held: list[torch.Tensor | None] | None = None

    @abstractmethod
    def begin(self, share: Share, *, starts_step: bool) -> None:
        """Prepare for the forward pass of ``share``."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, share: Share) -> None:
        """Add the gradient of ``loss``, the mean over the share's samples; after the step's last share, reduce."""

    @abstractmethod
    def settle(self) -> None:
        """Make buffers equal on all workers, where steps do not already; called before they are evaluated or saved."""

    def _hide_gradients(self) -> None:
        self._held = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None

    def _restore_gradients(self) -> None:
        """Bring back what an earlier share of the same sum left."""
        if self._held is not None:
            for p, grad in zip(self.params, self._held, strict=True):
                p.grad = grad
            self._held = None

    def _refuse_leftovers(self) -> None:
        if any(p.grad is not None for p in self.params):
            raise UserError(
                "gradients must be cleared before session.backward",
                "gradients of an earlier step",
                "call optimizer.zero_grad() once in the loop (to accumulate, use --micro-batch)",
            )


def float_buffers(module: nn.Module) -> list[torch.Tensor]:
    """The buffers that training may average (BatchNorm's running statistics), in a fixed order."""
    return [b for b in module.buffers() if b.is_floating_point()]


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One flat float64 CPU vector of all values."""
    return torch.cat([t.detach().double().cpu().reshape(-1) for t in tensors])


def unflatten(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Write what ``flatten`` made back into ``tensors``."""
    at = 0
    for t in tensors:
        t.copy_(flat[at : at + t.numel()].view(t.shape))
        at += t.numel()
