"""Memory for what travels, used again: a library gives large blocks back to the system, and asking anew is slow."""

from __future__ import annotations

import torch


class Rooms:
    """Flat memory of one device. As much is kept as was in use at one time; what was given back goes out again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []  # bytes, from small to large

    def take(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for ``size`` elements of undefined values."""
        wanted = size * dtype.itemsize
        fitting = next((i for i, each in enumerate(self._free) if len(each) >= wanted), None)
        if fitting is not None:
            found = self._free.pop(fitting)
        else:
            if self._free:  # a larger one in its place
                self._free.pop()
            found = torch.empty(wanted, dtype=torch.uint8, device=self._device)
        return found[:wanted].view(dtype)

    def give(self, room: torch.Tensor) -> None:
        """``room``, which ``take`` has given, is used no more."""
        whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(room.untyped_storage())
        self._free.append(whole)
        self._free.sort(key=len)
