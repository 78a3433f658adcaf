"""Into blocks and out of them, forwards and backwards.

What is not divided is computed by every worker of the axis, with equal bits; so is its gradient. Hence each way has
another as its derivative: shared / summed (one tensor used by all blocks; the blocks' partial sums added up), and
parted / joined (a tensor cut into blocks; blocks side by side). Megatron-LM's f and g (Shoeybi et al. 2019) are the
first two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastune.mechanisms.tensor.axis import BlockAxis


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: BlockAxis, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        axis.goes_in()
        ctx.axis = axis
        return tuple(whole.view_as(whole) for _ in axis.own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        with ctx.axis.back_out():
            return None, ctx.axis.sum(gradients)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: BlockAxis, *parts: torch.Tensor) -> torch.Tensor:
        ctx.axis = axis
        total = axis.sum_forward(parts)
        axis.comes_out()
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        with ctx.axis.back_into():
            return None, *(gradients[0] for _ in ctx.axis.own)


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis: BlockAxis, sizes: tuple[int, ...], dim: int, whole: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        axis.goes_in()
        ctx.axis, ctx.sizes, ctx.dim = axis, sizes, dim
        return tuple(axis.parts(whole, sizes, dim))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        with ctx.axis.back_out():
            return None, None, None, ctx.axis.join(gradients, ctx.sizes, ctx.dim)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: BlockAxis, sizes: tuple[int, ...], dim: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.axis, ctx.sizes, ctx.dim = axis, sizes, dim
        whole = axis.join_forward(parts, sizes, dim)
        axis.comes_out()
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        with ctx.axis.back_into():
            return None, None, None, *ctx.axis.parts(gradients[0], ctx.sizes, ctx.dim)


def shared(axis: BlockAxis, whole: torch.Tensor) -> list[torch.Tensor]:
    """``whole``, once for each own block; its gradient is the sum over all blocks."""
    return list(_Share.apply(axis, whole))  # type: ignore[no-untyped-call]


def summed(axis: BlockAxis, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum over all blocks, on every worker."""
    total: torch.Tensor = _Sum.apply(axis, *parts)  # type: ignore[no-untyped-call]
    return total


def parted(axis: BlockAxis, whole: torch.Tensor, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
    """The own blocks of ``whole``."""
    return list(_Part.apply(axis, tuple(sizes), dim, whole))  # type: ignore[no-untyped-call]


def joined(axis: BlockAxis, parts: Sequence[torch.Tensor], sizes: Sequence[int], dim: int) -> torch.Tensor:
    """All blocks side by side, on every worker."""
    whole: torch.Tensor = _Join.apply(axis, tuple(sizes), dim, *parts)  # type: ignore[no-untyped-call]
    return whole
