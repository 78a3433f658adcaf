"""Rows of numbers as fewer bytes, and back. Pure; not finite numbers come back as such, never as others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

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
class ShorterHalf(Half):
    """As bfloat16, rounded towards zero: see ``ShorterFloat8``."""

    dtype: torch.dtype = torch.bfloat16

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return super().encode((rows.float().view(torch.int32) & -65_536).view(torch.float32))


@dataclass(frozen=True)
class Scaled(Codec):
    """As one byte a number or less, times the scale of its block: the largest of its absolute values over ``largest``.

    A block with a number that is not finite comes back as NaN.
    """

    multiple: int = BLOCK
    largest: ClassVar[float]
    block_bytes: ClassVar[int] = BLOCK
    shrinks: ClassVar[float] = 1.0

    @abstractmethod
    def _bytes(self, steps: torch.Tensor) -> torch.Tensor:
        """Numbers of up to ``largest``, block by block as ``block_bytes`` of whatever type."""

    @abstractmethod
    def _numbers(self, data: torch.Tensor) -> torch.Tensor:
        """What these bytes stand for, as float32."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        blocks = rows.float().unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(2, keepdim=True) * (1 / self.largest)  # a GPU would divide otherwise than a CPU
        steps = torch.where(scales > 0, blocks / scales, 0.0)
        finite = torch.nan_to_num(steps, 0.0, 0.0, 0.0)  # the scale tells of what is not
        bytes_ = self._bytes(finite.clamp(-self.largest, self.largest).flatten(1))
        sent = scales.flatten(1) * self.shrinks
        return torch.cat([sent.contiguous().view(torch.uint8), bytes_.view(torch.uint8)], 1)

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        count = data.shape[1] // (self.block_bytes + 4)
        scales = data[:, : 4 * count].flatten().view(torch.float32).view(len(data), count)
        blocks = self._numbers(data[:, 4 * count :].contiguous()).unflatten(1, (count, BLOCK))
        found: torch.Tensor = blocks * torch.where(scales.isfinite(), scales, torch.nan).unsqueeze(2)
        return found.flatten(1)


@dataclass(frozen=True)
class Blocks(Scaled):
    """As whole numbers of one signed byte. What comes back is off by half a scale at most."""

    largest: ClassVar[float] = 127.0

    def _bytes(self, steps: torch.Tensor) -> torch.Tensor:
        return steps.round().to(torch.int8)

    def _numbers(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(torch.int8).float()


@dataclass(frozen=True)
class HalfBytes(Scaled):
    """As whole numbers of half a byte, -7 to 7; the first half of a block in the low halves of its bytes."""

    largest: ClassVar[float] = 7.0
    block_bytes: ClassVar[int] = BLOCK // 2

    def _bytes(self, steps: torch.Tensor) -> torch.Tensor:
        low, high = (steps.round() + 8).to(torch.uint8).unflatten(1, (-1, 2, BLOCK // 2)).unbind(2)
        pairs: torch.Tensor = low + 16 * high
        return pairs.flatten(1)

    def _numbers(self, data: torch.Tensor) -> torch.Tensor:
        pairs = data.unflatten(1, (-1, 1, BLOCK // 2))
        return torch.cat([pairs % 16, pairs // 16], 2).flatten(1).float() - 8


@dataclass(frozen=True)
class ShorterFloat8(Scaled):
    """As floating-point numbers of one byte (e5m2: Micikevicius et al., arXiv 2209.05433), rounded towards zero.

    For the ways of numbers that must stay what they are, such as second moments, which span decades, are never negative
    and are divided by: what comes back is never larger than what was sent, so no number is taken past where it went.
    It is smaller by a fifth at most, where it is no less than a 900 millionth of the largest of its block, and by a
    millionth at least, so that sums and means may round.
    """

    largest: ClassVar[float] = 57_344.0
    shrinks: ClassVar[float] = 1 - 2e-6

    def _bytes(self, steps: torch.Tensor) -> torch.Tensor:
        nearest = steps.to(torch.float8_e5m2)
        over = nearest.float().abs() > steps.abs() * (1 + 5e-7)  # the largest of a block is to stay, however it rounded
        shorter: torch.Tensor = nearest.view(torch.uint8) - over.to(torch.uint8)  # the next one, of either sign
        return shorter

    def _numbers(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(torch.float8_e5m2).float()
