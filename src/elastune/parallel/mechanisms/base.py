"""The contracts of a mechanism and of model parallelism: how ONE replica of a model lies on workers.

``Mechanism`` and ``Replica`` are the contract of every mechanism; ``ModelParallel`` is that of a mechanism which
divides the arithmetic of a replica. ``sync`` brings replicas together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.journal.records import LayersDivided, StagesDivided
from elastune.core.layout import Box, Piece, Split, undivided_blocks
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.group import GroupBroken
from elastune.parallel.comm.norms import clip_factor, global_norm, gradient_squares
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms import torch_private
from elastune.parallel.mechanisms.capabilities import ALL_CAPABILITIES, Capabilities
from elastune.parallel.mechanisms.guards import ProcessLocal

# The contract of a mechanism: how ONE replica of a model lies on workers. ``sync`` brings replicas together.
#
# ``Mechanism`` checks and attaches a model; ``Replica`` is one worker's part of it during training. ``Replicated`` is
# the simplest mechanism: each worker carries a whole replica. ``Buffers`` records what a step does to a model's
# buffers (BatchNorm's running statistics, counters).

Ready = Callable[[int, torch.Tensor | None], None]
"""Takes the gradient of parameter ``i`` as soon as it exists; None: no pass has used the parameter. It must copy."""


class Mechanism(ABC):
    """A layout of one replica on the workers of a mesh, such as ZeRO or a pipeline. Inherit from this class to write a
    mechanism; each one has a file.

    Attributes:
        name: The name in ``ExecutionSettings.mechanism`` (``--mechanism``).
        exact: The mechanism promises equal bits on every mesh that it accepts.
        capabilities: Features that the mechanism supports beside training.

    Example:
        >>> class Whole(Mechanism):  # docs/first-change.md has one that runs
        ...     name, exact = "whole", True
        ...     def check(self, execution, mesh):
        ...         if mesh.replica > 1:
        ...             raise UserError("a whole replica lies on one worker", mesh, f"use data={mesh.workers}")
        ...     def attach(self, model, optimizer, comms, execution):
        ...         return Replica(model, optimizer, comms)
    """

    name: ClassVar[str]
    exact: ClassVar[bool]
    capabilities: ClassVar[Capabilities] = ALL_CAPABILITIES

    @abstractmethod
    def check(self, execution: ExecutionSettings, mesh: Mesh) -> None:
        """Raise ``UserError`` where this mechanism cannot do what ``execution`` asks. Called before a worker starts."""

    def examine(  # noqa: B027 - most take every model
        self, model: nn.Module, optimizer: torch.optim.Optimizer, execution: ExecutionSettings
    ) -> None:
        """Raise the ``UserError`` with which ``attach`` would refuse ``model`` and ``optimizer`` on every worker.

        Called before a worker starts: no other worker can be reached, and parameters may have shapes without values.
        This method may change the model, because nobody uses it afterwards.
        """

    @abstractmethod
    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, execution: ExecutionSettings
    ) -> Replica:
        """Return this worker's part of a replica of ``model``, whose values are equal on all workers already.

        ``optimizer`` was built on the whole model. From now on it updates this worker's part. A run may attach
        several models, each with its own optimizer and its own steps.
        """


class Replica:
    """This worker's part of one replica: parameters, gradients, buffers, optimizer. It knows no other replica.

    A step's gradient is gathered over passes. ``accumulate`` adds a pass to the earlier ones. The last pass may be
    a ``stream``, which hands gradients over while the backward pass still runs. Between passes gradients are hidden
    (``hide``), so that what the user does with gradients there (clip, step, zero) has no effect.

    Attributes:
        model: The module that the user's forward pass calls.
        module: The module that is saved.
        params: The parameters that get gradients from backward passes on this worker.
        only: The parameters that get gradients in the next backward pass; None: all that the pass reaches.
        least_samples: The samples that a pass should have at least: BatchNorm has no variance of one sample.
        equal_passes: Workers need each other in every pass, so all must make equally many.
        in_turn: Slots go to workers in turn (``core.slots.dealt``).
        apart: The workers along the tensor axis run slots of their own.
        gathers: All workers must ask for the whole state together.
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
        normalises = any(isinstance(part, torch_private.BatchNorm) for part in module.modules())
        self.only: list[nn.Parameter] | None = None
        self.least_samples = 2 if normalises else 1
        self.equal_passes = self.in_turn = self.apart = False
        self._boxes = boxes
        self._hidden: list[torch.Tensor | None] | None = None
        self._aside: list[torch.Tensor | None] | None = None
        self._seen: set[int] = set()
        self._ready: Ready | None = None
        self._hooked: set[int] = set()

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """The program evaluates from here on. Other workers may need this one until it has called ``stand_in``."""

    def stand_in(self, until: Callable[[], bool] | None = None, *, ends: bool = False) -> None:
        """End this worker's evaluation, if it had one: take part in the forward passes that other workers still make.

        Only mechanisms whose workers need each other in a pass do anything here; see ``equal_passes``, ``apart``.

        Args:
            until: The evaluation may go on later. This worker waits for another event and calls ``until`` between
                two passes. It takes part until ``until`` returns True.
            ends: Only the loop has ended. Other workers that have left their loop may wait for a later call of this
                worker. The evaluation then goes on without this worker until it waits too, or until workers meet.
        """

    def among(self, mesh: Mesh, rank: int) -> tuple[int, int]:
        """How many workers of ``mesh`` share a replica's slots, and which of them ``rank`` is."""
        return (mesh.tensor, mesh.coordinates(rank)["tensor"]) if self.apart else (1, 0)

    def place(self, mesh: Mesh, rank: int) -> tuple[int, int]:
        """How many parts an evaluation's samples are cut into, and which of them worker ``rank`` of ``mesh`` has."""
        count, position = self.among(mesh, rank)
        return mesh.batch * count, mesh.batch_rank(rank) * count + position

    def speaks(self, mesh: Mesh, rank: int) -> bool:
        """Whether worker ``rank`` of ``mesh`` reports the results of its samples; see ``Mesh.speaks``."""
        return self.apart or mesh.speaks(rank)

    def begin_step(self, parts: Sequence[BatchSlice] = ()) -> None:
        """Begin a step, which ``abandon`` can undo. ``parts``: all slices that this worker runs in it."""
        self._hidden = self._aside = None
        self.buffers.begin_step()

    def accumulate(self, loss: torch.Tensor, weight: float) -> None:
        """Run a backward pass of ``loss`` times ``weight`` and add its gradients to those of earlier passes."""
        self._restore()
        self._backward(weighed(loss, weight))

    @property
    def has_all(self) -> bool:
        """Whether this worker has the whole model and runs its passes alone."""
        return type(self) is Replica

    @property
    def runs_at_once(self) -> bool:
        """Whether a slice's backward pass runs in the call that brings its loss, on this worker's ``params``."""
        return self.has_all

    def add(self, loss: torch.Tensor, weight: float) -> None:
        """Run a backward pass whose gradients join those of the next pass, as if the two losses were one."""
        self._backward(weighed(loss, weight))
        self._aside = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None

    @property
    def has_more(self) -> bool:
        """Whether gradients of an ``add`` wait for the next pass."""
        return self._aside is not None

    def run_apart(self, loss: torch.Tensor, weight: float) -> None:
        """As ``accumulate``, in two parts: until ``join_earlier`` the parameters have only this pass's gradients."""
        self._backward(weighed(loss, weight))

    def join_earlier(self) -> None:
        """Add the gradients of the passes before ``run_apart``."""
        earlier, self._hidden = self._hidden, None
        if earlier is not None:
            for p, grad in zip(self.params, earlier, strict=True):
                if grad is not None:
                    p.grad = grad if p.grad is None else grad.add_(p.grad)

    def stream(self, loss: torch.Tensor, weight: float, ready: Ready) -> None:
        """As ``accumulate``, but each gradient goes to ``ready`` as soon as it exists, and leaves its parameter."""
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
        """Hand every parameter's gradient (None where no pass gave one) to ``ready`` and take it from the parameter."""
        self._restore()
        self._seen.clear()
        self._hand_over(ready)

    def hide(self) -> None:
        """Hide the accumulated gradients: no parameter has a gradient until the next pass."""
        self._hidden = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None

    def adopt(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Set the step's gradients, of all samples, which the user's optimizer step will use."""
        for p, gradient in zip(self.params, gradients, strict=True):
            if gradient is not None and not p.is_contiguous():  # fused optimizers need equal strides
                gradient = torch.empty_like(p).copy_(gradient)
            p.grad = gradient
        self._hidden = None

    def clip(self, max_norm: float) -> float:
        """Scale the step's gradient so that the norm of the WHOLE gradient is at most ``max_norm``.

        Returns:
            The norm before.
        """
        gradients = [p.grad for p in self.params if p.grad is not None]
        norm = global_norm(gradient_squares(gradients))
        factor = clip_factor(norm, max_norm)
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        return norm

    def divide(self, by: float) -> None:
        """Divide the step's gradient by a number that is equal on all workers."""
        for p in self.params:
            if p.grad is not None:
                p.grad.mul_(1.0 / by)

    def spread(self) -> None:
        """Send new values to the workers that compute with them and do not update them; at a step boundary."""

    def abandon(self) -> None:
        """Drop the step that was begun last: no parameter has a gradient, and buffers are as at its start."""
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
        """Bytes on this worker of ``parameters`` (with buffers), ``gradients``, ``optimizer`` (state), and ``copies``:
        the part of that state that is kept only in case another worker dies.
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
        """How many elements of the whole model are trained."""
        return sum(p.numel() for p in self.params)

    def gather(self) -> None:
        """Let workers make forward passes alone until the next step, for an evaluation. All call this together."""

    # -- the layout ---------------------------------------------------------------------------------------------------

    def regroup(self, comms: Comms) -> None:
        """Take the place in the mesh that ``comms`` gives to this worker, from the next step on."""
        self.comms = comms

    def layout(self) -> tuple[Piece, ...]:
        """The pieces of model and optimizer that this worker holds, at a step boundary."""
        return tuple(Piece(name, box) for name, (box, _) in self._held().items())

    def read(self, piece: Piece) -> torch.Tensor:
        """The values of ``piece``, which must lie within one piece that this worker holds."""
        box, tensor = self._held()[piece.name]
        return tensor.detach()[_inside(piece.box, box)]

    def write(self, piece: Piece, values: torch.Tensor) -> None:
        """Overwrite ``piece``, which this worker is to hold. Its optimizer may not have the tensor yet."""
        held = self._held()
        if piece.name not in held:
            held[piece.name] = self._make_room(piece.name, values)
        box, tensor = held[piece.name]
        tensor.detach()[_inside(piece.box, box)] = values

    def _held(self) -> dict[str, tuple[Box, torch.Tensor]]:
        """Every tensor of the state by name, with the box that it fills here."""
        tensors = {name: (self._box(name, tensor), tensor) for name, tensor in self._tensors()}
        for name, p in self.module.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    box = tensors[name][0] if value.shape == p.shape else _whole(value)
                    tensors[f"{name}:{key}"] = box, value
        return tensors

    def _make_room(self, name: str, values: torch.Tensor) -> tuple[Box, torch.Tensor]:
        """Create a tensor of the optimizer's state that exists on another worker and not yet on this one."""
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
        """Register autograd hooks that report each gradient, from the first pass that needs them: they cost time.

        A frozen parameter gets its hook once it is no longer frozen.
        """
        if len(self._hooked) < len(self.params):
            for i, p in enumerate(self.params):
                if p.requires_grad and i not in self._hooked:
                    self._hooked.add(i)
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
        """Hand over the gradients that autograd did not report, in the probable order of a backward pass."""
        for i in reversed(range(len(self.params))):
            if i not in self._seen:
                p = self.params[i]
                ready(i, p.grad)
                p.grad = None

    def _restore(self) -> None:
        """Give the hidden gradients of earlier passes back to their parameters."""
        if self._hidden is not None:
            for p, grad in zip(self.params, self._hidden, strict=True):
                p.grad = grad
            self._hidden = None


class Replicated(Mechanism):
    """Data parallelism: every worker carries a whole replica (``--mechanism replicated``)."""

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


def weighed(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """``loss`` times ``weight``. A weight of 1 keeps the loss itself, and so the bits of its gradients."""
    return loss if weight == 1.0 else loss * weight


def _whole(tensor: torch.Tensor) -> Box:
    return tuple((0, size) for size in tensor.shape)


def _inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """The index of ``box`` in a tensor that fills ``outer``."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


class Buffers:
    """A model's buffers during a step, so that the changes of its passes can be averaged or undone.

    Each slot begins with the buffers of the step's start. A floating-point buffer then changes by the weighted mean
    over slots of the change in each slot. Other buffers (counters) must not depend on data. They change as in the
    step's first pass, because workers may need different numbers of passes.

    Attributes:
        one_slot: The whole batch is one slot. Then buffers keep the values of its passes, to the bit: a change that is
            taken and added again would round.
    """

    def __init__(self, module: nn.Module) -> None:
        self.one_slot = False
        self._all = list(module.buffers())
        self._start = [b.detach().clone() for b in self._all]
        self._counters: list[torch.Tensor] | None = None

    @property
    def floats(self) -> list[torch.Tensor]:
        """The floating-point buffers, which training may average, in a fixed order."""
        return [b for b in self._all if b.is_floating_point()]

    def begin_step(self) -> None:
        """Record the values with which a step begins."""
        self._counters = None
        if self._all:
            torch_private.foreach_copy_(self._start, self._all)

    def restore(self) -> None:
        """Set the buffers back to the step's start: for the next slot, or because the step is dropped.

        Autograd does not see the change: in a pipeline the graphs of other slots' passes stay valid.
        """
        if self._all:
            torch_private.foreach_copy_([b.data for b in self._all], self._start)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Undo every change made inside, for example by a part of the model that runs again.

        Autograd does not see the change: the graph of the current pass stays valid.
        """
        before = [b.detach().clone() for b in self._all]
        yield
        for buffer, value in zip(self._all, before, strict=True):
            buffer.data.copy_(value)

    def passed(self) -> None:
        """A forward pass has run. The step's first one determines the new values of counters."""
        if self._counters is None:
            self._counters = [b.clone() for b in self._all if not b.is_floating_point()]

    def moves(self, weight: float) -> list[torch.Tensor]:
        """The change of each floating-point buffer in a slot's passes, times the slot's ``weight``.

        Of a batch's one slot: its new values.
        """
        if self.one_slot:
            return [b.detach() for b in self.floats]
        floats = [(b.detach(), s) for b, s in zip(self._all, self._start, strict=True) if b.is_floating_point()]
        if not floats:
            return []
        buffers, starts = map(list, zip(*floats, strict=True))
        return list(torch_private.foreach_mul(torch_private.foreach_sub(buffers, starts), weight))

    def move(self, moved: Sequence[torch.Tensor]) -> None:
        """Set buffers to their values at the step's start plus ``moved``, the sums of ``moves`` over all slots.

        Of a batch's one slot ``moved`` are the values themselves.
        """
        starts = [s for b, s in zip(self._all, self._start, strict=True) if b.is_floating_point()]
        if starts:
            values = list(moved) if self.one_slot else torch_private.foreach_add(starts, list(moved))
            torch_private.foreach_copy_(self.floats, values)
        self.settle_counters()

    def settle_counters(self) -> None:
        """Set counters to their values after the step's first pass."""
        counters = [b for b in self._all if not b.is_floating_point()]
        if counters and self._counters:
            torch_private.foreach_copy_(counters, self._counters)


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All values of ``tensors`` in one flat float64 vector on the CPU."""
    return torch.cat([t.detach().double().cpu().reshape(-1) for t in tensors])


def unflatten(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Write ``flat``, as ``flatten`` made it, back into ``tensors``."""
    at = 0
    for t in tensors:
        t.copy_(flat[at : at + t.numel()].view(t.shape))
        at += t.numel()


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the storages that ``tensors`` use. A storage of several tensors counts once, and None counts 0."""
    present = [t for t in tensors if t is not None]
    dense = [part for t in present for part in ((t._indices(), t._values()) if t.is_sparse else (t,))]
    storages = [t.untyped_storage() for t in dense]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def optimizer_bytes(states: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the tensors that an optimizer keeps for its parameters; ``states``: its state by parameter."""
    return storage_bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))


# The contract of model parallelism: how the arithmetic of one replica is divided among its workers.
#
# A division says which parameter blocks the model has and how a worker runs its part of a pass. The random stream of
# a micro-batch travels with its activations, so that dropout draws the same numbers.

Until = Callable[[], bool]
"""Whether the event that a worker waits for has happened. Called between two passes."""


class ModelParallel(ProcessLocal):
    """How one worker runs its part of a model's passes. This class divides nothing; ``tensor`` and ``pipeline`` do.

    It does not decide which worker holds a parameter (``owned.store.ParameterStore`` does). When ``enter`` and the
    passes are called, the parameter blocks that this worker computes with (``split.computed``) have storage and values.

    Attributes:
        split: The parameter blocks of the WHOLE model, the same on every worker and every mesh.
        parameters: One parameter object a block, which stays the same for the whole run and has the block's shape. At
            the beginning all have their values, equal on all workers. Later the storage of those that this worker does
            not compute with is empty.
        module: The module that is saved; its names are those of the user's model.
        model: The module that the user's forward pass calls.
        failure_hooks: What passes need where workers are lost; one object for all divisions of a model.
        streams: ``backward`` gives only gradients of the slice that it was called with, each once and whole. So they
            may be taken while it runs.
        waits: Other workers wait for this one also in a pass whose result does not count.
        apart: The workers of a replica run slots of their own (``core.slots.apart``), and samples of their own
            in an evaluation. ``backward`` yields the slots of all of them.
        evaluates: The program evaluates: others may need this worker until it has called ``stand_in``.
    """

    split: Split
    parameters: list[nn.Parameter]
    module: nn.Module
    model: nn.Module
    failure_hooks: FailureHooks
    streams = True
    waits = False
    apart = False
    evaluates = False

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_parameters())
        self.split = undivided_blocks([(name, tuple(p.shape), str(p.dtype)[6:], p.requires_grad) for name, p in named])
        self.parameters = [p for _, p in named]
        self.module = self.model = module
        self.failure_hooks = FailureHooks()

    def enter(self, comms: Comms) -> None:
        """Take the place of worker ``comms.rank`` in ``comms.mesh`` from the next step on.

        Called at the beginning and after every change of workers or mesh. It must start no collective, because other
        workers may not have come this far.
        """

    def division_records(self, mesh: Mesh) -> tuple[LayersDivided | StagesDivided, ...]:
        """How the model is divided on ``mesh``, for the journal."""
        return ()

    def begin_step(self, parts: Sequence[BatchSlice]) -> None:
        """Begin a step. ``parts``: all slices that this worker runs in it."""

    def backward(self, loss: torch.Tensor, part: BatchSlice) -> Iterable[BatchSlice]:
        """Run the backward passes that are due with ``loss`` (the mean over the samples of ``part``) and its weight.

        A slice without weight is a copy of another one, for a worker that has no samples. Other workers may wait for
        this worker's part of it, but its gradients do not count.

        Yields:
            Every slice whose gradients have JUST been accumulated into the parameters' ``grad``, in order of slots:
            none at the first calls of a pipeline, several at the last. The caller takes the gradients away at each, so
            that they are always those of one slice. Slices that do not end their slot are yielded too, and their
            gradients stay and add up (``part.ends_slot``).
        """
        if part.weight or self.waits:
            (loss * part.weight).backward()
        yield part

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Context for a part of a pass that another division runs. Raises ``GroupBroken`` if that failed."""
        yield

    def in_parts(self, called: Sequence[str]) -> frozenset[str]:
        """The modules of ``called`` (in the order of a forward pass) before which a pipeline must not cut the model.

        A value before such a module may be in parts, so that a cut would change bits.
        """
        return frozenset()

    def whole(self, value: Any) -> Any:
        """``value``, from between two layers, with tensors that are in parts made whole, so that it can be sent."""
        return value

    def begin_evaluation(self) -> None:
        """Record that the program evaluates from here on."""
        self.evaluates = True

    def stand_in(self, until: Until | None = None, *, ends: bool = False) -> None:
        """End this worker's evaluation: take part in forward passes of others until none makes any. See
        ``Replica.stand_in``, also for ``until`` and ``ends``, with which the evaluation may go on.
        """

    def abandon(self) -> None:
        """Drop all unfinished passes, and everything that they keep."""


Parallelize = Callable[[ModelParallel, ExecutionSettings], ModelParallel]
"""Makes a finer division of a given one: "tensor" replaces layers of ``division.module`` by layers of blocks, and
"pipeline" then cuts the result into stages. Called once on every worker, before any storage is freed."""


def _raised(error: GroupBroken) -> NoReturn:
    raise error


@dataclass
class FailureHooks:
    """How a pass learns of lost workers and reports them; the run sets both (``train.checkpoints.run_state``).

    Attributes:
        step_lost: Whether the newest step is lost. The program then runs on to the end of its batch, and other workers
            may not make the same passes. So no pass may wait for others, and no result counts.
        meet: Called where a group breaks in a forward pass. It returns if the pass belongs to a step: that step is
            lost, and the result of the pass does not count.
    """

    step_lost: Callable[[], bool] = lambda: False
    meet: Callable[[GroupBroken], None] = _raised


def rng_states() -> list[torch.Tensor]:
    """The states of the random streams of the CPU and of this worker's accelerator.

    A micro-batch's stream travels from stage to stage with its activations.
    """
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def restore_rng_states(state: Sequence[torch.Tensor]) -> None:
    """Continue the random streams from ``rng_states`` of this worker or another one."""
    # Copies, because torch reads a state from the start of its storage and ignores the tensor's offset.
    torch.set_rng_state(state[0].cpu().clone())
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1].cpu().clone())
