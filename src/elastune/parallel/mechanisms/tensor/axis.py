"""The tensor axis: a fixed number of virtual blocks, a run of them on each worker, and their collectives.

A divided layer consists of ``count`` blocks on any number of workers, as a global batch consists of slots. Each block
is computed separately, and sums over blocks follow the canonical tree. So bits do not depend on the number of workers.
Every worker of the axis computes everything that is not divided, with equal bits, and also its gradient.
So the four conversions between whole tensors and blocks are pairs of derivatives: ``shared`` (one tensor used by all
blocks) and ``summed`` (partial sums of the blocks); ``parted`` (a tensor cut into blocks) and ``joined`` (blocks side
by side). The first pair is f and g of Megatron-LM (Shoeybi et al. 2019).
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
from elastune.parallel.mechanisms.base import FailureHooks
from elastune.parallel.mechanisms.guards import ProcessLocal

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
_HEAD = 11  # numbers that describe a tensor: dtype, kind of call, number of dimensions, and up to eight sizes


@dataclass(frozen=True)
class Form:
    """The dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: torch.Size


class BlockAxis(ProcessLocal):
    """This worker's place along the tensor axis, and the collectives between its workers. Every pass reads it again.

    Args:
        count: The number of virtual blocks.
        exact: Sums follow the canonical tree; else the backend's own order.

    Attributes:
        own_blocks: The blocks that this worker computes.
        divided_s: Seconds spent in divided layers, from a tensor's entry into blocks to its exit.
        traffic_bytes: Bytes that this worker has sent to others for sums and gathers.
        computes: Whether the model's forward pass runs at this moment.
        failed: The error that makes results of forward passes invalid, until ``enter``.
        failure_hooks: See ``ModelParallel``.
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
        """Place the blocks on the workers of ``group``, in order of rank."""
        if group.size > self.count:
            raise ValueError(f"{self.count} blocks on {group.size} workers")
        self.group = group
        self._runs = cut(self.count, group.size)
        self.own_blocks = self._runs[group.rank]
        self.failed = None
        self._since = None

    # -- collectives --------------------------------------------------------------------------------------------------

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The contiguous sum over all blocks. ``parts``: this worker's blocks, in order, of one shape."""
        fold: Fold[torch.Tensor] = Fold(self.own_blocks, self.count, torch.add)
        for block, part in zip(self.own_blocks, parts, strict=True):
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
        """Send chunk c of all subtree sums to worker c, which adds in tree order and sends the sum to all."""
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
        received = sent.new_empty(len(nodes), chunk)
        counts = [count * chunk for count in subtrees_of]
        group.all_to_all(received.view(-1), sent.view(-1), counts, [len(mine) * chunk] * size).wait()
        total = tree_sum(list(zip(nodes, received.unbind(0), strict=True)), self.count, torch.add)
        out = received.new_empty(size * chunk)
        group.all_gather(out, total).wait()
        self.traffic_bytes += (size - 1) * (len(mine) + 1) * _bytes(total)
        return out[:numel].view(shape).to(device)

    def join(self, parts: Sequence[torch.Tensor], sizes: Sequence[int], dim: int) -> torch.Tensor:
        """All blocks side by side along ``dim``, contiguous. ``sizes``: of all blocks along ``dim``."""
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
        """This worker's blocks of ``whole``, each with its own storage: bits may depend on alignment."""
        starts = [sum(sizes[:block]) for block in self.own_blocks]
        return [
            whole.narrow(dim, start, sizes[block]).clone(memory_format=torch.contiguous_format)
            for block, start in zip(self.own_blocks, starts, strict=True)
        ]

    # -- exchange between workers that run slots of their own ---------------------------------------------------------

    def forms(self, tensor: torch.Tensor | None, kind: int) -> tuple[list[Form | None], list[int]]:
        """Exchange the forms of the tensors that workers are about to ``swap``.

        Args:
            tensor: This worker's first tensor; None: it has none.
            kind: A number that describes this worker's call.

        Returns:
            By rank: the form of each worker's tensor (or None), and its ``kind``.
        """
        if self.group.size == 1:
            return [None if tensor is None else Form(tensor.dtype, tensor.shape)], [kind]
        head = torch.full((_HEAD,), -1, dtype=torch.int64)
        head[1] = kind
        if tensor is not None:
            if tensor.dim() > _HEAD - 3 or tensor.dtype not in _DTYPES:
                described = f"{tensor.dtype}, {tensor.dim()} dimensions"
                raise UserError("divided layers are given a tensor of numbers", described, "leave them out of the plan")
            head[: 3 + tensor.dim()] = torch.tensor([_DTYPES.index(tensor.dtype), kind, tensor.dim(), *tensor.shape])
        heads = torch.empty(self.group.size * _HEAD, dtype=torch.int64, device=self.group.wire)
        self.group.all_gather(heads, head.to(self.group.wire)).wait()
        rows = heads.view(self.group.size, _HEAD).tolist()
        forms = [
            None if dtype < 0 else Form(_DTYPES[dtype], torch.Size(sizes[:dims])) for dtype, _, dims, *sizes in rows
        ]
        return forms, [row[1] for row in rows]

    def swap(self, tensors: Sequence[torch.Tensor], shapes: Sequence[Sequence[torch.Size]]) -> list[list[torch.Tensor]]:
        """Give this worker's tensors to all workers and return the tensors of every worker, by rank.

        Each tensor is contiguous and has its own storage. All workers give equally many tensors, of the same dtypes.
        ``shapes``: the shapes of each worker's tensors, by rank.
        """
        if self.group.size == 1:
            return [[each.detach().clone(memory_format=torch.contiguous_format) for each in tensors]]
        group = self.group
        flat = torch.cat([each.detach().reshape(-1).view(torch.uint8).to(group.wire) for each in tensors])
        sizes = [
            [shape.numel() * each.element_size() for shape, each in zip(row, tensors, strict=True)] for row in shapes
        ]
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
                for piece, each, shape in zip(part.split(lengths), tensors, row, strict=True)
            ]
            for part, lengths, row in zip(out.split(totals), sizes, shapes, strict=True)
        ]

    # -- in the user's forward pass, which runs to its end before ``failed`` is reported ------------------------------

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

    # -- time in divided layers ---------------------------------------------------------------------------------------

    def enter_blocks(self) -> None:
        """A tensor enters blocks: start the clock."""
        if self._since is None:
            self._since = time.perf_counter()

    def leave_blocks(self) -> None:
        """A tensor leaves blocks: stop the clock."""
        if self._since is not None:
            self.divided_s += time.perf_counter() - self._since
            self._since = None

    @contextmanager
    def backward_enters_blocks(self) -> Iterator[None]:
        """Context in a backward pass where a gradient enters blocks. It starts the clock."""
        self._back_since = time.perf_counter()
        yield

    @contextmanager
    def backward_leaves_blocks(self) -> Iterator[None]:
        """Context in a backward pass where the blocks' gradients come together. Each one in a row adds its own time."""
        yield
        now = time.perf_counter()
        self.divided_s += now - self._back_since
        self._back_since = now


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# --- into blocks and out of them, forward and backward ---


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: BlockAxis, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        axis.enter_blocks()
        ctx.axis = axis
        return tuple(whole.view_as(whole) for _ in axis.own_blocks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        with ctx.axis.backward_leaves_blocks():
            return None, ctx.axis.sum(gradients)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: BlockAxis, *parts: torch.Tensor) -> torch.Tensor:
        ctx.axis = axis
        total = axis.sum_forward(parts)
        axis.leave_blocks()
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        with ctx.axis.backward_enters_blocks():
            return None, *(gradients[0] for _ in ctx.axis.own_blocks)


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis: BlockAxis, sizes: tuple[int, ...], dim: int, whole: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        axis.enter_blocks()
        ctx.axis, ctx.sizes, ctx.dim = axis, sizes, dim
        return tuple(axis.parts(whole, sizes, dim))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        with ctx.axis.backward_leaves_blocks():
            return None, None, None, ctx.axis.join(gradients, ctx.sizes, ctx.dim)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: BlockAxis, sizes: tuple[int, ...], dim: int, *parts: torch.Tensor) -> torch.Tensor:
        ctx.axis, ctx.sizes, ctx.dim = axis, sizes, dim
        whole = axis.join_forward(parts, sizes, dim)
        axis.leave_blocks()
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        with ctx.axis.backward_enters_blocks():
            return None, None, None, *ctx.axis.parts(gradients[0], ctx.sizes, ctx.dim)


def shared(axis: BlockAxis, whole: torch.Tensor) -> list[torch.Tensor]:
    """``whole``, once for each of this worker's blocks. Its gradient is the sum over all blocks."""
    return list(_Share.apply(axis, whole))  # type: ignore[no-untyped-call]


def summed(axis: BlockAxis, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum over all blocks, on every worker. Each block gets the gradient of the sum."""
    total: torch.Tensor = _Sum.apply(axis, *parts)  # type: ignore[no-untyped-call]
    return total


def parted(axis: BlockAxis, whole: torch.Tensor, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
    """This worker's blocks of ``whole`` along ``dim``. Its gradient is that of all blocks, side by side."""
    return list(_Part.apply(axis, tuple(sizes), dim, whole))  # type: ignore[no-untyped-call]


def joined(axis: BlockAxis, parts: Sequence[torch.Tensor], sizes: Sequence[int], dim: int) -> torch.Tensor:
    """All blocks side by side along ``dim``, on every worker. Each block gets its part of the gradient."""
    whole: torch.Tensor = _Join.apply(axis, tuple(sizes), dim, *parts)  # type: ignore[no-untyped-call]
    return whole
