"""Rows of numbers as fewer bytes, and back. Pure; not finite numbers come back as such, never as others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

BLOCK = 256
"""Numbers that share a scale."""


class Codec(ABC):
    """How rows of float32 travel. What is decoded is a function of the bytes alone: equal on every worker."""

    multiple: int = 1
    """Rows have a multiple of so many numbers."""

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Each row as bytes: uint8, one row a row."""

    @abstractmethod
    def decode(self, data: torch.Tensor) -> torch.Tensor:
        """The rows that these bytes stand for, as float32."""


@dataclass(frozen=True)
class Half(Codec):
    """As numbers of a type of two bytes."""

    dtype: torch.dtype

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(self.dtype).float()


@dataclass(frozen=True)
class Blocks(Codec):
    """As one signed byte a number, times the scale of its block: the largest of its absolute values over 127.

    What comes back is off by half a scale at most. A block with a number that is not finite comes back as NaN.
    """

    multiple: int = BLOCK

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        blocks = rows.float().unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(2, keepdim=True) / 127
        steps = torch.where(scales > 0, blocks / scales, 0.0)
        finite = torch.nan_to_num(steps, 0.0, 0.0, 0.0)  # the scale tells of what is not
        bytes_ = finite.round().clamp(-127, 127).to(torch.int8).flatten(1)
        return torch.cat([scales.flatten(1).contiguous().view(torch.uint8), bytes_.view(torch.uint8)], 1)

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        count = data.shape[1] // (BLOCK + 4)
        scales = data[:, : 4 * count].flatten().view(torch.float32).view(len(data), count)
        blocks = data[:, 4 * count :].contiguous().view(torch.int8).float().unflatten(1, (count, BLOCK))
        found: torch.Tensor = blocks * torch.where(scales.isfinite(), scales, torch.nan).unsqueeze(2)
        return found.flatten(1)
