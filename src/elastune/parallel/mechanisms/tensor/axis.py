"""The tensor axis: a fixed number of virtual blocks, a run of them on each worker, and their collectives.

A divided layer is ``count`` blocks, whatever workers exist, as a global batch is slots. Each block is computed by
itself, and sums over blocks follow the canonical tree, so bits do not show how many workers the axis has.
What is not divided is computed by every worker of the axis, with equal bits, and so is its gradient. Hence each
direction is the other's derivative: shared / summed and parted / joined. Megatron-LM's f and g (Shoeybi et al.
2019) are the first two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from elastune.core.errors import UserError
from elastune.core.slots import Fold, cut, subtrees, tree_sum
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.parallel.mechanisms.guards import ProcessLocal
from elastune.parallel.mechanisms.model_parallel import FailureHooks

# [axis] The tensor axis: a fixed number of virtual blocks, of which each worker has a run, and what brings blocks together.
#
# A layer that is divided is ``count`` blocks, whatever workers exist, as a global batch is slots: each block is computed
# by itself, and sums over blocks follow the canonical tree: bits do not show how many workers there are along the axis.

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
_HEAD = 11  # a dtype, a kind of call, the number of dimensions, and up to eight


@dataclass(frozen=True)
class Form:
    """What a tensor is before its values: dtype and shape."""

    dtype: torch.dtype
    shape: torch.Size


class BlockAxis(ProcessLocal):
    """This worker's place along the tensor axis, read anew by every pass.

    Args:
        count: virtual blocks.
        exact: sums follow the canonical tree; else the backend's own order.

    Attributes:
        own: the blocks that this worker computes.
        divided_s: seconds spent inside of what is divided, between a tensor's way into blocks and out of them.
        traffic_bytes: bytes that this worker has sent to others for sums and gathers.
        computes: whether the model's forward pass runs at this moment.
        failed: why what forward passes bring is of no use any more, until ``enter``.
        rescue: see ``ModelParallel``.
    """

    def __init__(self, count: int, *, exact: bool) -> None:
        self.count = count
        self.exact = exact
        self.divided_s = 0.0
        self.traffic_bytes = 0
        self.computes = False
        self.failed: GroupBroken | None = None
        self.failure_hooks = FailureHooks()
        self._since: float | None = None
        self._back_since = 0.0
        self.enter(Group())

    def enter(self, group: Group) -> None:
        """From here on the blocks lie on the workers of ``group``, in order of rank."""
        if group.size > self.count:
            raise ValueError(f"{self.count} blocks on {group.size} workers")
        self.group = group
        self._runs = cut(self.count, group.size)
        self.own = self._runs[group.rank]
        self.failed = None
        self._since = None

    # -- together -----------------------------------------------------------------------------------------------------

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over all blocks, contiguous, on every worker; ``parts``: the own ones, in order, of one shape."""
        fold: Fold[torch.Tensor] = Fold(self.own, self.count, torch.add)
        for block, part in zip(self.own, parts, strict=True):
            fold.push(block, part.contiguous())
        mine = [value for _, value in fold.parts]
        if self.group.size == 1:
            return mine[0]
        if not self.exact:
            return self._sum_in_any_order(mine)
        return self._sum_in_order(mine)

    def _sum_in_any_order(self, mine: list[torch.Tensor]) -> torch.Tensor:
        total = mine[0].clone() if len(mine) == 1 else torch.stack(mine).sum(0)
        wire = total.to(self.group.wire)
        self.group.all_reduce(wire).wait()
        self.traffic_bytes += 2 * _bytes(wire) * (self.group.size - 1) // self.group.size
        return wire.to(total.device)

    def _sum_in_order(self, mine: list[torch.Tensor]) -> torch.Tensor:
        """Chunk c of every worker's subtree sums goes to worker c, which adds in tree order and sends it to all."""
        group, size = self.group, self.group.size
        nodes = [node for run in self._runs for node in subtrees(run, self.count)]
        subtrees_of = [len(subtrees(run, self.count)) for run in self._runs]
        numel, shape, device = mine[0].numel(), mine[0].shape, mine[0].device
        chunk = -(-numel // size)
        sent = mine[0].new_zeros(size, len(mine), chunk, device=group.wire)
        for i, value in enumerate(mine):
            flat = value.reshape(-1)
            for c in range(size):
                piece = flat[c * chunk : (c + 1) * chunk]
                sent[c, i, : piece.numel()].copy_(piece)
        got = sent.new_empty(len(nodes), chunk)
        counts = [count * chunk for count in subtrees_of]
        group.all_to_all(got.view(-1), sent.view(-1), counts, [len(mine) * chunk] * size).wait()
        total = tree_sum(list(zip(nodes, got.unbind(0), strict=True)), self.count, torch.add)
        out = got.new_empty(size * chunk)
        group.all_gather(out, total).wait()
        self.traffic_bytes += (size - 1) * (len(mine) + 1) * _bytes(total)
        return out[:numel].view(shape).to(device)

    def join(self, parts: Sequence[torch.Tensor], sizes: Sequence[int], dim: int) -> torch.Tensor:
        """All blocks side by side along ``dim``, contiguous, on every worker; ``sizes``: of all blocks along it."""
        mine = torch.cat(list(parts), dim)
        if self.group.size == 1:
            return mine.contiguous()
        group = self.group
        first = mine.movedim(dim, 0)
        row = first[0].numel() if len(first) else 0
        lengths = [sum(sizes[run.start : run.stop]) * row for run in self._runs]
        flat = first.to(group.wire).contiguous().view(-1)
        out = flat.new_empty(sum(lengths))
        group.all_to_all(out, flat.repeat(group.size), lengths, [flat.numel()] * group.size).wait()
        self.traffic_bytes += (group.size - 1) * _bytes(flat)
        return out.view(sum(sizes), *first.shape[1:]).movedim(0, dim).contiguous().to(mine.device)

    def parts(self, whole: torch.Tensor, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
        """The own blocks of ``whole`` along ``dim``, each with a storage of its own: bits may depend on alignment."""
        starts = [sum(sizes[:block]) for block in self.own]
        return [
            whole.narrow(dim, start, sizes[block]).clone(memory_format=torch.contiguous_format)
            for block, start in zip(self.own, starts, strict=True)
        ]

    # -- what workers have that run slots of their own ----------------------------------------------------------------

    def forms(self, own: torch.Tensor | None, kind: int) -> tuple[list[Form | None], list[int]]:
        """By rank: of what form the tensor is that each worker is about to ``swap`` first; None: it has none. And what
        each says of the call that it is for, a number (``kind``).
        """
        if self.group.size == 1:
            return [None if own is None else Form(own.dtype, own.shape)], [kind]
        head = torch.full((_HEAD,), -1, dtype=torch.int64)
        head[1] = kind
        if own is not None:
            if own.dim() > _HEAD - 3 or own.dtype not in _DTYPES:
                told = f"{own.dtype}, {own.dim()} dimensions"
                raise UserError("divided layers are given a tensor of numbers", told, "leave them out of the plan")
            head[: 3 + own.dim()] = torch.tensor([_DTYPES.index(own.dtype), kind, own.dim(), *own.shape])
        heads = torch.empty(self.group.size * _HEAD, dtype=torch.int64, device=self.group.wire)
        self.group.all_gather(heads, head.to(self.group.wire)).wait()
        rows = heads.view(self.group.size, _HEAD).tolist()
        forms = [
            None if dtype < 0 else Form(_DTYPES[dtype], torch.Size(sizes[:dims])) for dtype, _, dims, *sizes in rows
        ]
        return forms, [row[1] for row in rows]

    def swap(self, own: Sequence[torch.Tensor], shapes: Sequence[Sequence[torch.Size]]) -> list[list[torch.Tensor]]:
        """By rank: what every worker gives, each tensor contiguous and with a storage of its own.

        ``shapes``: of what each worker gives, by rank; as many tensors everywhere, and of the same dtypes.
        """
        if self.group.size == 1:
            return [[each.detach().clone(memory_format=torch.contiguous_format) for each in own]]
        group = self.group
        flat = torch.cat([each.detach().reshape(-1).view(torch.uint8).to(group.wire) for each in own])
        sizes = [[shape.numel() * each.element_size() for shape, each in zip(row, own, strict=True)] for row in shapes]
        totals = list(map(sum, sizes))
        out = flat.new_empty(sum(totals))
        if len(set(totals)) == 1:
            group.all_gather(out, flat).wait()
        else:
            group.all_to_all(out, flat.repeat(group.size), totals, [len(flat)] * group.size).wait()
        self.traffic_bytes += (group.size - 1) * _bytes(flat)
        return [
            [
                piece.to(each.device, copy=True).view(each.dtype).view(shape)
                for piece, each, shape in zip(part.split(lengths), own, row, strict=True)
            ]
            for part, lengths, row in zip(out.split(totals), sizes, shapes, strict=True)
        ]

    # -- in the user's forward pass, which runs to its end; ``failed`` is told behind it ------------------------------

    def sum_forward(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """As ``sum``; zeros where the group broke, or the step is lost."""
        try:
            if self.failed is None and not self.failure_hooks.step_lost():
                return self.sum(parts)
        except GroupBroken as error:
            self.failed = error
        return torch.zeros_like(parts[0])

    def join_forward(self, parts: Sequence[torch.Tensor], sizes: Sequence[int], dim: int) -> torch.Tensor:
        """As ``join``; zeros where the group broke, or the step is lost."""
        try:
            if self.failed is None and not self.failure_hooks.step_lost():
                return self.join(parts, sizes, dim)
        except GroupBroken as error:
            self.failed = error
        shape = list(parts[0].shape)
        shape[dim] = sum(sizes)
        return parts[0].new_zeros(shape)

    # -- how long -----------------------------------------------------------------------------------------------------

    def goes_in(self) -> None:
        """A tensor goes into blocks."""
        if self._since is None:
            self._since = time.perf_counter()

    def comes_out(self) -> None:
        """A tensor comes out of blocks."""
        if self._since is not None:
            self.divided_s += time.perf_counter() - self._since
            self._since = None

    @contextmanager
    def back_into(self) -> Iterator[None]:
        """In a backward pass: a gradient goes into blocks. What lies between this and ``back_out`` is divided."""
        self._back_since = time.perf_counter()
        yield

    @contextmanager
    def back_out(self) -> Iterator[None]:
        """In a backward pass: the blocks' gradients come together; of several times in a row each adds what it took."""
        yield
        now = time.perf_counter()
        self.divided_s += now - self._back_since
        self._back_since = now


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# [passing] Into blocks and out of them, forwards and backwards.
#
# What is not divided is computed by every worker of the axis, with equal bits; so is its gradient. Hence each way has
# another as its derivative: shared / summed (one tensor used by all blocks; the blocks' partial sums added up), and
# parted / joined (a tensor cut into blocks; blocks side by side). Megatron-LM's f and g (Shoeybi et al. 2019) are the
# first two.


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
