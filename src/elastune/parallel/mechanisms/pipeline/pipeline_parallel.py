"""Pipeline parallelism under the user's own loop: the schedules, how a model is cut, and a worker's part of a schedule.

``model(x)`` runs the schedule as far as this call makes it possible; ``backward`` then runs the passes that are due.
Only the last stage computes the loss. On other stages a call returns a placeholder of the output's shape. Tied
parameters belong to the first layer that uses them. Their values travel with a step's first micro-batch to later
layers. Their gradients return with those of activations, added in the order of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.journal.records import LayersDivided, StagesDivided
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Schedule
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.group import GroupBroken
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms import torch_private
from elastune.parallel.mechanisms.base import ModelParallel, restore_rng_states, rng_states
from elastune.parallel.mechanisms.pipeline.layers import Layers, layers_of
from elastune.parallel.mechanisms.pipeline.stage import (
    Chunk,
    Gradients,
    MicroBatchState,
    StageChannel,
    blank,
    map_tensors,
    pack,
    shapes_of,
)

# The order in which a stage's worker runs its passes: pure lists of actions, one for each worker.
#
# A model is cut into ``workers x chunks`` runs of layers, numbered in the order in which a sample goes through them.
# Chunk c lies on worker ``c % workers``. The lists of a schedule never deadlock together: some worker can always run
# the first action that it has not done. Tests run all lists.
#
# Sources: GPipe: Huang et al., arXiv 1811.06965. 1F1B: PipeDream-Flush in Narayanan et al., arXiv 2006.09503.
# Interleaved 1F1B: Narayanan et al., arXiv 2104.04473, section 2.2.2. Zero bubble (ZB-H1): Qi et al., arXiv
# 2401.10241.

Kind = Literal["forward", "backward", "input", "weight"]
"""``backward`` is a whole backward pass; ``input`` and ``weight`` are its halves, which may lie apart."""
CHUNKS = 2
"""Chunks of layers on each worker of an interleaved pipeline, if the model has enough layers."""


@dataclass(frozen=True)
class Action:
    """One pass of micro-batch ``batch`` (counted from 0 in each step) through chunk ``chunk``."""

    kind: Kind
    chunk: int
    batch: int


def gpipe(workers: int, worker: int, batches: int, chunks: int = 1) -> list[Action]:
    """All forward passes, then all backward passes. In flight: all ``batches``."""
    own_chunks = [worker + workers * i for i in range(chunks)]
    forward = [Action("forward", chunk, k) for chunk in own_chunks for k in range(batches)]
    return forward + [Action("backward", chunk, k) for chunk in reversed(own_chunks) for k in range(batches)]


def one_f_one_b(workers: int, worker: int, batches: int, chunks: int = 1) -> list[Action]:
    """Each backward pass as soon as possible. In flight on worker p: at most ``workers - p``."""
    return _alternate(
        [Action("forward", worker, k) for k in range(batches)],
        [[Action("backward", worker, k)] for k in range(batches)],
        workers - 1 - worker,
    )


def zero_bubble(workers: int, worker: int, batches: int, chunks: int = 1) -> list[Action]:
    """ZB-H1: 1F1B that delays gradients of weights, so that they fill idle time.

    Worker p delays them by p micro-batches. So every worker has at most ``workers`` micro-batches in flight, as many as
    the first worker of 1F1B.
    """
    back = []
    for k in range(batches):
        late = [Action("weight", worker, k - worker)] if k >= worker else []
        back.append([Action("input", worker, k), *late])
    rest = [Action("weight", worker, k) for k in range(max(0, batches - worker), batches)]
    return _alternate([Action("forward", worker, k) for k in range(batches)], back, workers - 1 - worker) + rest


def interleaved(workers: int, worker: int, batches: int, chunks: int = CHUNKS) -> list[Action]:
    """1F1B over ``chunks`` chunks a worker: a bubble ``chunks`` times shorter, and as many times the messages.

    Micro-batches go through the chunks in rounds of ``workers`` micro-batches. The last round may be shorter, a case
    that the source does not treat: forward passes then all run first.
    """
    if chunks == 1:
        return one_f_one_b(workers, worker, batches)
    passes = [
        (turn, k)
        for start in range(0, batches, workers)
        for turn in range(chunks)
        for k in range(start, min(start + workers, batches))
    ]
    forward = [Action("forward", worker + workers * turn, k) for turn, k in passes]
    back = [[Action("backward", worker + workers * (chunks - 1 - turn), k)] for turn, k in passes]
    ahead = 2 * (workers - 1 - worker) + (chunks - 1) * workers
    return _alternate(forward, back, ahead if batches % workers == 0 else len(forward))


def _alternate(forward: list[Action], back: list[list[Action]], ahead: int) -> list[Action]:
    """``ahead`` forward passes, then alternately a forward pass and an item of ``back``, then the rest of ``back``."""
    ahead = min(ahead, len(forward))
    actions = forward[:ahead]
    for i, group in enumerate(back):
        actions += [*forward[ahead + i : ahead + i + 1], *group]
    return actions


SCHEDULES: Mapping[Schedule, Callable[[int, int, int, int], list[Action]]] = MappingProxyType(
    {"1f1b": one_f_one_b, "gpipe": gpipe, "interleaved": interleaved, "zero-bubble": zero_bubble}
)


# Pipeline parallelism under the user's own loop: how a model is cut, and this worker's part of a schedule.

Moved = dict[int, torch.Tensor]
"""The buffers that passes of one slot have changed, by their place among the model's buffers."""


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
    """Record on ``model`` how the mechanism ``pipeline`` is to cut it, and return ``model``.

    Example:
        >>> model = plan_stages(model, Pipeline(cuts=("blocks.4", "blocks.8")))
        >>> model, optimizer = session.prepare(model, optimizer)
    """
    model.__dict__["_pipeline_plan"] = plan
    return model


def pipeline_of(model: nn.Module) -> Pipeline:
    """The plan that ``plan_stages`` recorded on ``model``."""
    plan: Pipeline = model.__dict__.get("_pipeline_plan") or Pipeline()
    return plan


def divide_into_stages(division: ModelParallel, execution: ExecutionSettings) -> PipelineParallel:
    """``division`` in stages, by the plan that ``plan_stages`` recorded.

    Raises:
        UserError: Where torch.fx cannot follow the model, or where it has fewer layers than the mesh has stages. The
            error is the same on every worker.
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


def check_stages(layers: Layers, mesh: Mesh) -> None:
    """Raise ``UserError`` where the model has fewer layers than the mesh has stages."""
    if mesh.pipeline > layers.count:
        numbers = f"pipeline={mesh.pipeline}, {layers.count} layers"
        raise UserError("a pipeline has at least one layer a stage", numbers, f"use pipeline={layers.count} or fewer")


def _costs(layers: Layers, plan: Pipeline) -> tuple[Sequence[float], str]:
    """The cost of each layer, and how it was found (for the journal)."""
    if plan.costs is not None:
        return plan.costs, "the program's costs"
    if plan.example is not None:
        return counted_costs(layers, plan.example), "counted operations"
    return estimated_costs(layers), "numbers of parameters"


def estimated_costs(layers: Layers) -> Sequence[float]:
    """For each layer the number of its parameters, as *modelled* time. A layer without parameters costs a little."""
    return _all_positive([sum(p.numel() for p in layers.parameters_of(range(i, i + 1))) for i in range(layers.count)])


def counted_costs(layers: Layers, example: Sequence[Any]) -> Sequence[float]:
    """For each layer the floating-point operations of a forward pass of ``example``.

    Counts are equal on every worker at any time; measured times would not be. A layer without products costs a little.

    Raises:
        UserError: Where ``example`` does not fit the model's inputs.
    """
    from torch.utils.flop_counter import FlopCounterMode  # takes long to import

    if len(example) != len(layers.inputs):
        rule = f"an example has the model's inputs that have no default: {', '.join(layers.inputs)}"
        raise UserError(rule, f"{len(example)} values", "give a tuple of them")
    device = next(layers.module.parameters()).device
    counts = [FlopCounterMode(display=False) for _ in range(layers.count)]
    layers.probe(map_tensors(lambda t: t.to(device), list(example)), lambda layer: counts[layer])
    return _all_positive([count.get_total_flops() for count in counts])


def _all_positive(costs: Sequence[float]) -> Sequence[float]:
    return [cost + max(1, max(costs)) * 1e-3 for cost in costs]


class PipelineParallel(ModelParallel):
    """Runs a model in stages: the user's calls drive this worker's part of a schedule. See ``ModelParallel``.

    On a mesh with one stage it does what ``inner`` does. The model stays the user's object and gets another
    ``forward``, so references to it stay valid.
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
        self._placeholders = PlaceholderOutputs(layers, self._device)
        self._channel_or_none: StageChannel | None = None
        self._chunks: dict[int, Chunk] = {}
        self._forget()

    def _forget(self) -> None:
        """No step is running."""
        self._parts: list[BatchSlice] = []
        self._todo: list[Action] = []
        self._called = 0  # micro-batches for which the user has called the model
        self._owes = False  # the backward pass of the newest micro-batch is still to come
        self._inputs: dict[int, tuple[list[Any], list[torch.Tensor]]] = {}
        self._outputs: dict[int, tuple[Any, list[torch.Tensor]]] = {}
        self._in_flight: dict[tuple[int, int], MicroBatchState] = {}
        self._moved: dict[int, Moved] = {}  # by chunk, after its newest micro-batch
        self._complete: dict[int, Moved] = {}  # by micro-batch, after all chunks
        self._dirty: set[int] = set()
        self._gradients: dict[int, Gradients] = {}  # by micro-batch
        self._due: list[int] = []  # micro-batches that are complete and not yet yielded
        self._slot: Gradients = {}  # of the slot's earlier micro-batches
        self._autocast = (False, torch.bfloat16)

    # -- the layout ---------------------------------------------------------------------------------------------------

    def enter(self, comms: Comms) -> None:
        self.inner.enter(comms)
        group = comms.group("pipeline")
        # A group has one channel, which stays if this worker enters the same group again.
        if self._channel_or_none is not None and self._channel_or_none.group is not group:
            self._channel_or_none.close()
            self._channel_or_none = None
        self._forget()
        self._chunks = {}
        self.module.__dict__.pop("forward", None)
        if group.size == 1:
            return
        self._channel_or_none = self._channel_or_none or StageChannel(group, self._device)
        runs = self.split.stages(group.size)
        self._last, self._turns = len(runs) - 1, len(runs) // group.size
        self._tied = TiedParameters(
            self.parameters, [self._layers.parameters_of(run) for run in runs], group.size, group.rank
        )
        place_of = {id(p): i for i, p in enumerate(self.parameters)}
        for c in range(group.rank, len(runs), group.size):
            splits = not self._tied.shares(c)
            trained = {place_of[id(p)]: p for p in self._layers.parameters_of(runs[c]) if p.requires_grad}
            self._chunks[c] = Chunk(self._layers, runs[c], trained, self.inner.whole, splits=splits)
        self._first_own = min(self._chunks)
        self.module.forward = self._forward

    def division_records(self, mesh: Mesh) -> tuple[LayersDivided | StagesDivided, ...]:
        if mesh.pipeline == 1:
            return self.inner.division_records(mesh)
        runs, costs, names = self.split.stages(mesh.pipeline), self.split.costs, ("the input", *self._layers.names)
        shares = [sum(costs[layer] for layer in run) / sum(costs) for run in runs]
        return (
            *self.inner.division_records(mesh),
            StagesDivided([names[run.start] for run in runs], shares, self._weighed),
        )

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
            torch_private.foreach_copy_(self._start, [b.detach() for b in self._buffers])

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's ``forward``. In a lost step it returns a placeholder, and the program runs on."""
        values = self._bound(args, kwargs)
        described = f"{torch.is_grad_enabled()} {self.module.training} {shapes_of(values)}"
        if not self.failure_hooks.step_lost():
            try:
                return self._called_with(values, described)
            except GroupBroken as error:
                self.failure_hooks.meet(error)
        return self._placeholders.placeholder(described, values)

    def _called_with(self, values: list[Any], key: str) -> Any:
        trains = torch.is_grad_enabled() and self._called < len(self._parts)
        if trains and self._owes:
            fix = "call the model once, on all that the loss needs"
            raise UserError("a pipeline runs the model once for each training batch", "a second call", fix)
        if trains:
            self._called, self._owes = self._called + 1, True
        with self._channel.failures_reported():
            return self._train(values, key) if trains else self._evaluate(values, key)

    def _train(self, values: list[Any], key: str) -> Any:
        """Run the schedule for a training batch and return the result of the user's call."""
        channel, k = self._channel, self._called - 1
        self._autocast = torch.is_autocast_enabled(self._device.type), torch.get_autocast_dtype(self._device.type)
        if 0 in self._chunks:
            self._inputs[k] = values, rng_states()
        new = key not in channel.described
        self._due.extend(self._run(until=self._called_for(k), out_of_turn=new))
        channel.described.add(key)
        if self._last in self._chunks:
            output, state = self._outputs.pop(k)
            if new:
                text = pack(output)[0]
                self._placeholders.describe(key, text)
                channel.send_to_all("shape", k, text)
            restore_rng_states(state)
            return output
        if new:
            self._placeholders.describe(key, channel.take_text("shape", k, self._run_ahead))
        return self._placeholders.zeros(key)

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
            self._in_flight[self._last, k].outputs = [weighted] if weighted.requires_grad else []
        upcoming = self._called_for(k + 1) if k + 1 < len(self._parts) else None
        with self._channel_or_none.failures_reported():
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
        """The model's inputs in the order of ``Layers.inputs``. Raises ``UserError`` for missing or other inputs."""
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

    def _evaluate(self, values: list[Any], key: str) -> Any:
        """Run a forward pass without a backward pass. Every stage returns the output."""
        if self._owes or (self._turns > 1 and 0 < self._called < len(self._parts)):
            fix = "evaluate between steps, or use --schedule 1f1b"
            raise UserError("a model in a pipeline is evaluated between steps", "an evaluation inside of one", fix)
        channel, state, moved = self._channel, rng_states(), {}
        channel.begin_evaluated_batch()
        with torch.no_grad(), self.inner.passing():
            for c, chunk in self._chunks.items():
                if c:
                    values, state, moved, lent = channel.take("look", c, 0)
                    self._tied.receive(lent)
                for place, value in moved.items():
                    self._buffers[int(place)].copy_(value)
                restore_rng_states(state)
                with chunk.moving() as changed:
                    output = chunk.evaluate(values)
                state = rng_states()
                moved |= {str(place): value for place, value in changed.items()}
                for place, value in changed.items():
                    self._buffers[place].copy_(value)
                if c < self._last:
                    channel.give("look", c + 1, 0, [output, state, moved, self._tied.lend(c + 1)])
                else:
                    channel.send_to_all("seen", 0, *pack([output, state, moved]))
            if not self._todo:  # else the step needs them
                self._drop_tied_values()
            if self._last not in self._chunks:
                output, state, moved = channel.take("seen", 0, 0)
                for place, value in moved.items():
                    self._buffers[int(place)].copy_(value)
                restore_rng_states(state)
        return map_tensors(torch.Tensor.detach, output)

    def _drop_tied_values(self) -> None:
        if self._channel_or_none is not None:
            self._tied.drop()

    # -- the schedule -------------------------------------------------------------------------------------------------

    def _called_for(self, k: int) -> Action:
        """The action that this worker must have done when the user's call for micro-batch ``k`` returns.

        On the last stage it gives the output; on other stages it is the forward pass through the first chunk.
        """
        return Action("forward", self._last if self._last in self._chunks else self._first_own, k)

    def _run(
        self, *, until: Action | None = None, before: Action | None = None, out_of_turn: bool = False
    ) -> Iterator[int]:
        """Do the next actions: up to and including ``until``, up to ``before``, or all that are left.

        Without ``until`` it stops at a forward pass of a micro-batch that the user has not called for and that has not
        arrived. ``out_of_turn``: forward passes may run earlier than the schedule has them.

        Yields:
            Each micro-batch whose gradients are complete.
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
        """Run one forward pass out of turn, of a micro-batch that the user has called for and that has arrived.

        Other stages need it to come as far as this one. Returns False where no such pass exists.
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
        """Whether everything that ``action`` needs has arrived."""
        c, k = action.chunk, action.batch
        if action.kind == "weight":
            return True
        if action.kind == "forward":
            return k in self._inputs if c == 0 else self._channel.has("forward", c, k)
        return c == self._last or self._channel.has("backward", c, k)

    def _do(self, action: Action) -> bool:
        """Do one action. Returns whether it completes the gradients of its micro-batch on this worker."""
        self._todo.remove(action)
        c, k = action.chunk, action.batch
        with self.inner.passing():
            if action.kind == "forward":
                self._do_forward(c, k)
            elif action.kind == "weight":
                gradients = self._chunks[c].backward_to_weights(self._in_flight.pop((c, k)))
                self._gradients.setdefault(k, {}).update(gradients)
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
            values, state, changed_before, lent = self._channel.take("forward", c, k)
            moved |= {int(place): value for place, value in changed_before.items()}
            self._tied.receive(lent)
        self._put_buffers(moved)
        restore_rng_states(state)
        on, dtype = self._autocast
        with torch.enable_grad(), torch.autocast(self._device.type, dtype=dtype, enabled=on), chunk.moving() as changed:
            outputs, kept = chunk.forward(values, from_stage=c > 0)
        state = rng_states()
        moved |= changed
        self._dirty |= set(changed)
        self._in_flight[c, k], self._moved[c] = kept, moved
        if c == self._last:
            self._outputs[k], self._complete[k] = (outputs, state), moved
        else:
            lent = self._tied.lend(c + 1) if k == 0 else {}
            named = {str(place): value for place, value in moved.items()}
            self._channel.give("forward", c + 1, k, [outputs, state, named, lent])

    def _do_backward(self, c: int, k: int, *, halves: bool) -> None:
        chunk, kept = self._chunks[c], self._in_flight[c, k]
        shared: Gradients = {}
        if c == self._last:
            gradients: list[torch.Tensor | None] = [torch.ones_like(loss) for loss in kept.outputs]
        else:
            gradients, named, from_later = self._channel.take("backward", c, k)
            self._complete[k] = {int(place): value for place, value in named.items()}
            shared = {int(param_block): gradient for param_block, gradient in from_later.items()}
        earlier = {
            param_block: shared.pop(param_block) for param_block in list(shared) if param_block in chunk.parameters
        }
        if halves:
            own_gradients = chunk.backward_to_inputs(kept, gradients, earlier)
        else:
            own_gradients = chunk.backward(kept, gradients, earlier)
            del self._in_flight[c, k]
        for param_block in [param_block for param_block in own_gradients if self._tied.is_used_before(param_block, c)]:
            shared[param_block] = own_gradients.pop(param_block)
        if c > 0:
            to_inputs = list(kept.received.gradients) or [None] * len(kept.received.tensors)
            named = {str(place): value for place, value in self._complete[k].items()}
            credit = {str(param_block): gradient for param_block, gradient in shared.items()}
            self._channel.give("backward", c - 1, k, [to_inputs, named, credit])
        self._gradients.setdefault(k, {}).update(own_gradients)

    def _begins_slot(self, k: int) -> bool:
        return k == 0 or self._parts[k - 1].ends_slot

    def _settled(self, k: int) -> BatchSlice:
        """Take the complete gradients of micro-batch ``k``. After a slot's last one they go to the parameters.

        Buffers get the values that the micro-batch left.
        """
        part, gradients, moved = self._parts[k], self._gradients.pop(k), self._complete.pop(k)
        for param_block, gradient in gradients.items():
            self._slot[param_block] = self._slot[param_block].add_(gradient) if param_block in self._slot else gradient
        if part.ends_slot:
            for param_block, gradient in self._slot.items():
                self.parameters[param_block].grad = gradient
            self._slot = {}
        self._put_buffers(moved)
        return part

    def _put_buffers(self, moved: Moved) -> None:
        """Set buffers to the step's start, except for ``moved``. Autograd does not see it: graphs stay valid."""
        for place in self._dirty | set(moved):
            self._buffers[place].data.copy_(moved.get(place, self._start[place]))
        self._dirty = set(moved)


class PlaceholderOutputs:
    """The results of model calls on stages that do not have the model's output: tensors of the output's shape.

    A ``key`` describes the inputs of a call. For each key the text of the output (see ``pack``) is kept.
    """

    def __init__(self, layers: Layers, device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._descriptions: dict[str, str] = {}

    def knows(self, key: str) -> bool:
        """Whether the output of a call with this key is described."""
        return key in self._descriptions

    def describe(self, key: str, text: str) -> None:
        """Record ``text`` as the description of the output of a call with this key."""
        self._descriptions[key] = text

    def zeros(self, key: str) -> Any:
        """Zeros for a call with a described output."""
        return map_tensors(lambda t: t.to(self._device), blank(self._descriptions[key]))

    def placeholder(self, key: str, values: list[Any]) -> Any:
        """A result for any call, without other workers.

        If the output is not described, this worker runs all layers itself. Parameters of other stages are zeros, for
        one layer at a time.
        """
        if self.knows(key):
            return self.zeros(key)
        outputs, trains = self._layers.probe(values, self._zeros_for), torch.is_grad_enabled()

        def as_output(t: torch.Tensor) -> torch.Tensor:
            return t.requires_grad_() if trains and t.is_floating_point() else t

        return map_tensors(as_output, outputs)

    @contextmanager
    def _zeros_for(self, layer: int) -> Iterator[None]:
        """Context for one layer: its parameters that lie on other workers are zeros."""
        away = [p for p in self._layers.parameters_of(range(layer, layer + 1)) if not p.untyped_storage().size()]
        kept = [p.data for p in away]
        for p in away:
            p.data = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
        try:
            yield
        finally:
            for p, data in zip(away, kept, strict=True):
                p.data = data


class TiedParameters:
    """Parameters that layers on several workers use (tied weights), whose values one worker lends to the others.

    The first chunk that uses a parameter owns it. Values are borrowed for a step, or for an evaluated batch.

    Args:
        parameters: The parameters, by the number of the parameter block.
        used: For each chunk the parameters that it uses. Chunk c lies on worker ``c % workers``.
        workers: The number of stages.
        rank: This worker's stage.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], used: Sequence[Sequence[nn.Parameter]], workers: int, rank: int
    ) -> None:
        self._parameters = parameters
        block_of = {id(p): param_block for param_block, p in enumerate(parameters)}
        users: dict[int, list[int]] = {}
        for chunk, parameters_of_chunk in enumerate(used):
            for p in parameters_of_chunk:
                users.setdefault(block_of[id(p)], []).append(chunk)
        self._users = {param_block: chunks for param_block, chunks in users.items() if len(chunks) > 1}
        self._borrowed_at = {
            param_block: [c for c in chunks if c % workers != chunks[0] % workers]
            for param_block, chunks in self._users.items()
        }
        self._borrows = {
            param_block for param_block, at in self._borrowed_at.items() if any(c % workers == rank for c in at)
        }
        self._passed_on: dict[int, torch.Tensor] = {}
        self._replaced: dict[int, torch.Tensor] = {}

    def shares(self, chunk: int) -> bool:
        """Whether ``chunk`` uses a parameter that another chunk uses too."""
        return any(chunk in chunks for chunks in self._users.values())

    def is_used_before(self, param_block: int, chunk: int) -> bool:
        """Whether a chunk before ``chunk`` uses ``param_block``."""
        return param_block in self._users and self._users[param_block][0] < chunk

    def lend(self, chunk: int) -> dict[str, torch.Tensor]:
        """The values that ``chunk`` or a later one borrows, to be sent to ``chunk``."""
        return {
            str(param_block): self._passed_on.get(param_block, self._parameters[param_block].detach())
            for param_block, at in self._borrowed_at.items()
            if at and at[-1] >= chunk > self._users[param_block][0]
        }

    def receive(self, lent: Mapping[str, torch.Tensor]) -> None:
        """Take values that came with a micro-batch: this worker uses them, or only passes them on."""
        for name, values in lent.items():
            param_block = int(name)
            self._passed_on[param_block] = values
            if param_block in self._borrows and param_block not in self._replaced:
                self._replaced[param_block] = self._parameters[param_block].data
                self._parameters[param_block].data = values

    def drop(self) -> None:
        """End the round: parameters are as they were before ``receive``."""
        for param_block, before in self._replaced.items():
            self._parameters[param_block].data = before
        self._replaced, self._passed_on = {}, {}
