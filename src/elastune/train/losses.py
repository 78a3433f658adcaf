"""What a loss is over: a mean, a sum, a varying number of elements, or all samples of the global batch at once.

A step sums the losses of its slices, each times its part of the global batch. That is the loss of the whole batch
where each loss is a mean over samples. ``as_mean`` turns a sum, or a mean over other elements, into such a mean. For
means over elements the sum over workers is then divided by the mean number of elements (``Sync.divide_by_counts``).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from elastune.core.errors import UserError
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.group import Group
from elastune.parallel.mechanisms.base import restore_rng_states, rng_states
from elastune.parallel.sync.base import Sync

# What a program's loss is over: a mean over samples, a sum, or a mean over a number of elements that varies.


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


# Losses that need all samples of the global batch: contrastive losses, in-batch negatives, batch-hard triplets.
#
# Gradients come in two passes, as in gradient caching (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size
# under Memory Limited Setup", arXiv 2101.06983). First every slot's features are computed without a graph, and
# gathered in the order of the samples. The loss of all features gives their gradients. Then each slot is passed
# again, with a graph, and goes back with the gradients of its own features. So only one slot's graph is in memory at
# a time, and every worker computes the same loss from the same numbers.

Tensors = tuple[torch.Tensor, ...]
Loss = Callable[..., torch.Tensor]
_KIND = zlib.crc32(b"features of the global batch")
RULE = "the features of a global batch are gathered from whole models that step together"


@dataclass(frozen=True)
class SliceEncoder:
    """The program's call for one slice, which can be repeated.

    Attributes:
        part: The slice.
        encode: Returns features from ``inputs``: a tensor, or several, with a row for each sample.
        inputs: The slice's samples.
        streams: The random streams as they stood at the call.
        seen: The values of the variables that ``encode`` uses of the functions around it, as they were at the call.
    """

    part: BatchSlice
    encode: Callable[..., Any]
    inputs: tuple[Any, ...]
    streams: Sequence[torch.Tensor] = field(default_factory=rng_states)
    seen: Sequence[Any] = ()

    @staticmethod
    def of(part: BatchSlice, encode: Callable[..., Any], inputs: tuple[Any, ...]) -> SliceEncoder:
        """The call as it stands now."""
        return SliceEncoder(part, encode, inputs, seen=[value for _, value in _variables(encode)])

    def features(self) -> Tensors:
        """Compute the slice's features, with the random numbers of the call.

        Raises:
            UserError: For features without a row for each sample, and where a later slice changed a variable that
                ``encode`` uses.
        """
        for (name, now), then in zip(_variables(self.encode), self.seen, strict=True):
            if now is not then:
                rule = "encode gets what differs between batches as its arguments"
                fix = f"session.backward_global(loss, encode, {name}), with {name} as an argument of encode"
                raise UserError(rule, f"{name}, a variable of the loop", fix)
        restore_rng_states(self.streams)
        features = self.encode(*self.inputs)
        tensors = (features,) if isinstance(features, torch.Tensor) else tuple(features)
        for each in tensors:
            if not isinstance(each, torch.Tensor) or each.dim() == 0 or len(each) != len(self.part.samples):
                value = f"shape {tuple(each.shape)}" if isinstance(each, torch.Tensor) else type(each).__name__
                rule = f"features are tensors with a row for each sample of the batch, here {len(self.part.samples)}"
                raise UserError(rule, value, "return several views as several tensors")
        return tensors


def _variables(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """The variables of surrounding functions that ``function`` uses, by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    return [] if code is None else [(n, c.cell_contents) for n, c in zip(code.co_freevars, cells, strict=True)]


def refuse_gathering(sync: Sync) -> None:
    """Raise ``UserError`` where features cannot be gathered in the middle of a step."""
    if sync.meets_after_step:
        raise UserError(RULE, f"--sync {sync.plan}", "use --sync allreduce")
    if not sync.replica.runs_at_once or sync.replica.equal_passes:
        raise UserError(RULE, "a mechanism that divides the model", "use --mechanism replicated or zero")


def gathered(encoders: Sequence[SliceEncoder], sync: Sync) -> Tensors:
    """The features of all slices of all workers, in the order of samples, without a graph.

    Raises:
        GroupBroken: If a worker is lost meanwhile.
        UserError: Where not every batch of the step gave its features.
    """
    rows: list[Tensors] = []
    with torch.no_grad(), sync.replica.buffers.kept():
        for encoder in encoders:
            sync.replica.buffers.restore()  # as the slot's own pass will find them
            rows.append(tuple(each.detach() for each in encoder.features()))
    counting = [row for row, encoder in zip(rows, encoders, strict=True) if encoder.part.weight]
    local = [torch.cat([row[i] for row in counting]) if counting else rows[0][i][:0] for i in range(len(rows[0]))]
    whole = tuple(_all_rows(each, sync.group) for each in local)
    batch = encoders[0].part.batch
    if len(whole[0]) != batch:
        rule, fix = "each batch of a step calls session.backward_global", "call it for all batches alike"
        raise UserError(rule, f"features of {len(whole[0])} of {batch} samples", fix)
    return whole


def _all_rows(local: torch.Tensor, group: Group) -> torch.Tensor:
    """The rows of all workers, by rank."""
    if group.size == 1:
        return local
    flat = local.contiguous().view(-1)
    rows = [row.view(-1, *local.shape[1:]) for row in group.gather_tensors(flat, _KIND)]
    return torch.cat(rows).to(local.device)


@dataclass(frozen=True)
class FeatureGradients:
    """The global loss and its gradients.

    Attributes:
        loss: Its value.
        features: The gradient of each tensor of features; None: the loss does not depend on it.
        parameters: The gradients of parameters that the loss uses by itself, such as a temperature.
    """

    loss: torch.Tensor
    features: tuple[torch.Tensor | None, ...]
    parameters: Sequence[tuple[torch.nn.Parameter, torch.Tensor]]

    @staticmethod
    def of(loss: Loss, features: Tensors, parameters: Sequence[torch.nn.Parameter]) -> FeatureGradients:
        """Those of ``loss(*features)``. Raises ``UserError`` for a loss that is no number with a gradient."""
        leaves = tuple(each.requires_grad_() if each.is_floating_point() else each for each in features)
        with torch.enable_grad():
            value = loss(*leaves)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            rule, fix = "a loss of the global batch is one number that depends on the features", "return a scalar"
            raise UserError(rule, repr(value)[:60], fix)
        floats = [each for each in leaves if each.requires_grad]
        trained = [p for p in parameters if p.requires_grad]
        gradients = torch.autograd.grad(value, [*floats, *trained], allow_unused=True)
        of_floats, of_trained = iter(gradients[: len(floats)]), gradients[len(floats) :]
        used = [(p, gradient) for p, gradient in zip(trained, of_trained, strict=True) if gradient is not None]
        return FeatureGradients(
            value.detach(), tuple(next(of_floats) if each.requires_grad else None for each in leaves), used
        )

    def loss_of(self, encoder: SliceEncoder) -> torch.Tensor:
        """A loss of the slice of ``encoder``, whose weighted mean over slices has value and gradient of the whole."""
        part = encoder.part
        rows = slice(part.samples.start, part.samples.stop)
        terms = [
            (each * gradient[rows]).sum()
            for each, gradient in zip(encoder.features(), self.features, strict=True)
            if gradient is not None and each.requires_grad
        ]
        if part.samples.start == 0:  # once in the global batch
            terms += [(p * gradient).sum() for p, gradient in self.parameters]
        if not terms:
            rule, fix = "features come from the model that is trained", "compute them in encode, with gradients"
            raise UserError(rule, "features without a gradient", fix)
        whole = sum(terms[1:], terms[0]) * (part.batch / len(part.samples))
        return whole + (self.loss - whole).detach()
