"""One worker's part of a replica whose state is owned in shares: passes, update, and the spread of new values.

The optimizer's step is split in two: first the shares that other workers wait for; while these travel, the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as hooks

from elastune.core.batch_slices import BatchSlice
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
from elastune.parallel.comm.group import GroupBroken, Work
from elastune.parallel.comm.norms import clip_factor, global_norm
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.base import Ready, Replica, storage_bytes
from elastune.parallel.mechanisms.guards import GradientGuard
from elastune.parallel.mechanisms.model_parallel import ModelParallel, Until
from elastune.parallel.mechanisms.owned.placement import VALUES, PlacedState
from elastune.parallel.mechanisms.owned.store import ParameterStore

# [own first] An optimizer's step in two calls: first what other workers wait for, then, while that travels, the copies.


class SplitOptimizerStep:
    """Has ``store``'s optimizer step on some of its shards alone; ``finish`` steps on the others.

    That shows nowhere else: the program, its schedulers and profilers see one step, and the bits are those of one.
    Hence it is left alone where somebody may see more: hooks of others, a closure, or an optimizer that is not torch's
    own and may count its calls (torch's count steps with each parameter), or whose ``step`` somebody has wrapped.
    """

    def __init__(self, store: ParameterStore) -> None:
        optimizer = store.optimizer
        self._store, self._optimizer = store, optimizer
        self._step = _without_hooks(type(optimizer))
        self._later: dict[torch.nn.Parameter, torch.Tensor | None] = {}

    def begin(self, own: Set[Segment], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """To be called by the optimizer's pre-hook: its step with these arguments is to be on the shards of ``own``."""
        self._later = {}
        if self._step is not None and len(args) == 1 and not kwargs and not self._has_other_hooks():
            later = [s.parameter for s in self._store.shards if s.segment not in own and s.parameter.grad is not None]
            self._later = {p: p.grad for p in later}
            _give(dict.fromkeys(later))

    def finish(self) -> None:
        """Step on the rest, if there is any left."""
        later, self._later = self._later, {}
        if later and self._step is not None:
            done = {s.parameter: s.parameter.grad for s in self._store.shards}
            _give({**dict.fromkeys(done), **later})
            self._step(self._optimizer)
            _give({**done, **later})

    def _has_other_hooks(self) -> bool:
        own = len(self._optimizer._optimizer_step_pre_hooks), len(self._optimizer._optimizer_step_post_hooks)
        return own != (1, 1) or bool(hooks._global_optimizer_pre_hooks or hooks._global_optimizer_post_hooks)


def _without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[..., Any] | None:
    """``step`` without the hooks around it, which torch keeps within reach of functools.wraps; None where it is not
    torch's own, or somebody has wrapped it: what is within reach then is theirs, or has the hooks once more.
    """
    if not kind.__module__.startswith("torch.optim."):
        return None
    step: Callable[..., Any] | None = getattr(kind.step, "__wrapped__", None)
    written_in = getattr(step, "__globals__", {}).get("__name__", "")
    return None if getattr(step, "hooked", False) or not written_in.startswith("torch.") else step


def _give(gradients: Mapping[torch.nn.Parameter, torch.Tensor | None]) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


# [replica] One worker's part of a replica whose state is held in shares: its passes, its update, and how new values spread.

IN_FLIGHT_BYTES = 64 << 20


class ProgramModel:
    """What a model is called by the program that built it; to be made before anything divides it.

    Attributes:
        state_names: The names in its ``state_dict``, each with the name of the parameter that it is: that one's first
            name where it has several (tied weights); None for buffers.
        shapes: Of parameters, by their first name.
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


class OwnedReplica(Replica):
    """A division's passes over a store's leaves. See ``mechanisms.base.Replica``; gradients are those of all leaves of
    the split, by their place in ``split.trained``, and those of leaves that are computed elsewhere never come.

    A step: ``begin_step``; ``run`` for each slice; then ``receive`` the sums of what is held here, which is from then
    on the *reduced* step; the optimizer's step, after which ``spread`` sends the new values.

    Attributes:
        plans: The buckets of this worker's batch group.
        own: What this worker adds up.
        held_by: By batch rank: who of the batch group holds what it adds up.
        wards: What workers outside of the batch groups hold.
        copies: How many workers hold each share, where there are as many.
        state_names, shapes: See ``ProgramModel``.
        leaves_of: By the name of a parameter: its leaves.
        reduced: A step's sums are here, and its gradients are not dropped yet.
        applied: The optimizer has updated the shares with them.
        version: Of what this worker holds: 0 as the program has built it, then 1 and the steps that were applied to it.
            So what lies on a worker that is still loading does not pass for what others have loaded.
        on_break: What to do where a group breaks after a step, or state turns out to be lost; it returns once values
            are spread.
        arrive: Brings state to where it belongs among other workers: what this one does after its step instead of
            spreading values, where the others wait for it to be as far as they are.
        spread_out: All values that this worker computes with are those of ``version``.
        stranger: What is here was never the run's: others' state is to come.
        brought: What has come and was not swapped in yet, since a group broke.
        blocks: Where gradients leave in each pass: the leaves that do so together.
        on_block: What to do when a pass is through with a block.
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
        self.leaves_of: dict[str, list[int]] = {}
        for i, param_block in enumerate(self.split.param_blocks):
            self.leaves_of.setdefault(param_block.tensor, []).append(i)
        self._leaf_of = {param_block.name: i for i, param_block in enumerate(self.split.param_blocks)}
        self.plans: tuple[BucketPlan, ...] = ()
        self.own: frozenset[Segment] = frozenset()
        self._own_first = SplitOptimizerStep(store)
        self.held_by: list[tuple[int, ...]] = []
        self.remote_owners: tuple[RemoteOwner, ...] = ()
        store.rebuild(*self.wanted_in(comms))
        self.enter(comms)
        optimizer.register_step_pre_hook(lambda _, args, kwargs: self._steps(args, kwargs))
        optimizer.register_step_post_hook(lambda *_: self._stepped())

    def wanted_in(self, comms: Comms) -> tuple[tuple[int, ...], tuple[Segment, ...]]:
        """What this worker is to compute with, and to hold, in the mesh of ``comms``."""
        mesh, rank = comms.mesh, comms.rank
        return self.split.computed(mesh, rank), held(self.split, mesh, self.copies, comms.hosts)[rank]

    def enter(self, comms: Comms) -> None:
        """Stand where ``comms`` says, with a store that has what belongs there."""
        self.comms, mesh = comms, comms.mesh
        self.plans = buckets(self.split, self.store.computed, mesh.batch)
        self.held_by = owners_in_group(mesh, comms.rank, self.copies, comms.hosts)
        self.remote_owners = remote_owners(self.split, mesh, self.copies, comms.hosts)
        self.own = frozenset(segment for plan in self.plans for segment in plan.parts[mesh.batch_rank(comms.rank)])
        self.division.enter(comms)
        self.division.evaluates = False

    # -- a step -------------------------------------------------------------------------------------------------------

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
        """No step's gradients are here."""
        if self.reduced:
            for p in self.params:
                p.grad = None
            self.store.clear()
        self.reduced = self.applied = False

    def run(
        self, loss: torch.Tensor, part: BatchSlice, begin: Callable[[BatchSlice], None], ready: Ready
    ) -> Iterator[BatchSlice]:
        """The backward pass of ``part``, as far as it is due: see ``Division.backward``.

        ``begin`` is called before the gradients of a slice that ends its slot go to ``ready``, which copies them; then
        that slice is yielded. Those of other slices are hidden until the slot's last one. A slice without weight
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
        """The step is reduced: ``sums`` are what this worker holds of it, flat and in order of leaves.

        Args:
            sums: Segments of leaves, with their sums; neighbours lie one behind the other in memory.
            used: The leaves that any worker's passes have used; the others have no gradient.
            squares: Of every unit of every trained leaf of the whole model.
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

    def _steps(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The optimizer is about to step."""
        if self.reduced and not self.applied and self.spreads:
            self._own_first.begin(self.own, args, kwargs)

    def _stepped(self) -> None:
        """The optimizer has stepped."""
        if not self.reduced:
            return
        if not self.applied:
            self.version += 1
        self.applied, self.spread_out = True, False
        self.settle()

    def settle(self) -> None:
        """The step is applied here, if the program applies it at all: go where all are, whoever is lost meanwhile."""
        self.applied = self.reduced
        try:
            if self.arrive is not None:
                self._own_first.finish()
                self.arrive()
            elif not self.spread_out:
                self.spread()
                self.spread_out = True
        except (GroupBroken, Unrecoverable) as error:
            self._own_first.finish()
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

    # -- values to who computes with them -----------------------------------------------------------------------------

    @property
    def spreads(self) -> bool:
        """Whether there are values that workers compute with and do not hold."""
        return not self.store.frees and any(len(each) < self.comms.batch.size for each in self.held_by)

    def spread(self) -> None:
        """The first holder of every share sends its values to those that compute with its leaf and do not hold it.

        May be done again, and in another group: it changes nothing but values that are not held here.

        Raises:
            GroupBroken: With some values received and some not.
        """
        self.store.publish()
        if not self.spreads:
            return
        under_way: list[tuple[BucketPlan, Work, torch.Tensor, torch.Tensor]] = []
        size = 0
        for plan in self.plans:
            under_way.append((plan, *self._send(plan)))
            size += under_way[-1][2].nbytes
            while size > IN_FLIGHT_BYTES:
                size -= under_way[0][2].nbytes
                self._take(*under_way.pop(0))
        self._own_first.finish()
        self.store.publish()
        for each in under_way:
            self._take(*each)

    def _send(self, plan: BucketPlan) -> tuple[Work, torch.Tensor, torch.Tensor]:
        """Start what ``spread`` does of one bucket: the work, where it arrives, and what is sent."""
        group, store = self.comms.batch, self.store
        to = [worker for worker in range(group.size) if worker not in self.held_by[group.rank]]
        own = [store.read(segment) for segment in plan.parts[group.rank]] if to else []
        mine = (torch.cat(own) if len(own) > 1 else own[0]) if own else self._nothing(plan)
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

    # -- where it lies ------------------------------------------------------------------------------------------------

    def regroup(self, comms: Comms) -> None:
        """Stand where ``comms`` says. What is to be held there is here already (``store.rebuild``), or the same."""
        wanted = self.wanted_in(comms)
        if wanted != (self.store.computed, self.store.held):
            self.store.rebuild(*wanted)
        self.enter(comms)

    def memory(self) -> dict[str, int]:
        """Bytes that this worker has of ``parameters``, ``gradients``, ``optimizer`` (state), and ``copies``: what of
        the optimizer's state another worker adds up, and this one holds as well.
        """
        store = self.store
        state = {id(s): _state_bytes(store.optimizer.state.get(s.parameter, {})) for s in store.shards}
        total = sum(state.values())
        elements = sum(s.segment.size for s in store.shards if s.segment.param_block in set(self.split.trained))
        adds_up = sum(segment.size for segment in self.own)
        copies = total * (elements - adds_up) // elements if elements else 0
        tensors = [*store.parameters, *(s.parameter for s in store.shards), *self.module.buffers()]
        gradients = storage_bytes(s.parameter.grad for s in store.shards)
        return {"parameters": storage_bytes(tensors), "gradients": gradients, "optimizer": total, "copies": copies}

    def other_state(self) -> dict[str, Any]:
        """What the model's ``state_dict`` has beside parameters; these need not all be here."""
        found = {}
        for name in (name for name, tensor in self.state_names.items() if tensor is None):
            owner, _, key = name.rpartition(".")
            part = self.module.get_submodule(owner)
            found[name] = part.get_extra_state() if key == "_extra_state" else getattr(part, key).detach()
        return found

    def layout(self) -> tuple[Piece, ...]:
        """Buffers by their names; of leaves flat pieces, which bear the leaf's name and that of the optimizer's tensor
        behind it ("fc.weight#2:exp_avg"); what is one number for the leaf has the box ().
        """
        found = [Piece(name, tuple((0, size) for size in b.shape)) for name, b in self.module.named_buffers()]
        for segment in self.store.held:
            name, box = self.split.param_blocks[segment.param_block].name, ((segment.start, segment.stop),)
            found += [Piece(name, box), *(Piece(f"{name}:{key}", box) for key in self.store.names(segment.param_block))]
            facts = self.store.scalars(segment.param_block)
            found += [Piece(f"{name}:{key}", ()) for key, value in facts.items() if isinstance(value, torch.Tensor)]
        return tuple(dict.fromkeys(found))

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
        """The leaf and the optimizer's tensor that ``piece`` is of; None for a buffer."""
        if piece.name in self._leaf_of:
            return self._leaf_of[piece.name], ""
        name, _, key = piece.name.rpartition(":")
        return self._leaf_of.get(name), key


def _state_bytes(state: Any) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


def _raised(error: GroupBroken | Unrecoverable) -> None:
    raise error


def _nothing_leaves(block: int) -> None:
    """Gradients leave when the replica hands them over."""


def _dropped(place: int, gradient: torch.Tensor | None) -> None:
    """A gradient that counts for nothing."""


def _unscaled(factor: float) -> None:
    raise UserError("a gradient is clipped after session.backward", f"factor {factor}", "call it after the step's last")
