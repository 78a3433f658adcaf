"""The contract of a mechanism: how one replica lies on devices and how its gradients come to be summed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastune.comm.group import Group
from elastune.comm.reducer import Pair, Reducer, Scalar, scalar
from elastune.core.batch_slices import BatchSlice
from elastune.core.errors import UserError

PART = ("square", "weighted", "count", "loss", "sharpness", "trace")
"""What each part of a global batch (a slot, or a worker's share) adds to the step's sums, beside its gradients:
the squared norm of its mean gradient and of that times ``weights``, each times the part's weight; 1; its weighted loss;
and what was measured of it (``say``)."""


@dataclass(frozen=True)
class StepStatistics:
    """What a step's reduction told beside gradients: sums over parts (``PART``), and the squared norms of the sum."""

    parts: dict[str, float]
    norms: tuple[float, float] | None


class Replica(ABC):
    """One worker's copy of the model.

    A step is one or more shares; for each: ``begin``, the user's forward pass through ``model``, ``backward``. Between
    the shares of a step no parameter has a gradient, so that whatever the user does with gradients there (clip, step,
    zero) does nothing; after the last share the gradients are those of the mean loss over the global batch. The last
    ``backward`` returns with the step complete, or raises ``GroupBroken`` with nothing applied; the step is then
    completed by ``take_held`` or dropped by ``abandon``, and training goes on after ``regroup``.

    ``control`` (set before a step, of the length that ``prepare`` was told) is summed over the workers that have
    samples; ``totals``, those sums, are known to all after the step, and so is what was ``found``. ``drifts``: buffers
    move at each worker by itself. ``wait_s``: how long the last step waited for the reduction.
    """

    drifts: bool
    _reducer: Reducer[Any] | None

    def __init__(self, module: nn.Module, group: Group, control: int) -> None:
        self.module = module
        self.model: nn.Module = module
        self.group = group
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.control = [0.0] * control
        self.totals = [0.0] * control
        self.found = StepStatistics({}, None)
        self.wait_s = 0.0
        self.listened_to = True  # somebody wants to know what is found: on a GPU that waits for the device
        self._measures = False
        self._weights: list[torch.Tensor] | None = None
        self._turn = 0
        self._hidden: list[torch.Tensor | None] | None = None
        self._buffers = list(module.buffers())
        self._start = [b.detach().clone() for b in self._buffers]
        # Gradients come about in reverse order of definition; what is known last rides in the last bucket.
        self._order = list(reversed(range(len(self.params))))
        self._place = {i: place for place, i in enumerate(self._order)}
        self._numbers = len(self.params) + control + len(PART)
        self._tail = torch.zeros(self._numbers, dtype=torch.float32, device=self.params[0].device)
        self._part: list[Scalar] = [0.0] * len(PART)
        self._seen: set[int] = set()
        self._collecting = False
        for i, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(lambda p, i=i: self._collect(i, p))

    def begin(self, share: BatchSlice, *, starts_step: bool) -> None:
        """Prepare for the forward pass of ``share``."""
        if starts_step:
            self._hidden = None
            self._part = [0.0] * len(PART)
            if self._buffers:
                torch._foreach_copy_(self._start, self._buffers)
            if self._reducer is not None:
                self._reducer.begin()
                self._reducer.measure(
                    self._measures, self._weights and [self._weights[i] for i in self._order], self._turn
                )

    def measure(self, on: bool, weights: list[torch.Tensor] | None = None, turn: int = 0) -> None:
        """Whether the next step takes gradients' norms; ``weights``: a factor for every parameter; ``turn``: which
        blocks of large ones are looked at (``comm.reducer.Norms``).
        """
        self._measures, self._weights, self._turn = on, weights, turn

    def say(self, name: str, value: float) -> None:
        """Something (one of ``PART``) that was measured of the share at hand, weighted; before its ``backward``."""
        self._part[PART.index(name)] += value

    @abstractmethod
    def backward(self, loss: torch.Tensor, share: BatchSlice) -> None:
        """Add the gradient of ``loss``, the mean over the share's samples; after the step's last share, reduce."""

    # -- when workers come and go -------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Drop the step that was begun last: no parameter has a gradient, buffers are as at its start."""
        if self._reducer is not None:
            self._reducer.drain()
        self._hidden = None
        for p in self.params:
            p.grad = None
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._start)

    def regroup(self, group: Group) -> None:
        """Reduce on ``group`` from the next step on."""
        self.group = group
        if self._reducer is not None:
            self._reducer.regroup(group)

    def held(self) -> list[torch.Tensor]:
        """The complete result of the newest completed step: flat tensors on the group's wire device, whose shapes do
        not depend on the number of workers. They live until the next step completes.
        """
        return self._elastic_reducer().held()

    def held_like(self) -> list[torch.Tensor]:
        """Room for what another worker holds."""
        return self._elastic_reducer().held_like()

    def take_held(self, results: Sequence[torch.Tensor]) -> None:
        """Complete the step by what another worker holds of it, exactly as if the reduction had succeeded here.

        For a worker that contributed all it had: its last ``backward`` raised ``GroupBroken``.
        """
        self._apply(self._elastic_reducer().take(results))

    def _elastic_reducer(self) -> Reducer[Any]:
        if self._reducer is None:
            raise RuntimeError("this replica was not prepared for workers that come and go")
        return self._reducer

    # -- for subclasses: gradients to the reducer and back ------------------------------------------------------------

    def _reduced_backward(self, loss: torch.Tensor, weight: float) -> None:
        """A backward pass whose gradients go to the reducer as they come about, while it goes on."""
        self._seen.clear()
        self._collecting = True
        try:
            (loss * weight).backward()
        finally:
            self._collecting = False

    def _collect(self, i: int, p: torch.Tensor) -> None:
        if self._collecting:
            if i in self._seen:
                fix = "use checkpoint(..., use_reentrant=False)"
                raise UserError("a parameter's whole gradient must come at once", "a second part of one", fix)
            self._seen.add(i)
            self._put(i, p)

    def _put(self, i: int, p: torch.Tensor) -> None:
        assert self._reducer is not None
        self._reducer.put(self._place[i], None if p.grad is None else self._dense(p.grad))
        p.grad = None

    def _dense(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_dense() if gradient.is_sparse else gradient

    def _put_gradients(self) -> None:
        """What the backward pass did not bring: of parameters that it did not use."""
        for i in self._order:
            if i not in self._seen:
                if self.params[i].grad is not None:  # of an earlier pass
                    self._seen.add(i)
                self._put(i, self.params[i])

    def _put_rest(self, moved: Iterable[torch.Tensor], *, with_control: bool) -> None:
        """Behind all gradients: buffers, and the tail of flags, control and what was found."""
        assert self._reducer is not None
        flags = [float(i in self._seen) for i in range(len(self.params))]
        control = self.control if with_control else [0.0] * len(self.control)
        if all(isinstance(value, float) for value in self._part):
            self._tail.copy_(torch.tensor(flags + control + self._part))
        else:
            self._tail[: -len(PART)] = torch.tensor(flags + control)
            self._tail[-len(PART) :] = torch.stack([torch.as_tensor(x, device=self._tail.device) for x in self._part])
        for place, value in enumerate([*moved, self._tail], len(self.params)):
            self._reducer.put(place, value)

    def _apply(self, sums: Sequence[torch.Tensor]) -> None:
        """Give every parameter that any worker used its gradient."""
        tail = sums[-1].tolist()
        used, self.totals = tail[: len(self.params)], tail[len(self.params) : -len(PART)]
        assert self._reducer is not None
        self._find(tail[-len(PART) :], self._reducer.norms() if self._measures else None)
        for i, p in enumerate(self.params):
            p.grad = sums[self._place[i]] if used[i] > 0 else None
        self._hidden = None
        self._move_buffers(sums[len(self.params) : -1])

    def _find(self, parts: Sequence[Scalar], norms: Pair | None) -> None:
        named = {name: float(value) for name, value in zip(PART, parts, strict=True)}
        self.found = StepStatistics(named, None if norms is None else (float(norms[0]), float(norms[1])))

    def _add_part(self, norms: Pair | None, loss: torch.Tensor, weight: float) -> None:
        """A part of weight ``weight`` is done: ``norms`` are those of its weighted gradient."""
        if self.listened_to:
            self._part[_LOSS] += scalar(loss.detach().reshape(())) * weight
        if norms is not None:
            self._add_norms(norms, weight)

    def _add_norms(self, norms: Pair, weight: float) -> None:
        for place, norm in enumerate(norms):
            self._part[place] += norm / weight
        self._part[_COUNT] += 1.0

    def _backward_apart(self, loss: torch.Tensor, weight: float) -> Pair:
        """A backward pass that adds to what earlier shares left, as ever, and takes the norms of its own gradient."""
        (loss * weight).backward()
        norms = self._norms_of_gradients()
        earlier, self._hidden = self._hidden, None
        if earlier is not None:
            for p, grad in zip(self.params, earlier, strict=True):
                if grad is not None:
                    p.grad = grad if p.grad is None else grad.add_(p.grad)
        return norms

    def _norms_of_gradients(self) -> Pair:
        """The squared norms of what the parameters have for gradients, as a reducer takes them."""
        pairs = [(p.grad, i) for i, p in enumerate(self.params) if p.grad is not None]
        if not pairs:
            return 0.0, 0.0
        grads = [(grad.coalesce().values() if grad.is_sparse else grad).float() for grad, _ in pairs]
        plain = scalar(torch.stack(torch._foreach_norm(grads)).square().sum())
        if self._weights is None:
            return plain, 0.0
        weighed = [self._dense(grad) * self._weights[i] for grad, i in pairs]
        return plain, scalar(torch.stack(torch._foreach_norm(weighed)).square().sum())

    @abstractmethod
    def _move_buffers(self, moved: Sequence[torch.Tensor]) -> None:
        """Apply the sums of what ``_put_rest`` was given as ``moved``."""

    def _hide_gradients(self) -> None:
        self._hidden = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None

    def _restore_gradients(self) -> None:
        """Bring back what an earlier share of the same sum left."""
        if self._hidden is not None:
            for p, grad in zip(self.params, self._hidden, strict=True):
                p.grad = grad
            self._hidden = None

    def _refuse_leftovers(self) -> None:
        if any(p.grad is not None for p in self.params):
            raise UserError(
                "gradients must be cleared before session.backward",
                "gradients of an earlier step",
                "call optimizer.zero_grad() once in the loop (to accumulate, use --micro-batch)",
            )


_COUNT, _LOSS = PART.index("count"), PART.index("loss")


def float_buffers(module: nn.Module) -> list[torch.Tensor]:
    """The buffers that training may average (BatchNorm's running statistics), in a fixed order."""
    return [b for b in module.buffers() if b.is_floating_point()]


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One flat float64 CPU vector of all values."""
    return torch.cat([t.detach().double().cpu().reshape(-1) for t in tensors])


def unflatten(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Write what ``flatten`` made back into ``tensors``."""
    at = 0
    for t in tensors:
        t.copy_(flat[at : at + t.numel()].view(t.shape))
        at += t.numel()
