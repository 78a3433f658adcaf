"""Mixed precision around a model's forward pass: bf16 inside, fp32 out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elastune.train.compiling import unseen

_ENTERED: list[torch.autocast] = []
"""Of passes under way."""


class Autocast:
    """Runs every forward pass of ``model`` under bf16 autocast and returns its floating-point outputs as fp32.

    Weights, gradients and optimizer state stay fp32, as torch's automatic mixed precision has it.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._handles: list[RemovableHandle] = []
        self._unseen = False
        self.register()

    def register(self) -> None:
        """Again, where the program has compiled the model since: what enters and leaves is not to be compiled."""
        before, after = unseen(self._before), unseen(_after)
        if self._handles and self._unseen == (after is not _after):
            return
        self._unseen = after is not _after
        for handle in self._handles:
            handle.remove()
        model = self._model
        self._handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after, always_call=True)]

    def _before(self, _: nn.Module, __: Any) -> None:
        context = torch.autocast(self._device.type, dtype=torch.bfloat16)
        context.__enter__()
        _ENTERED.append(context)


def _after(_: nn.Module, __: Any, output: Any) -> Any:
    _ENTERED.pop().__exit__(None, None, None)
    return _to_fp32(output)


def leave_passes() -> None:
    """Passes that were under way were left for good: torch runs no hook where a ``BaseException`` comes through."""
    while _ENTERED:
        _ENTERED.pop().__exit__(None, None, None)


def _to_fp32(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype == torch.bfloat16 else output
    if isinstance(output, (list, tuple)):
        return type(output)(map(_to_fp32, output))
    if isinstance(output, dict):
        return {key: _to_fp32(value) for key, value in output.items()}
    return output
