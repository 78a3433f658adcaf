"""ZeRO and sharded data parallelism: each worker owns shares of a replica's state.

With sharding, a worker has values only while it uses them, a block at a time.
A block is a module whose parameters a forward pass needs together. A block's values are gathered just before the
block runs and freed after it; meanwhile the next block's values travel. Gradients leave after each backward block.
All workers of the batch group must run the same blocks in the same order and equally often, because each gather
is a collective. In an evaluation some workers have more batches. So all agree before each pass that a worker makes
one, and workers without a batch take part until no worker has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from elastune.core.errors import UserError
from elastune.core.layout import BucketPlan, Segment, gathered_in
from elastune.core.mesh import AXES, Axis, Mesh
from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.group import Group, GroupBroken, Work
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.base import Mechanism, ModelParallel, Parallelize, Ready, Replica, Until
from elastune.parallel.mechanisms.guards import ProcessLocal, refuse_copies, refuse_unless_elementwise
from elastune.parallel.mechanisms.owned.replica import OwnedReplica, ProgramModel
from elastune.parallel.mechanisms.owned.store import ParameterStore, free, has_storage
from elastune.parallel.mechanisms.tensor.blocked import Blocked


class Owned(Mechanism):
    """State in shares: each worker of a batch group adds up, holds and updates a part of the group's state.

    With the axis shard this is ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models"), stage 2: gradients and optimizer state are divided, and values are whole on all workers that
    compute with them.

    Args:
        name: The name of the mechanism, with its parts (``zero+pipeline``).
        axes: The axes along which it divides a replica.
        divides: The functions that divide the arithmetic, in order.
        frees: Values are divided too, and gathered when they are used (stage 3).
    """

    exact = True

    def __init__(
        self, name: str, axes: Sequence[Axis], divides: Sequence[Parallelize] = (), *, frees: bool = False
    ) -> None:
        self.name = name  # type: ignore[misc]  # an attribute of each object here
        self._axes = ("data", *axes)
        self._divides = divides
        self._frees = frees

    def check(self, execution: ExecutionSettings, mesh: Mesh) -> None:
        for axis in AXES:
            if mesh.size(axis) > 1 and axis not in self._axes:
                rule = f"{self.name} has no workers along the axis {axis}"
                raise UserError(rule, str(mesh), f"use {axis}=1, or another mechanism")
        if self._frees and "pipeline" in self._axes:
            rule = "the stages of a pipeline keep their parameters: each goes through its layers many times a step"
            raise UserError(rule, self.name, f"use --mechanism {execution.parts.serving(mesh)}")
        if execution.copies is not None and execution.copies < 1:
            raise UserError("each share is held by at least one worker", f"copies={execution.copies}", "use 1 or 2")

    def examine(self, model: nn.Module, optimizer: torch.optim.Optimizer, execution: ExecutionSettings) -> None:
        self._divided(model, optimizer, execution)

    def _divided(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, execution: ExecutionSettings
    ) -> ModelParallel:
        refuse_unless_elementwise(optimizer)  # shares are flat, and a part of a parameter
        division = ModelParallel(model)
        for divide in self._divides:
            division = divide(division, execution)
        return division

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, execution: ExecutionSettings
    ) -> Replica:
        program = ProgramModel(model)
        division = self._divided(model, optimizer, execution)
        if self._frees:
            blocks = blocks_of(division.model, division.parameters)
            division.split = gathered_in(division.split, [block.param_blocks for block in blocks])
        parts = division.split, division.parameters
        store = ParameterStore(*parts, optimizer, program.tensor_of, frees=self._frees, offload=execution.offload)
        if self._frees or self._divides:
            refuse_copies(division.model, division.parameters)
        replica = ShardedReplica if self._frees else OwnedReplica
        return replica(division, store, program, comms, execution.copies or 1)


class ShardedReplica(OwnedReplica):
    """One worker's part of a sharded replica (ZeRO stage 3).

    Outside of passes it has only the values that it holds. In a backward pass it has the gradients of one block.
    """

    def __init__(
        self, division: ModelParallel, store: ParameterStore, program: ProgramModel, comms: Comms, copies: int
    ) -> None:
        super().__init__(division, store, program, comms, copies)
        self.equal_passes = self.in_turn = division.waits = True
        self.gathering = Gathering(self)
        self.blocks = [block.param_blocks for block in self.gathering.blocks]
        self._place_of = {param_block: place for place, param_block in enumerate(self.split.trained)}

    def begin_step(self, *parts: Any) -> None:
        if self.gathering.lost:  # the rest of the lost pass has changed buffers
            self.buffers.restore()
        self.gathering.begin_step()
        super().begin_step(*parts)

    def run(
        self, loss: torch.Tensor, part: BatchSlice, begin: Callable[[BatchSlice], None], ready: Ready
    ) -> Iterator[BatchSlice]:
        self.gathering.turn()
        yield from super().run(loss, part, begin, ready)
        self.gathering.leave_all()
        self.gathering.end_pass()
        self.gathering.learns = not part.ends_step

    def leave(self, block: int) -> None:
        """The pass has finished ``block``: hand over its gradients, also for parameters that the pass has not used."""
        if self._ready is not None:
            for place in (
                self._place_of[param_block] for param_block in self.blocks[block] if param_block in self._place_of
            ):
                if place not in self._seen:
                    self._collect(place, self.params[place])
        self.on_block(block)

    def stand_in(self, until: Until | None = None, *, ends: bool = False) -> None:
        evaluates, self.division.evaluates = self.division.evaluates, False
        if evaluates:
            self.division.evaluates = self.gathering.stand_in(until, ends=ends)

    def abandon(self) -> None:
        super().abandon()
        self.gathering.end_pass()
        self.gathering.learns = False


_NONE, _WAITS, _PLAIN, _OPEN = 0.0, 1.0, 2.0, 3.0
"""A worker's next pass in an evaluation: none; none as long as it waits for another event; a pass without gradients,
after which values are freed; a pass with gradients. The largest number of all workers decides."""


class Gathering(ProcessLocal):
    """Gathers and frees the values of each block in the passes of ``replica``'s model.

    The first block, the model's own, stays from the beginning of a pass to its end. Autograd runs a forward pass in
    reverse. When it comes to a block, it has finished the blocks that ran after it, unless they also ran before it.
    This order is the same on all workers, whichever parameters each has used.

    Attributes:
        blocks: The model's blocks.
        lost: The group broke in a forward pass, so the step is lost. Passes run on zeros until another step begins.
        learns: Passes of a step are due, so the next pass with gradients belongs to the step.
    """

    def __init__(self, replica: ShardedReplica) -> None:
        self._replica, self._store = replica, replica.store
        self.blocks = blocks_of(replica.model, replica.store.parameters)
        self._expected = list(range(1, len(self.blocks)))  # the order of blocks in the last pass
        self._trail: list[int] = []  # the blocks that this pass has entered; 0 for each call of the model
        self._pass_start = 0  # the place of the newest call in the trail
        self._at: int | None = None  # the place in the trail that a backward pass has reached
        self._left_blocks: set[int] = set()  # blocks whose gradients have left
        self._present: set[int] = set()
        self._pending: dict[int, list[_Pending]] = {}
        self._keeps_values = False  # a pass in an evaluation has gradients on some worker: all keep values
        self.lost = self.learns = False
        self._comms = replica.comms
        for i, block in enumerate(self.blocks):
            block.module.register_forward_pre_hook(partial(self._enter, i))
            block.module.register_forward_hook(partial(self._ran, i), always_call=True)

    # -- a pass -------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step. A lost step is over."""
        self.end_pass()
        self.lost, self.learns = False, True

    def end_pass(self) -> None:
        """End or give up the pass: only the values that this worker holds stay here."""
        self._end_transfers()
        for i in list(self._present):
            self._free(i)
        self._trail, self._pass_start, self._at, self._left_blocks = [], 0, None, set()

    def _end_transfers(self) -> None:
        for i, buckets in self._pending.items():
            self._present.add(i)
            for each in buckets:
                if not each.group.broken:
                    each.work.wait()
                else:  # a library may still write to that memory, so it is not reused
                    for param_block in each.param_blocks:
                        free(self._store.parameters[param_block])
            self._free(i)
        self._pending = {}

    def turn(self) -> None:
        """Begin the backward pass."""
        self._at = len(self._trail)

    def leave_all(self) -> None:
        """End the backward pass: the gradients of all remaining blocks leave."""
        for i in reversed(range(len(self.blocks))):
            if i not in self._left_blocks:
                self._replica.leave(i)

    def stand_in(self, until: Until | None, *, ends: bool) -> bool:
        """Take part in forward passes that only other workers make, until none makes one, or ``until`` returns True.

        Where a loop ``ends``, this also returns as soon as no worker makes a pass and some wait.

        Returns:
            Whether the evaluation goes on.
        """
        failure_hooks = self._replica.division.failure_hooks
        while not self.lost and not failure_hooks.step_lost():
            if until is not None and until():
                return True
            try:
                next_pass = self._agreed(_NONE if until is None else _WAITS)
            except GroupBroken as error:
                self.lost = True
                failure_hooks.meet(error)
                return False
            if next_pass == _NONE:
                return until is not None  # also where no values travel at all
            if next_pass == _WAITS:
                if ends:
                    return True
                continue
            for i in (0, *self._expected):
                self._enter(i)
            if next_pass == _PLAIN:
                self.end_pass()
        return False

    def _agreed(self, next_pass: float) -> float:
        """Agree with all workers on the next pass of an evaluation. ``next_pass``: this worker's."""
        replica = self._replica
        group = replica.comms.batch
        if all(len(owners) == group.size for owners in replica.held_by):  # nothing travels
            return _NONE
        row = torch.tensor([next_pass], device=group.wire)
        all_passes = row.new_empty(group.size)
        group.all_gather(all_passes, row).wait()
        return float(all_passes.max())

    def _agree(self) -> None:
        """The model is called. In an evaluation, report the pass to the other workers."""
        replica, with_gradients = self._replica, torch.is_grad_enabled()
        self._keeps_values = False
        if not replica.division.evaluates or self.lost:
            return
        if with_gradients and self.learns:  # the program has left the evaluation early
            replica.stand_in()
        else:
            self._keeps_values = self._agreed(_OPEN if with_gradients else _PLAIN) == _OPEN

    def _enter(self, i: int, *_: Any) -> None:
        """Block ``i`` is about to run forward."""
        failure_hooks = self._replica.division.failure_hooks
        self.lost = self.lost or failure_hooks.step_lost()
        try:
            self._go_to(i)
        except GroupBroken as error:
            if self._at is not None:
                raise
            self.lost = True
            self._end_transfers()
            failure_hooks.meet(error)
            for each in {0, i}:  # the remaining workers have met, and all values are freed
                self._fill(each, ())

    def _go_to(self, i: int) -> None:
        if self._at is not None:  # activation checkpointing runs the block again
            self._keep_alone(i)
            return
        if i == 0:
            self._agree()
            self._pass_start = len(self._trail)
            if self._comms is not self._replica.comms:  # some workers are new and have made no pass
                self._comms, self._expected = self._replica.comms, list(range(1, len(self.blocks)))
            self._need(0)
        else:
            self._keep_alone(i)
        self._trail.append(i)
        seen = self._trail[self._pass_start + 1 :]
        if seen == self._expected[: len(seen)] and len(seen) < len(self._expected):
            self._start(self._expected[len(seen)])

    def _keep_alone(self, i: int) -> None:
        """Make block ``i`` present, and no other except the model's own."""
        for other in self._present - {0, i}:
            self._free(other)
        self._need(i)

    def _ran(self, i: int, _: Any, inputs: Any, outputs: Any) -> None:
        """Block ``i`` has run forward."""
        differentiable = [t for t in _tensors(outputs) if t.requires_grad] if torch.is_grad_enabled() else []
        at = len(self._trail) - 1
        if i == 0:
            on_gradient: Callable[[Any], None] = lambda _: self._need(0)  # noqa: E731
        elif self._at is None:
            on_gradient = lambda _: self._return_to(at)  # noqa: E731
        else:
            on_gradient = lambda _: self._keep_alone(i)  # noqa: E731
        if isinstance(outputs, Blocked) and len(differentiable) > 1:
            # The first of its parts may go on through this block while others are still in the next block.
            for tensor in differentiable:
                tensor.register_hook(lambda _: self._need(i))
            register_multi_grad_hook(differentiable, on_gradient)
        else:
            for tensor in differentiable:
                tensor.register_hook(on_gradient)
        if i == 0 and self._at is None:
            self._expected = self._trail[self._pass_start + 1 :]
            if not differentiable and not self._keeps_values:
                before = self._trail[: self._pass_start]
                self.end_pass()
                self._trail = before

    def _return_to(self, at: int) -> None:
        """The block at place ``at`` of the trail is about to run backward: gather it, and start its predecessor."""
        if self._at is not None:
            if at >= self._at:
                return
            self._at = at
            for other in reversed(self._trail[at + 1 :]):
                if other not in {0, *self._left_blocks, *self._trail[: at + 1]}:
                    self._free(other)
                    self._left_blocks.add(other)
                    self._replica.leave(other)
        self._keep_alone(self._trail[at])
        if at > 0:
            self._start(self._trail[at - 1])

    # -- one block ----------------------------------------------------------------------------------------------------

    def _need(self, i: int) -> None:
        if i not in self._present:
            self._start(i)
            pending = self._pending.get(i, [])
            for each in pending:
                each.work.wait()
            self._pending.pop(i, None)
            self._fill(i, pending)

    def _start(self, i: int) -> None:
        """Start to gather block ``i``, unless it is present or being gathered, or every worker holds all values."""
        replica = self._replica
        group = replica.comms.batch
        if i in self._present or i in self._pending or self.lost or all(len(h) == group.size for h in replica.held_by):
            return
        param_blocks = set(self.blocks[i].param_blocks)
        plans = [plan for plan in replica.plans if param_blocks.issuperset(plan.param_blocks)]
        if plans:
            self._allocate(i)
            self._pending[i] = []
        for plan in plans:
            self._pending[i].append(self._sent(plan, group))

    def _sent(self, plan: BucketPlan, group: Group) -> _Pending:
        """Start the exchange of a bucket: values that others need, and values that this worker needs."""
        held_by, p = self._replica.held_by, self._store.parameters[plan.param_blocks[0]]
        to = [worker for worker in range(group.size) if worker not in held_by[group.rank]]
        held_values = [self._store.read(segment) for segment in plan.parts[group.rank]] if to else []
        mine = held_values[0] if len(held_values) == 1 else torch.cat([p.detach().new_empty(0), *held_values])
        sent = mine.to(group.wire)
        sent = sent.repeat(len(to)) if len(to) != 1 else sent
        sizes = [len(mine) if worker in to else 0 for worker in range(group.size)]
        from_ = [reducer for reducer in range(group.size) if group.rank not in held_by[reducer]]
        out_sizes = [n if reducer in from_ else 0 for reducer, n in enumerate(plan.sizes)]
        missing = [segment for reducer in from_ for segment in plan.parts[reducer]]
        room, arrivals = self._room(missing, p.dtype, group.wire)
        return _Pending(plan.param_blocks, group, group.all_to_all(room, sent, out_sizes, sizes), room, sent, arrivals)

    def _room(
        self, missing: Sequence[Segment], dtype: torch.dtype, wire: torch.device
    ) -> tuple[torch.Tensor, list[tuple[Segment, torch.Tensor]]]:
        """The memory for the segments ``missing``: the parameter's own if possible, else extra memory to copy from."""
        if missing and all(a.param_block == b.param_block and a.stop == b.start for a, b in pairwise(missing)):
            p = self._store.parameters[missing[0].param_block]
            if p.is_contiguous() and p.device == wire:
                return p.data.view(-1)[missing[0].start : missing[-1].stop], []
        sizes = [segment.size for segment in missing]
        room = torch.empty(sum(sizes), dtype=dtype, device=wire)
        return room, list(zip(missing, room.split(sizes), strict=True))

    def _allocate(self, i: int) -> None:
        for p in self._parameters(i):
            if not has_storage(p):  # else torch would copy the content
                p.untyped_storage().resize_(p.numel() * p.element_size())

    def _fill(self, i: int, pending: Sequence[_Pending]) -> None:
        """Fill block ``i`` with the values that this worker holds and those that have arrived."""
        store = self._store
        self._present.add(i)
        self._allocate(i)
        if self.lost:
            for p in self._parameters(i):
                p.data.zero_()
        param_blocks = set(self.blocks[i].param_blocks) & set(store.computed)
        for shard in store.shards:
            if shard.segment.param_block in param_blocks:
                store.write_values(shard.segment, shard.parameter.detach())
        for segment, values in (arrival for each in pending for arrival in each.arrivals):
            store.write_values(segment, values)

    def _parameters(self, i: int) -> list[torch.nn.Parameter]:
        """The parameters of block ``i`` that this worker computes with."""
        return [
            self._store.parameters[param_block]
            for param_block in self.blocks[i].param_blocks
            if param_block in self._store.computed
        ]

    def _free(self, i: int) -> None:
        if i in self._present:
            self._present.discard(i)
            for param_block in self.blocks[i].param_blocks:
                self._store.parameters[param_block].untyped_storage().resize_(0)


@dataclass(frozen=True)
class _Pending:
    """A bucket's values during a transfer.

    Attributes:
        param_blocks: The parameter blocks of the bucket.
        group: The group of the transfer.
        work: The collective that runs.
        room: The memory for the values of other workers.
        sent: This worker's values, kept alive while the collective may read them.
        arrivals: Each segment from another worker with its part of ``room``. Empty if ``room`` is a parameter's own.
    """

    param_blocks: Sequence[int]
    group: Group
    work: Work
    room: torch.Tensor
    sent: torch.Tensor
    arrivals: Sequence[tuple[Segment, torch.Tensor]]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module's result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Blocked):
        yield from value.parts
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers that are never called: code reaches into them, so no hook can show when they are used."""


@dataclass(frozen=True)
class Block:
    """A module and the numbers of the parameter blocks that only it needs, while it runs forward or backward."""

    module: nn.Module
    param_blocks: tuple[int, ...]


def blocks_of(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Block]:
    """The blocks of ``model``. ``parameters``: the objects of its parameter blocks.

    The first block is the whole model, for parameters in no other block or in several (tied weights). The others are
    the children of its outermost ``ModuleList`` and ``Sequential`` containers, such as a transformer's layers.
    """
    places = {p: i for i, p in enumerate(parameters)}
    parts = [(module, {places[p] for p in module.parameters() if p in places}) for module in _parts(model)]
    counts: dict[int, int] = {}
    for _, param_blocks in parts:
        for param_block in param_blocks:
            counts[param_block] = counts.get(param_block, 0) + 1
    outside = {places[p] for p in _outside(model, {module for module, _ in parts}) if p in places}
    shared = {param_block for param_block, count in counts.items() if count > 1} | outside
    blocks = [
        Block(module, tuple(sorted(param_blocks - shared))) for module, param_blocks in parts if param_blocks - shared
    ]
    in_blocks = {param_block for block in blocks for param_block in block.param_blocks}
    return [Block(model, tuple(i for i in range(len(parameters)) if i not in in_blocks)), *blocks]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The children of the outermost containers in ``module``, which may be a container itself."""
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, _NEVER_CALLED):
            yield child
        else:
            yield from _parts(child)


def _outside(model: nn.Module, parts: set[nn.Module]) -> Iterator[nn.Parameter]:
    """The parameters of modules outside of ``parts``."""
    yield from model.parameters(recurse=False)
    for child in model.children():
        if child not in parts:
            yield from _outside(child, parts)
