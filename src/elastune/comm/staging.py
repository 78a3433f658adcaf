"""A GPU's tensors on their way through the host's memory, where workers meet over gloo."""

from __future__ import annotations

import torch


def room(numel: int, dtype: torch.dtype, device: torch.device, comes_from: torch.device) -> torch.Tensor:
    """Zeros on ``device``; page-locked where a GPU copies to and from it: several times as fast, and asynchronous."""
    pinned = device.type == "cpu" and comes_from.type == "cuda"
    # Written to at once: the system gives memory at the first touch, which is not to fall into a step.
    return torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned).zero_()


class Crossing:
    """``data`` on its way to ``target``, on another device where they differ. Until ``wait`` it may not be there yet.

    A GPU goes on with what it was asked before, such as the backward pass, and copies when it has come to that.
    """

    def __init__(self, data: torch.Tensor, target: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        target.copy_(data, non_blocking=True)
        if data.device.type == "cuda" and target.is_pinned():
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(data.device))

    def wait(self) -> None:
        """Until all of it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()


def outbox(data: torch.Tensor, wire: torch.device) -> torch.Tensor:
    """Room on ``wire`` for ``data``. Never what an earlier step has sent: a library may still read that."""
    return torch.empty(data.shape, dtype=data.dtype, device=wire, pin_memory=data.is_cuda and wire.type == "cpu")
