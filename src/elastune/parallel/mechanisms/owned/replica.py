"""One worker's part of a replica whose state is owned in shares: passes, update, and the spread of new values.

The optimizer's step is split in two: first the shares that other workers wait for. While these travel, it updates the
other shares, which are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.layout import (
    BucketPlan,
    Piece,
    RemoteOwner,
    Segment,
    Unrecoverable,
    buckets,
    by_param_block,
    held,
    owners_in_group,
    remote_owners,
)
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.group import GroupBroken, Work
from elastune.parallel.comm.norms import clip_factor, global_norm
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms import torch_private
from elastune.parallel.mechanisms.base import ModelParallel, Ready, Replica, Until, storage_bytes
from elastune.parallel.mechanisms.guards import GradientGuard
from elastune.parallel.mechanisms.owned.placement import VALUES, PlacedState
from elastune.parallel.mechanisms.owned.store import ParameterStore

IN_FLIGHT_BYTES = 64 << 20
"""Bytes of new values in flight at a time, in ``OwnedReplica.spread``."""


class OwnedReplica(Replica):
    """One worker's part of a replica whose state lies in shares; see ``parallel.mechanisms.base.Replica``.

    A ``division`` runs the passes, and a ``store`` has the parameter blocks and shares. Gradients are numbered by the
    place of their block in ``split.trained``; those of blocks that other workers compute never come.

    A step begins with ``begin_step``. Then ``run`` runs each slice, and ``receive`` takes the sums of the shares held
    here: the step is *reduced*. After the optimizer's step ``spread`` sends the new values.

    Attributes:
        plans: The buckets of this worker's batch group.
        own: The segments that this worker adds up.
        held_by: For each batch rank, the workers of the batch group that hold the segments that it adds up.
        remote_owners: The holders of shares outside of the batch groups.
        copies: The number of workers that hold each share, if enough exist.
        state_names, shapes: See ``ProgramModel``.
        blocks_of_tensor: The numbers of a parameter's blocks, by its name.
        reduced: A step's sums are here, and its gradients are not dropped yet.
        applied: The optimizer has updated the shares with them.
        version: The version of the state on this worker: 0 as the program built it, then 1 plus the number of applied
            steps. So a worker that is still loading does not pass for one that has loaded.
        on_break: Called where a group breaks after a step or state is lost; it returns once values are spread.
        arrive: Called after the step instead of ``spread`` where other workers wait for this one; it brings state to
            where it belongs among them.
        spread_out: All values that this worker computes with are those of ``version``.
        stranger: This worker's state was never the run's: the state of other workers is to come.
        brought: State that has arrived and was not swapped in, because a group broke.
        blocks: The parameter blocks whose gradients leave together in a pass.
        on_block: Called when a pass has finished one of ``blocks``.
    """

    def __init__(
        self, division: ModelParallel, store: ParameterStore, program: ProgramModel, comms: Comms, copies: int
    ) -> None:
        self.division, self.store, self.copies = division, store, copies
        self.split, optimizer = division.split, store.optimizer
        super().__init__(division.module, optimizer, comms, params=[division.parameters[i] for i in self.split.trained])
        self.model, self.apart = division.model, division.apart
        self.reduced, self.applied, self.version = False, False, 0
        self.on_break: Callable[[GroupBroken | Unrecoverable], None] = _raised
        self.arrive: Callable[[], None] | None = None
        self.spread_out, self.stranger = True, False
        self.blocks: Sequence[Sequence[int]] = ()
        self.on_block: Callable[[int], None] = _nothing_leaves
        self.brought = PlacedState()
        self._scale: Callable[[float], None] = _unscaled
        self._squares = torch.zeros(0, dtype=torch.float64)
        self.state_names, self.shapes = program.state_names, program.shapes
        self.blocks_of_tensor: dict[str, list[int]] = {}
        for i, param_block in enumerate(self.split.param_blocks):
            self.blocks_of_tensor.setdefault(param_block.tensor, []).append(i)
        self._block_named = {param_block.name: i for i, param_block in enumerate(self.split.param_blocks)}
        self.plans: tuple[BucketPlan, ...] = ()
        self.own_segments: frozenset[Segment] = frozenset()
        self._split_step = SplitOptimizerStep(store)
        self.held_by: list[tuple[int, ...]] = []
        self.remote_owners: tuple[RemoteOwner, ...] = ()
        store.rebuild(*self.wanted_in(comms))
        self.enter(comms)
        optimizer.register_step_pre_hook(lambda _, args, kwargs: self._steps(args, kwargs))
        optimizer.register_step_post_hook(lambda *_: self._stepped())

    def wanted_in(self, comms: Comms) -> tuple[tuple[int, ...], tuple[Segment, ...]]:
        """The blocks that this worker computes with, and the segments that it holds, in the mesh of ``comms``."""
        mesh, rank = comms.mesh, comms.rank
        return self.split.computed(mesh, rank), held(self.split, mesh, self.copies, comms.hosts)[rank]

    def enter(self, comms: Comms) -> None:
        """Take the place that ``comms`` gives. The store must have the state of that place already."""
        self.comms, mesh = comms, comms.mesh
        self.plans = buckets(self.split, self.store.computed, mesh.batch)
        self.held_by = owners_in_group(mesh, comms.rank, self.copies, comms.hosts)
        self.remote_owners = remote_owners(self.split, mesh, self.copies, comms.hosts)
        self.own_segments = frozenset(
            segment for plan in self.plans for segment in plan.parts[mesh.batch_rank(comms.rank)]
        )
        self.division.enter(comms)
        self.division.evaluates = False

    # -- a step -------------------------------------------------------------------------------------------------------

    @property
    def runs_at_once(self) -> bool:
        return self.division.streams

    def begin_evaluation(self) -> None:
        self.division.begin_evaluation()

    def stand_in(self, until: Until | None = None, *, ends: bool = False) -> None:
        self.division.stand_in(until, ends=ends)
        if until is None and not ends:
            self.division.evaluates = False

    def begin_step(self, parts: Sequence[BatchSlice] = ()) -> None:
        super().begin_step(parts)
        self._drop()
        self.division.begin_step(parts)

    def _drop(self) -> None:
        """Drop the gradients of an earlier step."""
        if self.reduced:
            for p in self.params:
                p.grad = None
            self.store.clear()
        self.reduced = self.applied = False

    def run(
        self, loss: torch.Tensor, part: BatchSlice, begin: Callable[[BatchSlice], None], ready: Ready
    ) -> Iterator[BatchSlice]:
        """Run the backward passes that are due with ``part``; see ``ModelParallel.backward``.

        ``begin`` is called before the gradients of a slice that ends its slot go to ``ready``, which copies them. Then
        that slice is yielded. Gradients of other slices are hidden until the slot's last one. A slice without weight
        gives no gradients.
        """
        self._restore()
        streams = self.division.streams and (part.ends_slot or not part.weight)
        if streams:
            self._listen()
            self._seen.clear()
            if part.weight:
                begin(part)
            self._ready = ready if part.weight else _dropped
        try:
            for done in self.division.backward(loss, part):
                if not done.weight:
                    for p in self.params:
                        p.grad = None
                elif done.ends_slot:
                    if not streams:
                        self._seen.clear()
                        begin(done)
                    self._hand_over(ready)
                yield done
        finally:
            self._ready = None
        if not part.ends_slot:
            self.hide()

    def receive(
        self,
        sums: Sequence[tuple[Segment, torch.Tensor]],
        used: frozenset[int],
        squares: torch.Tensor,
        scale: Callable[[float], None],
    ) -> None:
        """Take the sums of the step, which is then *reduced*.

        Args:
            sums: The segments that this worker holds, in order, with their flat sums. Neighbours lie next to each other
                in memory.
            used: The parameter blocks that any worker's passes have used. Others get no gradient.
            squares: The sum of squares of every unit of every trained block of the whole model.
            scale: Multiplies all of ``sums``.
        """
        self._hidden = None
        self._squares, self._scale = squares, scale
        self.reduced, self.applied = True, False
        self.store.give(
            {param_block: parts for param_block, parts in by_param_block(sums).items() if param_block in used}
        )
        for param_block in self.store.computed:
            if param_block in used:
                p = self.store.parameters[param_block]
                p.grad = GradientGuard.of(p)

    def clip(self, max_norm: float) -> float:
        if not self.reduced:
            return 0.0
        norm = global_norm(self._squares)
        factor = clip_factor(norm, max_norm)
        if factor != 1.0:
            self._scale(factor)
            self.store.scale(factor)
        return norm

    def divide(self, by: float) -> None:
        self._scale(1.0 / by)
        self.store.scale(1.0 / by)
        self._squares = self._squares / by**2

    def _steps(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The optimizer is about to step."""
        if self.reduced and not self.applied and self.spreads:
            self._split_step.begin(self.own_segments, args, kwargs)

    def _stepped(self) -> None:
        """The optimizer has stepped."""
        if not self.reduced:
            return
        if not self.applied:
            self.version += 1
        self.applied, self.spread_out = True, False
        self.settle()

    def settle(self) -> None:
        """Go to the end of the step with the others, even if the program does not apply it or workers are lost."""
        self.applied = self.reduced
        try:
            if self.arrive is not None:
                self._split_step.finish()
                self.arrive()
            elif not self.spread_out:
                self.spread()
                self.spread_out = True
        except (GroupBroken, Unrecoverable) as error:
            self._split_step.finish()
            self.on_break(error)

    def abandon(self) -> None:
        super().abandon()
        self.store.clear()
        self.reduced = self.applied = False
        self.division.abandon()

    def refuse_leftovers(self) -> None:
        left = [s.parameter.grad is not None for s in self.store.shards if s.parameter.requires_grad]
        guarded = any(isinstance(p.grad, GradientGuard) for p in self.params)
        if any(left) and guarded:
            super().refuse_leftovers()
        if guarded:  # the program has cleared what its optimizer has
            for p in self.params:
                p.grad = None

    # -- new values to the workers that compute with them -------------------------------------------------------------

    @property
    def spreads(self) -> bool:
        """Whether workers compute with values that they do not hold."""
        return not self.store.frees and any(len(each) < self.comms.batch.size for each in self.held_by)

    def spread(self) -> None:
        """Send the values of every share from its first holder to the workers that compute with it and do not hold it.

        It may run again, also in another group: it changes only values that this worker does not hold.

        Raises:
            GroupBroken: With some values received and some not.
        """
        self.store.publish()
        if not self.spreads:
            return
        pending: list[tuple[BucketPlan, Work, torch.Tensor, torch.Tensor]] = []
        size = 0
        for plan in self.plans:
            pending.append((plan, *self._send(plan)))
            size += pending[-1][2].nbytes
            while size > IN_FLIGHT_BYTES:
                size -= pending[0][2].nbytes
                self._take(*pending.pop(0))
        self._split_step.finish()
        self.store.publish()
        for each in pending:
            self._take(*each)

    def _send(self, plan: BucketPlan) -> tuple[Work, torch.Tensor, torch.Tensor]:
        """Start to spread one bucket. Returns the collective, the memory for arriving values, and the values sent."""
        group, store = self.comms.batch, self.store
        to = [worker for worker in range(group.size) if worker not in self.held_by[group.rank]]
        held_values = [store.read(segment) for segment in plan.parts[group.rank]] if to else []
        mine = (
            (torch.cat(held_values) if len(held_values) > 1 else held_values[0]) if held_values else self._nothing(plan)
        )
        sizes = [len(mine) if worker in to else 0 for worker in range(group.size)]
        out_sizes = [0 if group.rank in self.held_by[reducer] else n for reducer, n in enumerate(plan.sizes)]
        out = torch.empty(sum(out_sizes), dtype=mine.dtype, device=group.wire)
        copies = mine.to(group.wire) if len(to) == 1 else mine.to(group.wire).repeat(len(to))
        return group.all_to_all(out, copies, out_sizes, sizes), out, copies

    def _nothing(self, plan: BucketPlan) -> torch.Tensor:
        p = self.store.parameters[plan.param_blocks[0]]
        return torch.empty(0, dtype=p.dtype, device=p.device)

    def _take(self, plan: BucketPlan, work: Work, out: torch.Tensor, sent: torch.Tensor) -> None:
        work.wait()
        at, rank = 0, self.comms.batch.rank
        for reducer, part in enumerate(plan.parts):
            if rank not in self.held_by[reducer]:
                for segment in part:
                    self.store.write_values(segment, out[at : at + segment.size])
                    at += segment.size

    # -- the layout ---------------------------------------------------------------------------------------------------

    def regroup(self, comms: Comms) -> None:
        """Take the place that ``comms`` gives. The state of that place must be on this worker already."""
        wanted = self.wanted_in(comms)
        if wanted != (self.store.computed, self.store.held):
            self.store.rebuild(*wanted)
        self.enter(comms)

    def memory(self) -> dict[str, int]:
        """Bytes on this worker of ``parameters``, ``gradients``, ``optimizer`` (state), and ``copies``: the part of the
        optimizer's state whose sums another worker makes, and that this one holds as well.
        """
        store = self.store
        state = {id(s): _state_bytes(store.optimizer.state.get(s.parameter, {})) for s in store.shards}
        total = sum(state.values())
        elements = sum(s.segment.size for s in store.shards if s.segment.param_block in set(self.split.trained))
        adds_up = sum(segment.size for segment in self.own_segments)
        copies = total * (elements - adds_up) // elements if elements else 0
        tensors = [*store.parameters, *(s.parameter for s in store.shards), *self.module.buffers()]
        gradients = storage_bytes(s.parameter.grad for s in store.shards)
        return {"parameters": storage_bytes(tensors), "gradients": gradients, "optimizer": total, "copies": copies}

    def other_state(self) -> dict[str, Any]:
        """The entries of the model's ``state_dict`` that are no parameters. (Parameters may lie on other workers.)"""
        state = {}
        for name in (name for name, tensor in self.state_names.items() if tensor is None):
            owner, _, key = name.rpartition(".")
            part = self.module.get_submodule(owner)
            state[name] = part.get_extra_state() if key == "_extra_state" else getattr(part, key).detach()
        return state

    def layout(self) -> tuple[Piece, ...]:
        """The pieces on this worker: buffers by name, and flat pieces of parameter blocks.

        A piece of the optimizer's state has the block's name and the tensor's name ("fc.weight#2:exp_avg"). A single
        number of a block has the box ().
        """
        pieces = [Piece(name, tuple((0, size) for size in b.shape)) for name, b in self.module.named_buffers()]
        for segment in self.store.held:
            name, box = self.split.param_blocks[segment.param_block].name, ((segment.start, segment.stop),)
            pieces += [
                Piece(name, box),
                *(Piece(f"{name}:{key}", box) for key in self.store.names(segment.param_block)),
            ]
            facts = self.store.scalars(segment.param_block)
            pieces += [Piece(f"{name}:{key}", ()) for key, value in facts.items() if isinstance(value, torch.Tensor)]
        return tuple(dict.fromkeys(pieces))

    def read(self, piece: Piece) -> torch.Tensor:
        param_block, key = self._named(piece)
        if param_block is None:
            return dict(self.module.named_buffers())[piece.name].detach()[tuple(slice(*edge) for edge in piece.box)]
        if not piece.box:
            value: torch.Tensor = self.store.scalars(param_block)[key]
            return value
        return self.store.read(Segment(param_block, *piece.box[0]), key or VALUES)

    def write(self, piece: Piece, values: torch.Tensor) -> None:
        param_block, key = self._named(piece)
        if param_block is None:
            dict(self.module.named_buffers())[piece.name][tuple(slice(*edge) for edge in piece.box)] = values
        elif not piece.box:
            self.store.write_scalar(param_block, key, values)
        else:
            self.store.write(Segment(param_block, *piece.box[0]), key or VALUES, values)

    def _named(self, piece: Piece) -> tuple[int | None, str]:
        """The parameter block and the optimizer's tensor that ``piece`` is a part of; None for a buffer."""
        if piece.name in self._block_named:
            return self._block_named[piece.name], ""
        name, _, key = piece.name.rpartition(":")
        return self._block_named.get(name), key


def _state_bytes(state: Any) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


def _raised(error: GroupBroken | Unrecoverable) -> None:
    raise error


def _nothing_leaves(block: int) -> None:
    """Default of ``on_block``: gradients leave when the replica hands them over."""


def _dropped(place: int, gradient: torch.Tensor | None) -> None:
    """Take a gradient that does not count."""


def _unscaled(factor: float) -> None:
    raise UserError("a gradient is clipped after session.backward", f"factor {factor}", "call it after the step's last")


class ProgramModel:
    """The names and shapes in a program's model. It must be made before a mechanism divides the model.

    Attributes:
        state_names: The names in the ``state_dict``, each with the first name of its parameter (tied weights have
            several names); None for buffers.
        shapes: The shapes of parameters, by their first name.
        tensor_of: The first name of each parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        self.tensor_of: dict[torch.Tensor, str] = {p: name for name, p in named}
        self.shapes = {name: tuple(p.shape) for name, p in named}
        kept = model.state_dict(keep_vars=True)
        self.state_names = {
            name: self.tensor_of.get(value) if isinstance(value, torch.Tensor) else None for name, value in kept.items()
        }


class SplitOptimizerStep:
    """Splits a step of ``store``'s optimizer in two: ``begin`` limits it to some shards, ``finish`` updates the others.

    The program, its schedulers and profilers see one step, with the bits of one step. So the step is not split where
    they could notice: other hooks, a closure, a wrapped ``step``, or an optimizer from outside of torch, which may
    count its calls (torch's optimizers count steps for each parameter).
    """

    def __init__(self, store: ParameterStore) -> None:
        optimizer = store.optimizer
        self._store, self._optimizer = store, optimizer
        self._step = _without_hooks(type(optimizer))
        self._later: dict[torch.nn.Parameter, torch.Tensor | None] = {}

    def begin(self, first: Set[Segment], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Limit the optimizer's coming step to the shards of ``first``. The optimizer's pre-hook calls this.

        Args:
            first: The segments that the step may update.
            args: The positional arguments of ``step``, with the optimizer.
            kwargs: The keyword arguments of ``step``.
        """
        self._later = {}
        if self._step is not None and len(args) == 1 and not kwargs and not self._has_other_hooks():
            later = [s.parameter for s in self._store.shards if s.segment not in first and s.parameter.grad is not None]
            self._later = {p: p.grad for p in later}
            _give(dict.fromkeys(later))

    def finish(self) -> None:
        """Update the remaining shards, if any."""
        later, self._later = self._later, {}
        if later and self._step is not None:
            done = {s.parameter: s.parameter.grad for s in self._store.shards}
            _give({**dict.fromkeys(done), **later})
            self._step(self._optimizer)
            _give({**done, **later})

    def _has_other_hooks(self) -> bool:
        return torch_private.step_hooks_of(self._optimizer) != (1, 1) or torch_private.has_global_step_hooks()


def _without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[..., Any] | None:
    """The function ``step`` of an optimizer class without the hooks around it, which ``functools.wraps`` keeps.

    None where ``step`` is not torch's own or is wrapped otherwise: then the inner function is another one.
    """
    if not kind.__module__.startswith("torch.optim."):
        return None
    step: Callable[..., Any] | None = getattr(kind.step, "__wrapped__", None)
    written_in = getattr(step, "__globals__", {}).get("__name__", "")
    return None if getattr(step, "hooked", False) or not written_in.startswith("torch.") else step


def _give(gradients: Mapping[torch.nn.Parameter, torch.Tensor | None]) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
