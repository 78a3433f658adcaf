"""Pipeline parallelism under the user's own loop: how a model is cut, and this worker's part of a schedule.

``model(x)`` runs the schedule as far as this call makes it possible; ``backward`` runs what is due then.
Only the last stage computes the loss. On other stages a call returns a stand-in of the output's shape.
Tied parameters belong to the first layer that uses them. Their values travel with a step's first micro-batch to
later layers. Their gradients return with those of activations, added in the order of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from elastune.core.batch_slices import BatchSlice
from elastune.core.errors import UserError
from elastune.core.journal.records import LayersDivided, StagesDivided
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Schedule
from elastune.parallel.comm.group import GroupBroken
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.model_parallel import ModelParallel, restore_rng_states, rng_states
from elastune.parallel.mechanisms.pipeline.layers import Layers, layers_of
from elastune.parallel.mechanisms.pipeline.messages import StageChannel, blank, map_tensors, pack, shapes_of
from elastune.parallel.mechanisms.pipeline.schedules import CHUNKS, SCHEDULES, Action
from elastune.parallel.mechanisms.pipeline.stage import Chunk, Gradients, MicroBatchState

# [loans] Parameters that layers on several workers use (tied weights): one worker has them, the others borrow their values.
#
# The first layer that uses a parameter decides whose it is. Its values go along with the first micro-batch of a step (or
# of an evaluated batch) to later chunks that use it, and are dropped at its end. The gradients of a micro-batch come back
# with the gradients of activations, and each chunk's is added to those of later ones: the order in which autograd adds
# them up in one process.


class TiedParameters:
    """What worker ``rank`` of ``workers`` lends and borrows.

    Args:
        parameters: By leaf.
        used: By chunk: the parameters that it uses. Chunk c lies on worker ``c % workers``.
        workers: Stages of the pipeline.
        rank: Which of them this one is.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], used: Sequence[Sequence[nn.Parameter]], workers: int, rank: int
    ) -> None:
        self._parameters = parameters
        leaf_of = {id(p): param_block for param_block, p in enumerate(parameters)}
        users: dict[int, list[int]] = {}
        for chunk, own in enumerate(used):
            for p in own:
                users.setdefault(leaf_of[id(p)], []).append(chunk)
        self._users = {param_block: chunks for param_block, chunks in users.items() if len(chunks) > 1}
        self._borrowed_at = {
            param_block: [c for c in chunks if c % workers != chunks[0] % workers]
            for param_block, chunks in self._users.items()
        }
        self._borrows = {
            param_block for param_block, at in self._borrowed_at.items() if any(c % workers == rank for c in at)
        }
        self._passed_on: dict[int, torch.Tensor] = {}
        self._own: dict[int, torch.Tensor] = {}

    def shares(self, chunk: int) -> bool:
        """Whether ``chunk`` uses a parameter that another chunk uses too."""
        return any(chunk in chunks for chunks in self._users.values())

    def is_used_before(self, param_block: int, chunk: int) -> bool:
        """Whether a chunk before ``chunk`` uses ``param_block``."""
        return param_block in self._users and self._users[param_block][0] < chunk

    def lend(self, chunk: int) -> dict[str, torch.Tensor]:
        """What goes to ``chunk``: the values that it or a later one borrows, and that are here."""
        return {
            str(param_block): self._passed_on.get(param_block, self._parameters[param_block].detach())
            for param_block, at in self._borrowed_at.items()
            if at and at[-1] >= chunk > self._users[param_block][0]
        }

    def receive(self, lent: Mapping[str, torch.Tensor]) -> None:
        """What came for a chunk of this worker, or goes through it."""
        for name, values in lent.items():
            param_block = int(name)
            self._passed_on[param_block] = values
            if param_block in self._borrows and param_block not in self._own:
                self._own[param_block] = self._parameters[param_block].data
                self._parameters[param_block].data = values

    def drop(self) -> None:
        """The round is over: parameters are as they were before ``receive``."""
        for param_block, before in self._own.items():
            self._parameters[param_block].data = before
        self._own, self._passed_on = {}, {}


# [stand in] What a call of the model returns where the model's output is another stage's, or nobody's any more.


class PlaceholderOutputs:
    """Tensors of the output's shape for a call of ``layers``' model on ``device``.

    Descriptions (``parcel.pack``) are kept by what the call was made with, a ``key``.
    """

    def __init__(self, layers: Layers, device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._known: dict[str, str] = {}

    def knows(self, key: str) -> bool:
        """Whether the output of such a call was described."""
        return key in self._known

    def describe(self, key: str, text: str) -> None:
        """The output of such a call is ``text``."""
        self._known[key] = text

    def zeros(self, key: str) -> Any:
        """For a call that was described."""
        return map_tensors(lambda t: t.to(self._device), blank(self._known[key]))

    def made_up(self, key: str, values: list[Any]) -> Any:
        """For any call: this worker cannot ask what its output would be. It then runs all layers by itself, with zeros
        for parameters of other stages, a layer's at a time.
        """
        if self.knows(key):
            return self.zeros(key)
        given, trains = self._layers.probe(values, self._zeros_for), torch.is_grad_enabled()

        def as_output(t: torch.Tensor) -> torch.Tensor:
            return t.requires_grad_() if trains and t.is_floating_point() else t

        return map_tensors(as_output, given)

    @contextmanager
    def _zeros_for(self, layer: int) -> Iterator[None]:
        """Around a layer: its parameters are zeros where they are not here."""
        away = [p for p in self._layers.parameters_of(range(layer, layer + 1)) if not p.untyped_storage().size()]
        kept = [p.data for p in away]
        for p in away:
            p.data = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
        try:
            yield
        finally:
            for p, data in zip(away, kept, strict=True):
                p.data = data


# [division] A model in stages: the user's calls drive this worker's part of a schedule; their loop does not show it.
#
# ``model(x)`` runs the schedule as far as this call makes it possible, ``backward`` what then is due: on the last stage
# the forward pass whose output the call returns, on others what brings the step on; they return a stand-in for the
# output, since the loss is the last stage's affair.

Moved = dict[int, torch.Tensor]
"""Buffers that passes of one slot have moved, by their place among the model's."""


class PipelineParallel(ModelParallel):
    """``inner`` in stages; see ``ModelParallel``. Where the mesh has one stage it is ``inner`` itself.

    The model is the user's own, with another ``forward``: references to it stay good.
    """

    streams = False

    def __init__(
        self, inner: ModelParallel, layers: Layers, schedule: Schedule, costs: Sequence[float], weighed: str
    ) -> None:
        self.inner = inner
        self.parameters, self.module, self.model = inner.parameters, inner.module, inner.model
        self.failure_hooks = inner.failure_hooks
        first_user: dict[int, int] = {}
        for layer in range(layers.count):
            for p in layers.parameters_of(range(layer, layer + 1)):
                first_user.setdefault(id(p), layer)
        param_blocks = zip(inner.split.param_blocks, self.parameters, strict=True)
        placed = tuple(replace(param_block, layer=first_user.get(id(p), 0)) for param_block, p in param_blocks)
        chunks = CHUNKS if schedule == "interleaved" else 1
        self.split = replace(inner.split, param_blocks=placed, costs=tuple(costs), chunks=chunks)
        self._layers, self._weighed = layers, weighed
        self._schedule = schedule
        self._device = self.parameters[0].device
        self._buffers = list(self.module.buffers())
        self._start = [b.detach().clone() for b in self._buffers]
        self._stand_ins = PlaceholderOutputs(layers, self._device)
        self._channel_or_none: StageChannel | None = None
        self._chunks: dict[int, Chunk] = {}
        self._forget()

    def _forget(self) -> None:
        """No step is under way."""
        self._parts: list[BatchSlice] = []
        self._todo: list[Action] = []
        self._called = 0  # micro-batches whose forward pass the user has called for
        self._owes = False  # the newest one's backward pass
        self._inputs: dict[int, tuple[list[Any], list[torch.Tensor]]] = {}
        self._outputs: dict[int, tuple[Any, list[torch.Tensor]]] = {}
        self._flights: dict[tuple[int, int], MicroBatchState] = {}
        self._moved: dict[int, Moved] = {}  # by chunk: by its newest micro-batch's slot
        self._complete: dict[int, Moved] = {}  # by micro-batch: by its slot in all chunks
        self._dirty: set[int] = set()
        self._gradients: dict[int, Gradients] = {}  # by micro-batch
        self._due: list[int] = []  # micro-batches that are complete and were not told yet
        self._slot: Gradients = {}  # of the slot's earlier micro-batches
        self._autocast = (False, torch.bfloat16)

    # -- where it lies ------------------------------------------------------------------------------------------------

    def enter(self, comms: Comms) -> None:
        self.inner.enter(comms)
        group = comms.group("pipeline")
        if (
            self._channel_or_none is not None and self._channel_or_none.group is not group
        ):  # a group has one mail: whoever is rewound enters
            self._channel_or_none.close()  # the same one again
            self._channel_or_none = None
        self._forget()
        self._chunks = {}
        self.module.__dict__.pop("forward", None)
        if group.size == 1:
            return
        self._channel_or_none = self._channel_or_none or StageChannel(group, self._device)
        runs = self.split.stages(group.size)
        self._last, self._turns = len(runs) - 1, len(runs) // group.size
        self._loans = TiedParameters(
            self.parameters, [self._layers.parameters_of(run) for run in runs], group.size, group.rank
        )
        place_of = {id(p): i for i, p in enumerate(self.parameters)}
        for c in range(group.rank, len(runs), group.size):
            splits = not self._loans.shares(c)
            trained = {place_of[id(p)]: p for p in self._layers.parameters_of(runs[c]) if p.requires_grad}
            self._chunks[c] = Chunk(self._layers, runs[c], trained, self.inner.whole, splits=splits)
        self._first_own = min(self._chunks)
        self.module.forward = self._forward

    def told(self, mesh: Mesh) -> tuple[LayersDivided | StagesDivided, ...]:
        if mesh.pipeline == 1:
            return self.inner.told(mesh)
        runs, costs, names = self.split.stages(mesh.pipeline), self.split.costs, ("the input", *self._layers.names)
        shares = [sum(costs[layer] for layer in run) / sum(costs) for run in runs]
        return (*self.inner.told(mesh), StagesDivided([names[run.start] for run in runs], shares, self._weighed))

    # -- the user's calls ---------------------------------------------------------------------------------------------

    def begin_step(self, parts: Sequence[BatchSlice]) -> None:
        self.inner.begin_step(parts)
        if self._channel_or_none is None:
            return
        self._drop_tied_values()
        self._forget()
        self._parts = list(parts)
        self._channel_or_none.begin_step()
        self._todo = SCHEDULES[self._schedule](
            self._channel_or_none.size, self._channel_or_none.rank, len(parts), self._turns
        )
        if self._buffers:
            torch._foreach_copy_(self._start, [b.detach() for b in self._buffers])

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's ``forward``. Where a step is lost a stand-in: the user's lines run on without effect."""
        values = self._bound(args, kwargs)
        described = f"{torch.is_grad_enabled()} {self.module.training} {shapes_of(values)}"
        if not self.failure_hooks.step_lost():
            try:
                return self._passed(values, described)
            except GroupBroken as error:
                self.failure_hooks.meet(error)
        return self._stand_ins.made_up(described, values)

    def _passed(self, values: list[Any], key: str) -> Any:
        trains = torch.is_grad_enabled() and self._called < len(self._parts)
        if trains and self._owes:
            fix = "call the model once, on all that the loss needs"
            raise UserError("a pipeline runs the model once for each training batch", "a second call", fix)
        if trains:
            self._called, self._owes = self._called + 1, True
        with self._channel.failures_told():
            return self._train(values, key) if trains else self._look(values, key)

    def _train(self, values: list[Any], key: str) -> Any:
        """What the user's newest call for a training batch returns."""
        mail, k = self._channel, self._called - 1
        self._autocast = torch.is_autocast_enabled(self._device.type), torch.get_autocast_dtype(self._device.type)
        if 0 in self._chunks:
            self._inputs[k] = values, rng_states()
        new = key not in mail.described
        self._due.extend(self._run(until=self._called_for(k), out_of_turn=new))
        mail.described.add(key)
        if self._last in self._chunks:
            output, state = self._outputs.pop(k)
            if new:
                text = pack(output)[0]
                self._stand_ins.describe(key, text)
                mail.tell_all("shape", k, text)
            restore_rng_states(state)
            return output
        if new:
            self._stand_ins.describe(key, mail.take_text("shape", k, self._run_ahead))
        return self._stand_ins.zeros(key)

    def backward(self, loss: torch.Tensor, part: BatchSlice) -> Iterable[BatchSlice]:
        if self._channel_or_none is None:
            yield from self.inner.backward(loss, part)
            return
        if not self._owes:
            rule, fix = "a pipeline learns from what its model returned", "call model(...) before session.backward"
            raise UserError(rule, "no call of the model for this batch", fix)
        k, self._owes = self._called - 1, False
        if self._last in self._chunks:
            weighted = loss * part.weight
            self._flights[self._last, k].outputs = [weighted] if weighted.requires_grad else []
        upcoming = self._called_for(k + 1) if k + 1 < len(self._parts) else None
        with self._channel_or_none.failures_told():
            for done in chain(self._due, self._run(before=upcoming)):
                yield self._settled(done)
        self._due = []
        if not self._todo:
            self._drop_tied_values()

    def abandon(self) -> None:
        self.inner.abandon()
        if self._channel_or_none is not None and self._todo:
            self._channel_or_none.drop_step()
        self._drop_tied_values()
        self._forget()

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The model's inputs, in the order of its layers'. Raises ``UserError`` for others than those."""
        names = self._layers.inputs
        values = dict(zip(names, args, strict=False)) | kwargs
        if set(values) != set(names) or len(args) > len(names):
            rule = f"a model in a pipeline is called with its inputs that have no default: {', '.join(names)}"
            raise UserError(rule, ", ".join([*names[: len(args)], *kwargs]) or "nothing", "give those alone")
        return [values[name] for name in names]

    @property
    def _channel(self) -> StageChannel:
        if self._channel_or_none is None:
            raise RuntimeError("this worker is in no pipeline")
        return self._channel_or_none

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _look(self, values: list[Any], key: str) -> Any:
        """A forward pass that no backward pass follows; every stage returns the output."""
        if self._owes or (self._turns > 1 and 0 < self._called < len(self._parts)):
            fix = "evaluate between steps, or use --schedule 1f1b"
            raise UserError("a model in a pipeline is evaluated between steps", "an evaluation inside of one", fix)
        mail, state, moved = self._channel, rng_states(), {}
        mail.begin_look()
        with torch.no_grad(), self.inner.passing():
            for c, chunk in self._chunks.items():
                if c:
                    values, state, moved, lent = mail.take("look", c, 0)
                    self._loans.receive(lent)
                for place, value in moved.items():
                    self._buffers[int(place)].copy_(value)
                restore_rng_states(state)
                with chunk.moving() as now:
                    given = chunk.look(values)
                state = rng_states()
                moved |= {str(place): value for place, value in now.items()}
                for place, value in now.items():
                    self._buffers[place].copy_(value)
                if c < self._last:
                    mail.give("look", c + 1, 0, [given, state, moved, self._loans.lend(c + 1)])
                else:
                    mail.tell_all("seen", 0, *pack([given, state, moved]))
            if not self._todo:  # else they are the step's
                self._drop_tied_values()
            if self._last not in self._chunks:
                given, state, moved = mail.take("seen", 0, 0)
                for place, value in moved.items():
                    self._buffers[int(place)].copy_(value)
                restore_rng_states(state)
        return map_tensors(torch.Tensor.detach, given)

    def _drop_tied_values(self) -> None:
        if self._channel_or_none is not None:
            self._loans.drop()

    # -- the schedule -------------------------------------------------------------------------------------------------

    def _called_for(self, k: int) -> Action:
        """What this worker has to do for the user's call for micro-batch ``k``: on the last stage what yields the
        output, on the first what needs the input, on the others what is nearest to those.
        """
        return Action("forward", self._last if self._last in self._chunks else self._first_own, k)

    def _run(
        self, *, until: Action | None = None, before: Action | None = None, out_of_turn: bool = False
    ) -> Iterator[int]:
        """Do what stands next: up to and with ``until``; up to ``before``; or all that is left. What needs a
        micro-batch that the user has not called for yet, and that is not here yet, may wait until he has.

        Yields each micro-batch whose gradients are complete.
        """
        while self._todo and self._todo[0] != before and (until is None or until in self._todo):
            action = self._todo[0]
            if self._can_do(action):
                if self._do(action):
                    yield action.batch
            elif until is None and action.kind == "forward" and action.batch >= self._called:
                return
            elif not (out_of_turn and self._run_ahead()):
                self._channel.wait()

    def _run_ahead(self) -> bool:
        """Do a forward pass that can be done at once, out of turn, of a micro-batch that the user has called for:
        others need it to come as far as this worker. False where there is none.
        """
        seen = set()
        for action in self._todo:
            if action.kind == "forward" and action.chunk not in seen and action.batch < self._called:
                seen.add(action.chunk)
                if self._can_do(action):
                    self._do(action)
                    return True
        return False

    def _can_do(self, action: Action) -> bool:
        """Whether all that it needs is here."""
        c, k = action.chunk, action.batch
        if action.kind == "weight":
            return True
        if action.kind == "forward":
            return k in self._inputs if c == 0 else self._channel.has("forward", c, k)
        return c == self._last or self._channel.has("backward", c, k)

    def _do(self, action: Action) -> bool:
        """One action; whether its micro-batch's gradients are complete with it."""
        self._todo.remove(action)
        c, k = action.chunk, action.batch
        with self.inner.passing():
            if action.kind == "forward":
                self._do_forward(c, k)
            elif action.kind == "weight":
                found = self._chunks[c].backward_to_weights(self._flights.pop((c, k)))
                self._gradients.setdefault(k, {}).update(found)
            else:
                self._do_backward(c, k, halves=action.kind == "input")
        if action.kind == "forward":
            return False
        return action.kind != "input" and c == self._first_own

    def _do_forward(self, c: int, k: int) -> None:
        chunk, moved = self._chunks[c], {} if self._begins_slot(k) else dict(self._moved[c])
        if c == 0:
            values, state = self._inputs.pop(k)
        else:
            values, state, came, lent = self._channel.take("forward", c, k)
            moved |= {int(place): value for place, value in came.items()}
            self._loans.receive(lent)
        self._put_buffers(moved)
        restore_rng_states(state)
        on, dtype = self._autocast
        with torch.enable_grad(), torch.autocast(self._device.type, dtype=dtype, enabled=on), chunk.moving() as now:
            given, flight = chunk.forward(values, came=c > 0)
        state = rng_states()
        moved |= now
        self._dirty |= set(now)
        self._flights[c, k], self._moved[c] = flight, moved
        if c == self._last:
            self._outputs[k], self._complete[k] = (given, state), moved
        else:
            lent = self._loans.lend(c + 1) if k == 0 else {}
            told = {str(place): value for place, value in moved.items()}
            self._channel.give("forward", c + 1, k, [given, state, told, lent])

    def _do_backward(self, c: int, k: int, *, halves: bool) -> None:
        chunk, flight = self._chunks[c], self._flights[c, k]
        shared: Gradients = {}
        if c == self._last:
            gradients: list[torch.Tensor | None] = [torch.ones_like(loss) for loss in flight.outputs]
        else:
            gradients, told, came = self._channel.take("backward", c, k)
            self._complete[k] = {int(place): value for place, value in told.items()}
            shared = {int(param_block): gradient for param_block, gradient in came.items()}
        earlier = {
            param_block: shared.pop(param_block) for param_block in list(shared) if param_block in chunk.parameters
        }
        if halves:
            found = chunk.backward_to_inputs(flight, gradients, earlier)
        else:
            found = chunk.backward(flight, gradients, earlier)
            del self._flights[c, k]
        for param_block in [param_block for param_block in found if self._loans.is_used_before(param_block, c)]:
            shared[param_block] = found.pop(param_block)
        if c > 0:
            back = list(flight.arrival.gradients) or [None] * len(flight.arrival.tensors)
            told = {str(place): value for place, value in self._complete[k].items()}
            credit = {str(param_block): gradient for param_block, gradient in shared.items()}
            self._channel.give("backward", c - 1, k, [back, told, credit])
        self._gradients.setdefault(k, {}).update(found)

    def _begins_slot(self, k: int) -> bool:
        return k == 0 or self._parts[k - 1].ends_slot

    def _settled(self, k: int) -> BatchSlice:
        """All gradients of micro-batch ``k`` are there: with a slot's last one they go to the parameters. Buffers are
        as it has left them.
        """
        part, found, moved = self._parts[k], self._gradients.pop(k), self._complete.pop(k)
        for param_block, gradient in found.items():
            self._slot[param_block] = self._slot[param_block].add_(gradient) if param_block in self._slot else gradient
        if part.ends_slot:
            for param_block, gradient in self._slot.items():
                self.parameters[param_block].grad = gradient
            self._slot = {}
        self._put_buffers(moved)
        return part

    def _put_buffers(self, moved: Moved) -> None:
        """Buffers are as at the step's start, but for ``moved``. Not noted by autograd: passes in flight stay good."""
        for place in self._dirty | set(moved):
            self._buffers[place].data.copy_(moved.get(place, self._start[place]))
        self._dirty = set(moved)


# [divide] The ``pipeline`` part of a mechanism: how a model is to be cut, and the division that comes of it.


@dataclass(frozen=True)
class Pipeline:
    """A plan for ``pipeline``: how to cut a model into stages.

    Attributes:
        cuts: Names of modules (as in ``named_modules``). The model may be cut before these modules and nowhere else;
            with one name fewer than there are stages, it is cut there. Empty: it may be cut before every module that
            its forward pass calls.
        costs: What each layer costs, in any unit; layers begin with the model's first and at each of ``cuts``. None:
            costs are counted with ``example``.
        example: Inputs that the model can be called with, a few samples. A layer then costs the floating-point
            operations of its matrix products, convolutions and attention, counted in one forward pass. None: a layer
            costs the number of its parameters.

    Example:
        >>> model, optimizer = session.prepare(model, optimizer, plan=Pipeline(cuts=("blocks.4", "blocks.8")))
    """

    cuts: tuple[str, ...] = ()
    costs: tuple[float, ...] | None = None
    example: tuple[Any, ...] | None = None


def plan_stages(model: nn.Module, plan: Pipeline) -> nn.Module:
    """Note how the mechanism ``pipeline`` is to cut ``model``, and return the model itself.

    Example:
        >>> model = plan_stages(model, Pipeline(cuts=("blocks.4", "blocks.8")))
        >>> model, optimizer = session.prepare(model, optimizer)
    """
    model.__dict__["_pipeline_plan"] = plan
    return model


def pipeline_of(model: nn.Module) -> Pipeline:
    """What ``plan_stages`` has noted."""
    plan: Pipeline = model.__dict__.get("_pipeline_plan") or Pipeline()
    return plan


def divide(division: ModelParallel, execution: ExecutionSettings) -> PipelineParallel:
    """``division`` in stages, as ``plan_stages`` has noted.

    Raises:
        UserError: Where the model cannot be followed or has fewer layers than the mesh has stages; the same on every
            worker.
    """
    plan = pipeline_of(division.module)
    layers = layers_of(division.module, plan.cuts)
    layers = layers.without_cuts(division.in_parts([str(n.target) for n in layers.nodes if n.op == "call_module"]))
    check_stages(layers, execution.mesh or Mesh())
    costs, weighed = _costs(layers, plan)
    if len(costs) != layers.count:
        rule = "a plan's costs are those of its layers"
        raise UserError(rule, f"{len(costs)} costs of {layers.count} layers", "give one for the start and one a cut")
    return PipelineParallel(division, layers, execution.schedule, costs, weighed)


def _costs(layers: Layers, plan: Pipeline) -> tuple[Sequence[float], str]:
    """What each layer costs, and what that is."""
    if plan.costs is not None:
        return plan.costs, "the program's costs"
    if plan.example is not None:
        return counted_costs(layers, plan.example), "counted operations"
    return estimated_costs(layers), "numbers of parameters"


def check_stages(layers: Layers, mesh: Mesh) -> None:
    """Raise ``UserError`` where there are fewer layers than stages."""
    if mesh.pipeline > layers.count:
        told = f"pipeline={mesh.pipeline}, {layers.count} layers"
        raise UserError("a pipeline has at least one layer a stage", told, f"use pipeline={layers.count} or fewer")


def estimated_costs(layers: Layers) -> Sequence[float]:
    """By layer: the numbers in its parameters, as *modelled* time; a layer without any costs a little."""
    return _none_free([sum(p.numel() for p in layers.parameters_of(range(i, i + 1))) for i in range(layers.count)])


def counted_costs(layers: Layers, example: Sequence[Any]) -> Sequence[float]:
    """By layer: floating-point operations of a forward pass of ``example``. Counts are equal on every worker, whenever
    it comes, as times would not be; what is not counted (a layer without products) costs a little.

    Raises:
        UserError: Where ``example`` is not what the model is called with.
    """
    from torch.utils.flop_counter import FlopCounterMode  # takes long to import

    if len(example) != len(layers.inputs):
        rule = f"an example has the model's inputs that have no default: {', '.join(layers.inputs)}"
        raise UserError(rule, f"{len(example)} values", "give a tuple of them")
    device = next(layers.module.parameters()).device
    counts = [FlopCounterMode(display=False) for _ in range(layers.count)]
    layers.probe(map_tensors(lambda t: t.to(device), list(example)), lambda layer: counts[layer])
    return _none_free([count.get_total_flops() for count in counts])


def _none_free(costs: Sequence[float]) -> Sequence[float]:
    return [cost + max(1, max(costs)) * 1e-3 for cost in costs]
