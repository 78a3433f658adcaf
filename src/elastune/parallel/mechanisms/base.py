"""The contract of a mechanism: how ONE replica of a model lies on workers. ``sync`` brings replicas together.

``Mechanism`` checks and attaches a model; ``Replica`` is one worker's part of it during training.
``Replicated`` is the simplest mechanism: each worker carries a whole replica.
``Buffers`` follows a model's buffers in a step: BatchNorm's running statistics, counters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from elastune.core.batch_slices import BatchSlice
from elastune.core.errors import UserError
from elastune.core.layout import Box, Piece
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings
from elastune.parallel.comm.norms import clip_factor, global_norm, gradient_squares
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.capabilities import ALL_CAPABILITIES, Capabilities

# [memory] Bytes that state takes in a worker's memory.


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Of the memory that ``tensors`` lie in, each stretch of it counted once; None takes none."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def optimizer_bytes(states: Iterable[Mapping[str, Any]]) -> int:
    """Of the tensors that an optimizer keeps for its parameters."""
    return storage_bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))


# [buffers] A model's buffers in the course of a step: BatchNorm's running statistics, counters.


class Buffers:
    """What a step's passes do to buffers, so that it can be averaged, or taken back.

    Where slots run apart, each begins on the buffers of the step's start; floating-point buffers then move by the
    weighted mean over slots of what each slot's passes changed. Others (counters) must not depend on data and move as
    in the step's first pass, since workers may need different numbers of passes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._all = list(module.buffers())
        self._start = [b.detach().clone() for b in self._all]
        self._counters: list[torch.Tensor] | None = None

    @property
    def floats(self) -> list[torch.Tensor]:
        """Those that training may average, in a fixed order."""
        return [b for b in self._all if b.is_floating_point()]

    def begin_step(self) -> None:
        """A step begins here."""
        self._counters = None
        if self._all:
            torch._foreach_copy_(self._start, self._all)

    def restore(self) -> None:
        """As they were at the step's start: for the next slot, or for good.

        Not noted by autograd: in a pipeline other slots' passes are under way, and their graphs stay good.
        """
        if self._all:
            torch._foreach_copy_([b.data for b in self._all], self._start)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever moves them inside (a part of the model that is run again, say) is taken back.

        Not noted by autograd: the graph of the pass that is under way stays good.
        """
        before = [b.detach().clone() for b in self._all]
        yield
        for buffer, value in zip(self._all, before, strict=True):
            buffer.data.copy_(value)

    def passed(self) -> None:
        """A forward pass has run; the step's first one decides on counters."""
        if self._counters is None:
            self._counters = [b.clone() for b in self._all if not b.is_floating_point()]

    def moves(self, weight: float) -> list[torch.Tensor]:
        """How far a slot's passes have moved the floating-point buffers, times the slot's ``weight``."""
        floats = [(b.detach(), s) for b, s in zip(self._all, self._start, strict=True) if b.is_floating_point()]
        if not floats:
            return []
        buffers, starts = map(list, zip(*floats, strict=True))
        return list(torch._foreach_mul(torch._foreach_sub(buffers, starts), weight))

    def move(self, moved: Sequence[torch.Tensor]) -> None:
        """From the step's start by ``moved``, the sums of ``moves`` over all slots."""
        starts = [s for b, s in zip(self._all, self._start, strict=True) if b.is_floating_point()]
        counters = [b for b in self._all if not b.is_floating_point()]
        if starts:
            torch._foreach_copy_(self.floats, torch._foreach_add(starts, list(moved)))
        if counters and self._counters:
            torch._foreach_copy_(counters, self._counters)


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One flat float64 CPU vector of all values."""
    return torch.cat([t.detach().double().cpu().reshape(-1) for t in tensors])


def unflatten(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Write what ``flatten`` made back into ``tensors``."""
    at = 0
    for t in tensors:
        t.copy_(flat[at : at + t.numel()].view(t.shape))
        at += t.numel()


# [base] The contract of a mechanism: how ONE replica of a model lies on workers. How replicas come together is ``sync``'s.

Ready = Callable[[int, torch.Tensor | None], None]
"""Takes the gradient of parameter ``i`` the moment it is there; None: no pass has used the parameter. It must copy."""


class Mechanism(ABC):
    """A way to lay one replica on the workers of a mesh; one file each.

    ``name`` is what ``Means.mechanism`` says; ``exact``: it promises equal bits on every mesh that it accepts.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]
    capabilities: ClassVar[Capabilities] = ALL_CAPABILITIES

    @abstractmethod
    def check(self, execution: ExecutionSettings, mesh: Mesh) -> None:
        """Raise ``UserError`` for what this mechanism cannot do; asked before a worker starts."""

    def examine(  # noqa: B027 - most take every model
        self, model: nn.Module, optimizer: torch.optim.Optimizer, execution: ExecutionSettings
    ) -> None:
        """Raise the ``UserError`` with which ``attach`` would refuse ``model`` and ``optimizer`` on every worker.

        Asked before a worker starts: there is nobody to talk to, parameters may have shapes and no values, and the
        model may be changed, since nobody uses it afterwards.
        """

    @abstractmethod
    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, execution: ExecutionSettings
    ) -> Replica:
        """This worker's part of a replica of ``model``, whose values are equal on all workers already.

        ``optimizer`` was built on the whole model; from here on it updates what lies on this worker. A run may attach
        several models, each with an optimizer of its own: each then has steps of its own.
        """


class Replica:
    """This worker's part of one replica: parameters, their gradients, buffers, optimizer. It knows no other replica.

    ``model`` is what the user's forward pass calls, ``module`` what is saved. ``params``: the leaves that backward
    passes give gradients on this worker; ``boxes``: where those lie that are a part of the whole parameter.
    ``least_samples``: what a pass must have, where it can be had; BatchNorm has no variance of one sample.
    ``equal_passes``: workers need each other in every pass, so all must make as many. ``in_turn``: slots are dealt out
    to them in turn (``core.slots.dealt``). ``apart``: the workers along the tensor axis run slots of their own.

    A step's gradient is gathered over passes. ``accumulate`` adds a pass to what earlier ones left; the last one may be
    a ``stream``, which hands gradients over while the backward pass still runs. Between passes they are hidden
    (``hide``), so that whatever the user does with gradients there (clip, step, zero) does nothing.

    ``only``: which parameters the next backward pass gives gradients; None: all that it comes to.
    ``gathers``: all workers must ask for the whole state together.
    """

    gathers: bool = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        comms: Comms,
        boxes: Mapping[str, Box] = MappingProxyType({}),
        params: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self.module = module
        self.model: nn.Module = module
        self.optimizer = optimizer
        self.comms = comms
        self.params = [p for p in module.parameters() if p.requires_grad] if params is None else list(params)
        self.buffers = Buffers(module)
        normalises = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
        self.only: list[nn.Parameter] | None = None
        self.least_samples = 2 if normalises else 1
        self.equal_passes = self.in_turn = self.apart = False
        self._boxes = boxes
        self._hidden: list[torch.Tensor | None] | None = None
        self._aside: list[torch.Tensor | None] | None = None
        self._seen: set[int] = set()
        self._ready: Ready | None = None
        self._heard: set[int] = set()

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """The program evaluates: others may need this worker until it has come to ``stand_in``."""

    def stand_in(self, until: Callable[[], bool] | None = None, *, ends: bool = False) -> None:
        """An evaluation is over here, if there was one: take part in forward passes that others make, as many as they
        come to; see ``equal_passes``, ``apart``.

        ``until``: it may go on. This worker waits for something else, asks for it between two passes, and takes part
        until it is so. ``ends``: only the loop has ended. If others have left theirs and wait, they may wait for what
        comes behind it: the evaluation goes on without this worker until it waits too, or workers meet.
        """

    def among(self, mesh: Mesh, rank: int) -> tuple[int, int]:
        """How many workers of ``mesh`` share out a replica's slots among them, and which of them ``rank`` is."""
        return (mesh.tensor, mesh.coordinates(rank)["tensor"]) if self.apart else (1, 0)

    def place(self, mesh: Mesh, rank: int) -> tuple[int, int]:
        """How many parts an evaluation's samples are cut into, and which of them worker ``rank`` of ``mesh`` has."""
        count, own = self.among(mesh, rank)
        return mesh.batch * count, mesh.batch_rank(rank) * count + own

    def speaks(self, mesh: Mesh, rank: int) -> bool:
        """Whether worker ``rank`` of ``mesh`` speaks for its samples; see ``Mesh.speaks``."""
        return self.apart or mesh.speaks(rank)

    def begin_step(self, parts: Sequence[BatchSlice] = ()) -> None:
        """A step begins here: ``abandon`` comes back to this place. ``parts``: all that this worker runs in it."""
        self._hidden = self._aside = None
        self.buffers.begin_step()

    def accumulate(self, loss: torch.Tensor, weight: float) -> None:
        """A backward pass of ``loss`` times ``weight``, added to the gradients that earlier passes left."""
        self._restore()
        self._backward(weighed(loss, weight))

    @property
    def has_all(self) -> bool:
        """Whether this worker has the whole model, and passes of it by itself."""
        return type(self) is Replica

    def add(self, loss: torch.Tensor, weight: float) -> None:
        """A backward pass whose gradients join those of the next one, as if its loss had been a part of that one's."""
        self._backward(weighed(loss, weight))
        self._aside = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None

    @property
    def has_more(self) -> bool:
        """Whether there was an ``add``, and the pass that it belongs to has not come."""
        return self._aside is not None

    def run_apart(self, loss: torch.Tensor, weight: float) -> None:
        """As ``accumulate``, in two steps: until ``join_earlier`` the parameters have this pass's gradients alone."""
        self._backward(weighed(loss, weight))

    def join_earlier(self) -> None:
        """Add what passes before ``run_apart`` left."""
        earlier, self._hidden = self._hidden, None
        if earlier is not None:
            for p, grad in zip(self.params, earlier, strict=True):
                if grad is not None:
                    p.grad = grad if p.grad is None else grad.add_(p.grad)

    def stream(self, loss: torch.Tensor, weight: float, ready: Ready) -> None:
        """As ``accumulate``, but each gradient goes to ``ready`` once, as it comes, and leaves its parameter."""
        self._restore()
        self._listen()
        self._seen.clear()
        self._ready = ready
        try:
            self._backward(weighed(loss, weight))
        finally:
            self._ready = None
        self._hand_over(ready)

    def deliver(self, ready: Ready) -> None:
        """Every parameter's gradient, as far as passes have brought one, goes to ``ready`` and leaves its parameter."""
        self._restore()
        self._seen.clear()
        self._hand_over(ready)

    def hide(self) -> None:
        """Put away what was accumulated: no parameter has a gradient until the next pass."""
        self._hidden = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None

    def adopt(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The step's gradients, of all samples, are these: what the user's optimizer step will use."""
        for p, gradient in zip(self.params, gradients, strict=True):
            if gradient is not None and not p.is_contiguous():  # fused optimizers go through memory side by side
                gradient = torch.empty_like(p).copy_(gradient)
            p.grad = gradient
        self._hidden = None

    def clip(self, max_norm: float) -> float:
        """Scale the step's gradient so that the norm of the WHOLE gradient is at most ``max_norm``; the norm before."""
        gradients = [p.grad for p in self.params if p.grad is not None]
        norm = global_norm(gradient_squares(gradients))
        factor = clip_factor(norm, max_norm)
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        return norm

    def spread(self) -> None:
        """New values to those that compute with them and do not update them themselves; at a step boundary."""

    def abandon(self) -> None:
        """Drop the step that was begun last: no parameter has a gradient, buffers are as at its start."""
        self._hidden = self._aside = None
        for p in self.params:
            p.grad = None
        self.buffers.restore()

    def refuse_leftovers(self) -> None:
        """Raise ``UserError`` where parameters have gradients of an earlier step."""
        left = [p for p in self.params if p.grad is not None]
        if left:
            if not {id(p) for group in self.optimizer.param_groups for p in group["params"]} & set(map(id, left)):
                rule, fix = "gradients are of what the optimizer trains", "give it to the optimizer, or freeze it"
                raise UserError(rule, "those of a parameter that it does not have", fix)
            raise UserError(
                "gradients must be cleared before session.backward",
                "gradients of an earlier step",
                "call optimizer.zero_grad() once in the loop (to accumulate, use --micro-batch)",
            )

    def memory(self) -> dict[str, int]:
        """Bytes that this worker has of ``parameters`` (with buffers), ``gradients``, ``optimizer`` (state), and
        ``copies``: what of that state is here only in case another worker dies.
        """
        parameters = list(self.module.parameters())
        return {
            "parameters": storage_bytes([*parameters, *self.module.buffers()]),
            "gradients": storage_bytes(p.grad for p in parameters),
            "optimizer": optimizer_bytes(self.optimizer.state.values()),
            "copies": 0,
        }

    # -- whole --------------------------------------------------------------------------------------------------------

    @property
    def numbers(self) -> int:
        """How many numbers of the whole model are trained."""
        return sum(p.numel() for p in self.params)

    def gather(self) -> None:
        """Until the next step workers make forward passes by themselves, for an evaluation: all call this together."""

    # -- where it lies ------------------------------------------------------------------------------------------------

    def regroup(self, comms: Comms) -> None:
        """From the next step on this worker stands where ``comms`` says, among these workers."""
        self.comms = comms

    def layout(self) -> tuple[Piece, ...]:
        """The pieces of model and optimizer that this worker holds, at a step boundary."""
        return tuple(Piece(name, box) for name, (box, _) in self._held().items())

    def read(self, piece: Piece) -> torch.Tensor:
        """The values of ``piece``, which lies in one that this worker holds."""
        box, tensor = self._held()[piece.name]
        return tensor.detach()[_inside(piece.box, box)]

    def write(self, piece: Piece, values: torch.Tensor) -> None:
        """Overwrite ``piece``, a part of what this worker is to hold; its optimizer may not know the tensor yet."""
        held = self._held()
        if piece.name not in held:
            held[piece.name] = self._make_room(piece.name, values)
        box, tensor = held[piece.name]
        tensor.detach()[_inside(piece.box, box)] = values

    def _held(self) -> dict[str, tuple[Box, torch.Tensor]]:
        """Every tensor of the state by name, with the box that it fills here."""
        found = {name: (self._box(name, tensor), tensor) for name, tensor in self._tensors()}
        for name, p in self.module.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    box = found[name][0] if value.shape == p.shape else _whole(value)
                    found[f"{name}:{key}"] = box, value
        return found

    def _make_room(self, name: str, values: torch.Tensor) -> tuple[Box, torch.Tensor]:
        """For a tensor that the optimizer has elsewhere, but not here yet."""
        owner, _, key = name.rpartition(":")
        p = self.module.get_parameter(owner)
        room = torch.zeros_like(p.detach() if values.dim() else values, dtype=values.dtype)
        self.optimizer.state.setdefault(p, {})[key] = room
        return (self._box(owner, p) if values.dim() else ()), room

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.module.named_parameters()
        yield from self.module.named_buffers()

    def _box(self, name: str, tensor: torch.Tensor) -> Box:
        return self._boxes.get(name) or _whole(tensor)

    def _backward(self, loss: torch.Tensor) -> None:
        aside, self._aside = self._aside, None
        if aside is not None:
            for p, grad in zip(self.params, aside, strict=True):
                if grad is not None:
                    p.grad = grad if p.grad is None else p.grad.add_(grad)
        if self.only is None:
            loss.backward()
        else:
            torch.autograd.backward(loss, inputs=self.only)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Have autograd tell of gradients as they come, from the first pass that needs it: it costs time in each. What
        is frozen by then is heard of once it is not."""
        if len(self._heard) < len(self.params):
            for i, p in enumerate(self.params):
                if p.requires_grad and i not in self._heard:
                    self._heard.add(i)
                    p.register_post_accumulate_grad_hook(lambda p, i=i: self._collect(i, p))

    def _collect(self, i: int, p: torch.Tensor) -> None:
        """Autograd calls this when the gradient of ``p`` has been accumulated."""
        if self._ready is not None:
            if i in self._seen:
                fix = "use checkpoint(..., use_reentrant=False)"
                raise UserError("a parameter's whole gradient must come at once", "a second part of one", fix)
            self._seen.add(i)
            self._ready(i, p.grad)
            p.grad = None

    def _hand_over(self, ready: Ready) -> None:
        """What the backward pass did not bring; in the order in which it would have come, as far as one can tell."""
        for i in reversed(range(len(self.params))):
            if i not in self._seen:
                p = self.params[i]
                ready(i, p.grad)
                p.grad = None

    def _restore(self) -> None:
        """Bring back what earlier passes left."""
        if self._hidden is not None:
            for p, grad in zip(self.params, self._hidden, strict=True):
                p.grad = grad
            self._hidden = None


def weighed(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """``loss`` times ``weight``; of the whole batch it is itself, and so are its gradients' bits."""
    return loss if weight == 1.0 else loss * weight


def _whole(tensor: torch.Tensor) -> Box:
    return tuple((0, size) for size in tensor.shape)


def _inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where ``box`` lies in a tensor that fills ``outer``."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


# [replicated] Data parallelism: each worker carries a whole replica.


class Replicated(Mechanism):
    """Every tensor lies whole on every worker."""

    name: ClassVar[str] = "replicated"
    exact: ClassVar[bool] = True

    def check(self, execution: ExecutionSettings, mesh: Mesh) -> None:
        if mesh.replica > 1:
            rule = f"a replica of {self.name} lies on one worker"
            raise UserError(rule, f"{mesh.replica} workers a replica", f"use data={mesh.workers} alone")

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, execution: ExecutionSettings
    ) -> Replica:
        return Replica(model, optimizer, comms)
