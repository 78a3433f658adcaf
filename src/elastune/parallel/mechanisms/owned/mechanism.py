"""ZeRO and sharded data parallelism: each worker owns shares of a replica's state.

With sharding, a worker has values only while it uses them, a block at a time.
A block is a module whose parameters a forward pass needs together. A block's values are gathered just before the
block runs and freed after it; meanwhile the next block's values travel. Gradients leave after each backward block.
All workers of the batch group must run the same blocks in the same order and equally often, because each gather
is a collective. In an evaluation some workers have more batches: before each pass all agree that there is one,
and workers without a batch take part until no worker has any.
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

from elastune.core.batch_slices import BatchSlice
from elastune.core.errors import UserError
from elastune.core.layout import BucketPlan, Segment, gathered_in
from elastune.core.mesh import AXES, Axis, Mesh
from elastune.core.run import ExecutionSettings
from elastune.parallel.comm.group import Group, GroupBroken, Work
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.base import Mechanism, Ready, Replica
from elastune.parallel.mechanisms.guards import ProcessLocal, refuse_copies, refuse_unless_elementwise
from elastune.parallel.mechanisms.model_parallel import ModelParallel, Parallelize, Until
from elastune.parallel.mechanisms.owned.replica import OwnedReplica, ProgramModel
from elastune.parallel.mechanisms.owned.store import ParameterStore, free, has_storage
from elastune.parallel.mechanisms.tensor.blocked import Blocked

# [blocks] Which leaves of a model are needed together: blocks that a forward pass goes through one after another.

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Others reach into them, so they cannot tell when they are used."""


@dataclass(frozen=True)
class Block:
    """A module whose leaves are needed while it runs, forward or backward, and by no other block."""

    module: nn.Module
    param_blocks: tuple[int, ...]


def blocks_of(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Block]:
    """The blocks of ``model``; ``parameters``: its leaves' objects.

    The first one is the whole model, for the leaves that are in no other block or in several (tied weights). The others
    are the children of its outermost ``ModuleList`` and ``Sequential`` containers, such as a transformer's layers.
    """
    places = {p: i for i, p in enumerate(parameters)}
    parts = [(module, {places[p] for p in module.parameters() if p in places}) for module in _parts(model)]
    counts: dict[int, int] = {}
    for _, param_blocks in parts:
        for param_block in param_blocks:
            counts[param_block] = counts.get(param_block, 0) + 1
    outside = {places[p] for p in _outside(model, {module for module, _ in parts}) if p in places}
    shared = {param_block for param_block, count in counts.items() if count > 1} | outside
    found = [
        Block(module, tuple(sorted(param_blocks - shared))) for module, param_blocks in parts if param_blocks - shared
    ]
    taken = {param_block for block in found for param_block in block.param_blocks}
    return [Block(model, tuple(i for i in range(len(parameters)) if i not in taken)), *found]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Children of the outermost containers in ``module``, itself perhaps one."""
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, _NEVER_CALLED):
            yield child
        else:
            yield from _parts(child)


def _outside(model: nn.Module, parts: set[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters of modules that lie in no part."""
    yield from model.parameters(recurse=False)
    for child in model.children():
        if child not in parts:
            yield from _outside(child, parts)


# [gathering] Values and gradients that are here only while they are used, a block at a time.
#
# A block's values are gathered just before it runs, and freed after; while it runs the next one's travel. Its gradients
# leave when the backward pass is through with it. All workers of the batch group must go through the same blocks in the
# same order, as often as each other: each start of a gather is a collective, and so is the leaving of gradients. In an
# evaluation, where some have more batches, and call the model in each as often as they like, all agree before a pass
# that there is one: who has nothing left takes part in it until nobody has.

_NONE, _WAITS, _PLAIN, _OPEN = 0.0, 1.0, 2.0, 3.0
"""A worker's next pass in an evaluation: none any more; none as long as it waits for something else; one after which
nothing stays here; one with gradients. The largest of all workers decides."""


@dataclass(frozen=True)
class _UnderWay:
    """A bucket's values on their way. ``sent`` is kept as long as it may be read.

    ``arrivals``: what others have of it, each with the part of ``room`` where it arrives; none where that is the leaf.
    """

    param_blocks: Sequence[int]
    group: Group
    work: Work
    room: torch.Tensor
    sent: torch.Tensor
    arrivals: Sequence[tuple[Segment, torch.Tensor]]


class ShardedReplica(OwnedReplica):
    """Of no values but those that it holds, outside of passes (ZeRO stage 3), and of no block's gradients but one's."""

    def __init__(
        self, division: ModelParallel, store: ParameterStore, program: ProgramModel, comms: Comms, copies: int
    ) -> None:
        super().__init__(division, store, program, comms, copies)
        self.equal_passes = self.in_turn = division.waits = True
        self.gathering = Gathering(self)
        self.blocks = [block.param_blocks for block in self.gathering.blocks]
        self._place_of = {param_block: place for place, param_block in enumerate(self.split.trained)}

    def begin_step(self, *parts: Any) -> None:
        if self.gathering.lost:  # the rest of that pass has moved buffers once more
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
        """This pass is through with ``block``, whatever of it has been used."""
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


class Gathering(ProcessLocal):
    """Gathers the blocks of ``replica``'s model in its passes.

    The first block, the model's own, stays from the beginning of a pass to its end. Autograd runs in reverse what a
    forward pass did: when it comes to a block it is through with those that ran after it, unless they ran before it as
    well. That is the same on all workers, whichever parameters each has used. Where the group breaks in a forward pass
    the step is lost, and the rest of the pass runs on zeros (``lost``), as do all passes until another step begins.
    ``learns``: passes of a step are due, so the next one with gradients is the step's.
    """

    def __init__(self, replica: ShardedReplica) -> None:
        self._replica, self._store = replica, replica.store
        self.blocks = blocks_of(replica.model, replica.store.parameters)
        self._expected = list(range(1, len(self.blocks)))  # the order of blocks in a pass, as the last one had it
        self._trail: list[int] = []  # what this pass has entered, 0 with every call of the model
        self._began = 0  # the newest call's place in it
        self._at: int | None = None  # how far a backward pass has come back
        self._left: set[int] = set()  # whose gradients have
        self._here: set[int] = set()
        self._under_way: dict[int, list[_UnderWay]] = {}
        self._stays = False  # an evaluation's pass has gradients somewhere: on all workers the same stays here
        self.lost = self.learns = False
        self._comms = replica.comms
        for i, block in enumerate(self.blocks):
            block.module.register_forward_pre_hook(partial(self._enter, i))
            block.module.register_forward_hook(partial(self._ran, i), always_call=True)

    # -- a pass -------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """What was lost is over."""
        self.end_pass()
        self.lost, self.learns = False, True

    def end_pass(self) -> None:
        """The pass is over, or given up: no values stay here but those that this worker holds."""
        self._end_transfers()
        for i in list(self._here):
            self._free(i)
        self._trail, self._began, self._at, self._left = [], 0, None, set()

    def _end_transfers(self) -> None:
        for i, buckets in self._under_way.items():
            self._here.add(i)
            for each in buckets:
                if not each.group.broken:
                    each.work.wait()
                else:  # a library may still write to that memory: it keeps it
                    for param_block in each.param_blocks:
                        free(self._store.parameters[param_block])
            self._free(i)
        self._under_way = {}

    def turn(self) -> None:
        """The backward pass comes next."""
        self._at = len(self._trail)

    def leave_all(self) -> None:
        """The backward pass is over: what has not left does."""
        for i in reversed(range(len(self.blocks))):
            if i not in self._left:
                self._replica.leave(i)

    def stand_in(self, until: Until | None, *, ends: bool) -> bool:
        """Take part in forward passes that other workers make and this one does not, until nobody makes one; or, where
        this worker may come to others yet, ``until`` that is so. Whether the evaluation goes on; where a loop ``ends``,
        it does as soon as nobody makes a pass and some wait.
        """
        failure_hooks = self._replica.division.failure_hooks
        while not self.lost and not failure_hooks.step_lost():
            if until is not None and until():
                return True
            try:
                made = self._agreed(_NONE if until is None else _WAITS)
            except GroupBroken as error:
                self.lost = True
                failure_hooks.meet(error)
                return False
            if made == _NONE:
                return until is not None  # else nothing travels
            if made == _WAITS:
                if ends:
                    return True
                continue
            for i in (0, *self._expected):
                self._enter(i)
            if made == _PLAIN:
                self.end_pass()
        return False

    def _agreed(self, own: float) -> float:
        """In an evaluation: what pass comes next, where this worker makes such a one as ``own``."""
        replica = self._replica
        group = replica.comms.batch
        if all(len(owners) == group.size for owners in replica.held_by):  # nothing travels
            return _NONE
        row = torch.tensor([own], device=group.wire)
        told = row.new_empty(group.size)
        group.all_gather(told, row).wait()
        return float(told.max())

    def _agree(self) -> None:
        """The model is called: where the program evaluates, the others know of it."""
        replica, with_gradients = self._replica, torch.is_grad_enabled()
        self._stays = False
        if not replica.division.evaluates or self.lost:
            return
        if with_gradients and self.learns:  # the program has left the evaluation
            replica.stand_in()
        else:
            self._stays = self._agreed(_OPEN if with_gradients else _PLAIN) == _OPEN

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
            for each in {0, i}:  # the workers that are left have met, and nothing is here any more
                self._fill(each, ())

    def _go_to(self, i: int) -> None:
        if self._at is not None:  # checkpointing runs it again
            self._keep_alone(i)
            return
        if i == 0:
            self._agree()
            self._began = len(self._trail)
            if self._comms is not self._replica.comms:  # some workers have not made a pass yet
                self._comms, self._expected = self._replica.comms, list(range(1, len(self.blocks)))
            self._need(0)
        else:
            self._keep_alone(i)
        self._trail.append(i)
        seen = self._trail[self._began + 1 :]
        if seen == self._expected[: len(seen)] and len(seen) < len(self._expected):
            self._start(self._expected[len(seen)])

    def _keep_alone(self, i: int) -> None:
        """Block ``i`` is here, beside the model's own no other."""
        for other in self._here - {0, i}:
            self._free(other)
        self._need(i)

    def _ran(self, i: int, _: Any, given: Any, out: Any) -> None:
        """Block ``i`` has run forward."""
        differentiable = [t for t in _tensors(out) if t.requires_grad] if torch.is_grad_enabled() else []
        at = len(self._trail) - 1
        if i == 0:
            come: Callable[[Any], None] = lambda _: self._need(0)  # noqa: E731
        elif self._at is None:
            come = lambda _: self._return_to(at)  # noqa: E731
        else:
            come = lambda _: self._keep_alone(i)  # noqa: E731
        if isinstance(out, Blocked) and len(differentiable) > 1:
            # The first of its parts may go on through this block while others are in the one that ran after it.
            for tensor in differentiable:
                tensor.register_hook(lambda _: self._need(i))
            register_multi_grad_hook(differentiable, come)
        else:
            for tensor in differentiable:
                tensor.register_hook(come)
        if i == 0 and self._at is None:
            self._expected = self._trail[self._began + 1 :]
            if not differentiable and not self._stays:
                before = self._trail[: self._began]
                self.end_pass()
                self._trail = before

    def _return_to(self, at: int) -> None:
        """The block at this place of the trail is about to run backward, and after it the one that ran before it."""
        if self._at is not None:
            if at >= self._at:
                return
            self._at = at
            for other in reversed(self._trail[at + 1 :]):
                if other not in {0, *self._left, *self._trail[: at + 1]}:
                    self._free(other)
                    self._left.add(other)
                    self._replica.leave(other)
        self._keep_alone(self._trail[at])
        if at > 0:
            self._start(self._trail[at - 1])

    # -- one block ----------------------------------------------------------------------------------------------------

    def _need(self, i: int) -> None:
        if i not in self._here:
            self._start(i)
            under_way = self._under_way.get(i, [])
            for each in under_way:
                each.work.wait()
            self._under_way.pop(i, None)
            self._fill(i, under_way)

    def _start(self, i: int) -> None:
        """Block ``i`` begins to travel, unless it is here, on its way, or does not need to."""
        replica = self._replica
        group = replica.comms.batch
        if i in self._here or i in self._under_way or self.lost or all(len(h) == group.size for h in replica.held_by):
            return
        param_blocks = set(self.blocks[i].param_blocks)
        plans = [plan for plan in replica.plans if param_blocks.issuperset(plan.param_blocks)]
        if plans:
            self._allocate(i)
            self._under_way[i] = []
        for plan in plans:
            self._under_way[i].append(self._sent(plan, group))

    def _sent(self, plan: BucketPlan, group: Group) -> _UnderWay:
        """Start what others need of a bucket, and what this worker does."""
        held_by, p = self._replica.held_by, self._store.parameters[plan.param_blocks[0]]
        to = [worker for worker in range(group.size) if worker not in held_by[group.rank]]
        own = [self._store.read(segment) for segment in plan.parts[group.rank]] if to else []
        mine = own[0] if len(own) == 1 else torch.cat([p.detach().new_empty(0), *own])
        sent = mine.to(group.wire)
        sent = sent.repeat(len(to)) if len(to) != 1 else sent
        sizes = [len(mine) if worker in to else 0 for worker in range(group.size)]
        from_ = [reducer for reducer in range(group.size) if group.rank not in held_by[reducer]]
        out_sizes = [n if reducer in from_ else 0 for reducer, n in enumerate(plan.sizes)]
        missing = [segment for reducer in from_ for segment in plan.parts[reducer]]
        room, arrivals = self._room(missing, p.dtype, group.wire)
        return _UnderWay(plan.param_blocks, group, group.all_to_all(room, sent, out_sizes, sizes), room, sent, arrivals)

    def _room(
        self, missing: Sequence[Segment], dtype: torch.dtype, wire: torch.device
    ) -> tuple[torch.Tensor, list[tuple[Segment, torch.Tensor]]]:
        """Where ``missing`` arrives: in its leaf's own memory if it can, else in a room, from which it is copied."""
        if missing and all(a.param_block == b.param_block and a.stop == b.start for a, b in pairwise(missing)):
            p = self._store.parameters[missing[0].param_block]
            if p.is_contiguous() and p.device == wire:
                return p.data.view(-1)[missing[0].start : missing[-1].stop], []
        sizes = [segment.size for segment in missing]
        room = torch.empty(sum(sizes), dtype=dtype, device=wire)
        return room, list(zip(missing, room.split(sizes), strict=True))

    def _allocate(self, i: int) -> None:
        for p in self._parameters(i):
            if not has_storage(p):  # else torch copies what is there
                p.untyped_storage().resize_(p.numel() * p.element_size())

    def _fill(self, i: int, under_way: Sequence[_UnderWay]) -> None:
        """Block ``i`` is here: what this worker holds, and what has come."""
        store = self._store
        self._here.add(i)
        self._allocate(i)
        if self.lost:
            for p in self._parameters(i):
                p.data.zero_()
        param_blocks = set(self.blocks[i].param_blocks) & set(store.computed)
        for shard in store.shards:
            if shard.segment.param_block in param_blocks:
                store.write_values(shard.segment, shard.parameter.detach())
        for segment, values in (arrival for each in under_way for arrival in each.arrivals):
            store.write_values(segment, values)

    def _parameters(self, i: int) -> list[torch.nn.Parameter]:
        """Those of block ``i`` that this worker computes with."""
        return [
            self._store.parameters[param_block]
            for param_block in self.blocks[i].param_blocks
            if param_block in self._store.computed
        ]

    def _free(self, i: int) -> None:
        if i in self._here:
            self._here.discard(i)
            for param_block in self.blocks[i].param_blocks:
                self._store.parameters[param_block].untyped_storage().resize_(0)


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    """Those in what a module gives back."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, Blocked):
        yield from found.parts
    elif isinstance(found, (list, tuple)):
        for each in found:
            yield from _tensors(each)
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))


# [mechanism] Mechanisms whose state is held in shares, by how they divide the arithmetic and what they leave in memory.


class Owned(Mechanism):
    """State in shares: the batch group's workers each add up, hold and update a part of what they compute with.

    With the axis shard this is ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models"), stage 2: gradients and optimizer state are divided, values lie with all that compute with them.

    ``axes``: the axes that it divides a replica along. ``divides``: what divides the arithmetic, in order.
    ``frees``: parameters lie with their holders, too, and are gathered when they are used (stage 3).
    """

    exact = True

    def __init__(
        self, name: str, axes: Sequence[Axis], divides: Sequence[Parallelize] = (), *, frees: bool = False
    ) -> None:
        self.name = name  # type: ignore[misc]  # of this one: what it is made of decides
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
