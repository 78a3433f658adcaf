"""What a program's loss is over: a mean over samples, a sum, or a mean over a number of elements that varies.

A step sums the losses of its slices, each times its part of the global batch. That is the loss of the whole batch where
each loss is a mean over samples. ``as_mean`` turns a sum, or a mean over other elements, into such a mean. For means
over elements the sum over workers is then divided by the mean number of elements (``Sync.divide_by_counts``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from elastune.core.batch_slices import BatchSlice
from elastune.core.errors import UserError
from elastune.parallel.sync.base import Sync


@dataclass(frozen=True)
class LossKind:
    """What a program's loss is over.

    Attributes:
        sums: It is a sum over the samples.
        count: The number of elements that it is a mean over; None: it is a mean over samples.
    """

    sums: bool = False
    count: float | None = None


MEAN = LossKind()


def loss_kind(reduction: str, count: Any) -> LossKind:
    """The kind of a loss from the arguments of ``session.backward``. Raises ``UserError`` for other values."""
    if reduction not in ("mean", "sum"):
        fix = 'reduction="mean" or reduction="sum"'
        raise UserError("a loss is a mean or a sum over its batch", repr(reduction)[:40], fix)
    if count is None:
        return LossKind(sums=reduction == "sum")
    if reduction == "sum":
        rule, fix = "a sum has no count", "divide the loss by its count and pass count alone, or pass the sum alone"
        raise UserError(rule, 'reduction="sum" with count', fix)
    number = float(count) if isinstance(count, (int, float)) or getattr(count, "ndim", 1) == 0 else math.nan
    if not (number >= 0 and math.isfinite(number)):
        rule, fix = "count is the number of elements that the loss is a mean over", "such as count=mask.sum()"
        raise UserError(rule, repr(count)[:40], fix)
    return LossKind(count=number)


def as_mean(loss: torch.Tensor, part: BatchSlice, kind: LossKind, sync: Sync, *, more: bool = False) -> torch.Tensor:
    """The loss of ``kind`` as one whose mean over all slices of the global batch, by samples, is what is trained.

    A mean over elements is counted in the sums of the step; see ``Sync.divide_by_counts``. A slice that is a whole
    global batch needs no division: its loss stays as it is. A loss over no elements is zero, on any layout.

    Args:
        loss: The loss that the program gave.
        part: Its slice.
        kind: What it is over.
        sync: The strategy.
        more: Another loss of the slice follows.

    Raises:
        UserError: For a count where the strategy cannot divide by it, or where the slice has several losses.
    """
    if kind.count is not None and sync.refuses_counts:
        rule, fix = "a mean over elements is divided after the sum over workers", "use --mechanism replicated"
        raise UserError(rule, f"count={kind.count:g} with {sync.refuses_counts}", f"{fix} without --compress")
    samples = len(part.samples)
    if part.weight == 0.0 or samples == part.batch:
        return loss if kind.count != 0 else _of_no_elements(loss, sync)
    if kind.count is not None and (more or sync.replica.has_more):  # the division is of all gradients of the step
        value = "count with more=True" if more else "a loss with more=True before it"
        fix = "add the losses up in one call, each times its weight"
        raise UserError("one count is for all of a batch's loss", value, fix)
    if kind.sums:
        return loss * (part.batch / samples)
    if kind.count is None:
        return loss
    elements = kind.count / samples
    sync.count_elements(part.weight * elements, part.weight)
    return loss * elements if kind.count else _of_no_elements(loss, sync)


def _of_no_elements(loss: torch.Tensor, sync: Sync) -> torch.Tensor:
    """Zero, in place of a mean over no elements, which is NaN or zero, as the program divides."""
    return (torch.where(torch.isfinite(loss), loss, 0.0) if sync.replica.runs_at_once else loss) * 0.0


@contextmanager
def without_gradient(sync: Sync, kind: LossKind) -> Iterator[None]:
    """Give no parameter a gradient in the passes inside, where ``kind`` is a mean over no elements.

    The gradient of such a mean is NaN or zero, as the program divides.
    """
    hooks = []
    if kind.count == 0 and sync.replica.runs_at_once:
        hooks = [p.register_hook(torch.zeros_like) for p in sync.replica.params if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
