"""A replica's owned state as whole tensors, as the pieces that each worker writes, and on its way to others.

Whole state is what plain PyTorch would have, put together one tensor at a time. Of written state, one worker writes
each piece. State moves to another mesh, to joiners, between survivors, and into a snapshot and back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from elastune.core.layout import Box, FlatRange, ParamBlock, Segment, Split, buckets, held, written
from elastune.core.mesh import Mesh
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.owned.placement import VALUES, PlacedState, Shard, StateRequest, bring, meet
from elastune.parallel.mechanisms.owned.replica import OwnedReplica
from elastune.parallel.mechanisms.owned.store import Incoming
from elastune.parallel.mechanisms.tensor_storage import PartialTensor, elements, whole

# [facts] The numbers that an optimizer keeps of a leaf beside tensors of its size ("step"), as JSON.


def encoded(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """For ``decoded``. Tensors of one number keep their type; floats come back to the bit."""
    return {
        name: [str(value.dtype)[6:], value.item()] if isinstance(value, torch.Tensor) else value
        for name, value in scalars.items()
    }


def decoded(told: Mapping[str, Any]) -> dict[str, Any]:
    """What ``encoded`` was given; tensors on the CPU."""
    return {
        name: torch.tensor(value[1], dtype=getattr(torch, value[0])) if isinstance(value, list) else value
        for name, value in told.items()
    }


# [whole] State that lies in shares, as whole tensors: what plain PyTorch would have, put together one tensor at a time.


class LazyStateDict(Mapping[Any, Any]):
    """Values that are made when they are asked for, every time. Workers must ask for the same ones in one order."""

    def __init__(self, makers: Mapping[Any, Callable[[], Any]]) -> None:
        self._makers = makers

    def __getitem__(self, key: Any) -> Any:
        return self._makers[key]()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class FullState:
    """A replica's ``model`` and ``optimizer`` as ``state_dict`` gives them, with tensors that are gathered when they
    are read: all workers read all of them, in one order. On the CPU. Raises ``GroupBroken``, as does every reading.
    """

    def __init__(self, replica: OwnedReplica) -> None:
        self._replica = replica
        self._store, self._split = replica.store, replica.split
        self._group = replica.comms.everyone
        own = {
            i: (self._store.kinds(i), encoded(self._store.scalars(i)))
            for i in {s.param_block for s in self._store.held}
        }
        rows = self._group.gather_tensors(torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8))
        self._told: dict[int, tuple[dict[str, str], dict[str, Any]]] = {}
        for row in rows:
            self._told |= {int(i): told for i, told in json.loads(row.numpy().tobytes()).items()}
        self._sources = self._find_sources()

    def _find_sources(self) -> dict[int, list[tuple[int, Segment]]]:
        """By leaf: which rank tells which segment of it."""
        mesh, split = self._replica.comms.mesh, self._split
        found: dict[int, list[tuple[int, Segment]]] = {}
        for first in range(mesh.workers):
            if mesh.batch_rank(first) != 0:
                continue
            ranks, computed = mesh.batch_group(first), split.computed(mesh, first)
            new = [i for i in computed if i not in found]
            found |= {i: [] for i in new}
            for i in new:
                if not split.param_blocks[i].trained:
                    found[i].append((first, Segment(i, 0, split.param_blocks[i].size)))
            for plan in buckets(split, computed, mesh.batch):
                for rank, part in zip(ranks, plan.parts, strict=True):
                    for segment in part:
                        if segment.param_block in new:
                            found[segment.param_block].append((rank, segment))
        return found

    @property
    def model(self) -> Mapping[str, Any]:
        """By the names of the program's model."""
        kept: dict[str, Callable[[], Any]] = {}
        for name, tensor in self._replica.state_names.items():
            kept[name] = self._maker(tensor, VALUES) if tensor is not None else self._other(name)
        return LazyStateDict(kept)

    def _other(self, name: str) -> Callable[[], Any]:
        return lambda: self._replica.other_state()[name]

    @property
    def optimizer(self) -> dict[str, Any]:
        """By the numbers of the program's parameters."""
        state = {}
        for tensor, number in self._store.places.items():
            kinds, facts = self._told.get(self._leaves(tensor)[0], ({}, {}))
            if kinds or facts:
                makers = {name: self._maker(tensor, name) for name in kinds}
                makers |= {name: _constant(value) for name, value in decoded(facts).items()}
                state[number] = LazyStateDict(makers)
        return {"state": state, "param_groups": whole_groups(self._replica)}

    def _leaves(self, tensor: str) -> list[int]:
        return self._replica.leaves_of[tensor]

    def _maker(self, tensor: str, name: str) -> Callable[[], torch.Tensor]:
        return lambda: self._assembled(tensor, name)

    def _assembled(self, tensor: str, name: str) -> torch.Tensor:
        param_blocks = self._leaves(tensor)
        shape = self._replica.shapes[tensor]
        flats = [self._gathered(i, name) for i in param_blocks]
        if len(param_blocks) == 1:
            return flats[0].view(shape)
        found = torch.empty(shape, dtype=flats[0].dtype)
        for i, flat in zip(param_blocks, flats, strict=True):
            param_block = self._split.param_blocks[i]
            found[tuple(slice(*edge) for edge in param_block.box)] = flat.view(param_block.shape)
        return found

    def _gathered(self, param_block: int, name: str) -> torch.Tensor:
        """One leaf's flat tensor."""
        group, sources = self._group, self._sources[param_block]
        kind = self._split.param_blocks[param_block].dtype if name == VALUES else self._told[param_block][0][name]
        dtype: torch.dtype = getattr(torch, kind)
        flat = torch.empty(self._split.param_blocks[param_block].size, dtype=dtype)
        if group.size == 1:
            for _, segment in sources:
                flat[segment.start : segment.stop] = self._store.read(segment, name)
            return flat
        own = [self._store.read(segment, name).reshape(-1) for rank, segment in sources if rank == group.rank]
        mine = torch.cat([torch.empty(0, dtype=dtype), *(x.cpu() for x in own)]).to(group.wire)
        lengths = [sum(s.size for source, s in sources if source == rank) for rank in range(group.size)]
        out = torch.empty(sum(lengths), dtype=dtype, device=group.wire)
        group.all_to_all(out, mine.repeat(group.size), lengths, [len(mine)] * group.size).wait()
        at = 0
        for rank in range(group.size):
            for source, segment in sources:
                if source == rank:
                    flat[segment.start : segment.stop] = out[at : at + segment.size].cpu()
                    at += segment.size
        return flat


def whole_groups(replica: OwnedReplica) -> list[dict[str, Any]]:
    """The optimizer's groups with the program's numbers of parameters."""
    pairs = zip(replica.store.optimizer.param_groups, replica.store.numbers, strict=True)
    return [{**{k: v for k, v in group.items() if k != "params"}, "params": numbers} for group, numbers in pairs]


def load_whole_model(replica: OwnedReplica, model: Mapping[str, Any]) -> None:
    """Take over the values that ``FullState`` gave, plain PyTorch, or a file has: this worker's part of them.

    Raises:
        ValueError: Where names or shapes are others.
    """
    names, store = replica.state_names, replica.store
    if set(names) != set(model):
        raise ValueError(f"it has {sorted(set(model) ^ set(names))[:3]} more or less")
    for name, tensor in names.items():
        if tensor is not None and tuple(model[name].shape) != replica.shapes[tensor]:
            raise ValueError(f"{name} has shape {tuple(model[name].shape)}, not {replica.shapes[tensor]}")
    first = {tensor: name for name, tensor in reversed(names.items()) if tensor is not None}
    for i, param_block in enumerate(replica.split.param_blocks):
        store.fill(i, partial(_between, model[first[param_block.tensor]], param_block.box))
    others = {name: whole(model[name]) for name, tensor in names.items() if tensor is None}
    replica.module.load_state_dict(others, strict=False)


def load_whole_optimizer(replica: OwnedReplica, optimizer: Mapping[str, Any]) -> None:
    """What an optimizer keeps of whole parameters, and the options of its groups; as ``load_whole_model``."""
    store = replica.store
    groups = optimizer["param_groups"]
    if [list(group["params"]) for group in groups] != store.numbers:
        raise ValueError("its parameter groups are others")
    for own, group in zip(store.optimizer.param_groups, groups, strict=True):
        own.update({name: value for name, value in group.items() if name != "params"})
    for i, param_block in enumerate(replica.split.param_blocks):
        if param_block.tensor in store.places:
            store.load(i, optimizer["state"].get(store.places[param_block.tensor], {}))


def _between(value: Any, box: Box, start: int, stop: int) -> torch.Tensor:
    return elements(value, FlatRange(box, start, stop))


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


# [written] What a worker writes of state that lies in shares: each piece of it is written by one worker.


def sharded_state(replica: OwnedReplica) -> dict[str, Any]:
    """This worker's part of ``model``, by the names of the program's model, and of ``optimizer``, by its numbers.

    Buffers are rank 0's to write; numbers that an optimizer keeps of a parameter, that worker's who
    writes its first element.
    """
    comms, store = replica.comms, replica.store
    own: dict[str, list[Segment]] = {}
    for segment in written(replica.split, comms.mesh, comms.rank):
        own.setdefault(replica.split.param_blocks[segment.param_block].tensor, []).append(segment)
    model: dict[str, Any] = {}
    kept = replica.other_state() if comms.rank == 0 else {}
    for name, tensor in replica.state_names.items():
        if tensor is not None:
            model[name] = _scattered(replica, tensor, VALUES, own.get(tensor, []))
        elif name in kept:
            model[name] = kept[name]
    state: dict[int, dict[str, Any]] = {}
    for tensor, segments in own.items():
        number = store.places.get(tensor)
        if number is None:
            continue
        found = {name: _scattered(replica, tensor, name, segments) for name in store.names(segments[0].param_block)}
        first = next(
            (s for s in segments if s.start == 0 and _is_first(replica.split.param_blocks[s.param_block])), None
        )
        scalars = {} if first is None else store.scalars(first.param_block)
        if found or scalars:
            state[number] = found | scalars
    return {"model": model, "optimizer": {"state": state, "param_groups": whole_groups(replica)}}


def _is_first(param_block: ParamBlock) -> bool:
    return all(start == 0 for start, _ in param_block.box)


def _scattered(replica: OwnedReplica, tensor: str, name: str, segments: list[Segment]) -> PartialTensor:
    param_blocks = replica.split.param_blocks
    pieces = []
    for segment in segments:
        values = replica.store.read(segment, name).reshape(-1)
        pieces.append((FlatRange(param_blocks[segment.param_block].box, segment.start, segment.stop), values))
    dtype = pieces[0][1].dtype if pieces else _dtype(replica, tensor)
    return PartialTensor(f"{tensor}:{name}", replica.shapes[tensor], dtype, tuple(pieces))


def _dtype(replica: OwnedReplica, tensor: str) -> torch.dtype:
    return replica.store.parameters[replica.leaves_of[tensor][0]].dtype


# [moving] A replica's state on its way: to another mesh, to joiners, from survivors to each other, into a snapshot and back.

NOTHING = StateRequest((), ())


@dataclass(frozen=True)
class Kept:
    """What one worker has of a model's state of ``version``, and what is needed to place it anew.

    Attributes:
        split: The leaves.
        copies: How many workers hold each share.
        frees: Workers keep no values but those that they hold.
        version: See ``OwnedReplica``; -1: there is nothing.
        shards: What is here.
        facts: By leaf that is held: see ``placement.bring``.
    """

    split: Split
    copies: int
    frees: bool
    version: int
    shards: tuple[Shard, ...]
    facts: dict[int, Any]

    def wanted(self, mesh: Mesh, hosts: Sequence[str], size: int) -> list[StateRequest]:
        """What each of ``size`` workers is to have where the first of them stand as ``mesh`` says."""
        found = []
        for rank, holds in enumerate(held(self.split, mesh, self.copies, hosts)):
            computed = () if self.frees else self.split.computed(mesh, rank)
            whole = (Segment(i, 0, self.split.param_blocks[i].size) for i in computed)
            others = (segment for segment in holds if segment.param_block not in computed)
            found.append(StateRequest(holds, (*whole, *others)))
        return found + [NOTHING] * (size - mesh.workers)

    def brought(self, group: Group, mesh: Mesh, hosts: Sequence[str], device: torch.device) -> PlacedState:
        """``placement.bring`` over ``group``, for the first workers of it to stand as ``mesh`` says."""
        want = self.wanted(mesh, hosts, group.size)
        return bring(group, self.split, self.version, self.shards, self.facts, want, device)

    def copied(self) -> Kept:
        """On the CPU, in memory of its own."""
        shards = [
            replace(shard, tensors={name: t.detach().to("cpu", copy=True) for name, t in shard.tensors.items()})
            for shard in self.shards
        ]
        return replace(self, shards=tuple(shards))


def kept(replica: OwnedReplica) -> Kept:
    """What ``replica`` has now; the tensors are its own."""
    store = replica.store
    shards = []
    for shard in store.shards:
        state = store.optimizer.state.get(shard.parameter, {})
        tensors = {VALUES: shard.parameter.detach()} | {
            name: state[name] for name in store.names(shard.segment.param_block)
        }
        shards.append(Shard(shard.segment, tensors, held=True))
    if replica.spread_out:
        shards += [Shard(segment, {VALUES: values}, held=False) for segment, values in store.whole_values()]
    facts = {
        param_block: encoded(store.scalars(param_block))
        for param_block in {shard.segment.param_block for shard in store.shards}
    }
    everything = (*shards, *replica.brought.shards)
    version = -1 if replica.stranger else replica.version
    return Kept(replica.split, replica.copies, store.frees, version, everything, {**replica.brought.facts, **facts})


def place(replica: OwnedReplica, comms: Comms, group: Group, *, exact: bool) -> PlacedState:
    """Bring all state to where it belongs in the mesh of ``comms``; all workers of ``group`` call this.

    ``group`` begins with the workers of the mesh; further ones (``hand_over``) have something to give.

    Raises:
        GroupBroken: Nothing has changed, but that what has come may be here twice.
        Unrecoverable: On every worker: nobody has a piece.
        CopiesDiffer: On every worker, where ``exact``: two have not the same bits of a piece.
    """
    if replica.stranger:  # all of it comes anew: since an attempt before this one the others may have taken steps
        replica.brought = PlacedState()
    found = kept(replica).brought(group, comms.mesh, comms.hosts, replica.store.home)
    # What an attempt before this one has brought was not asked for again.
    found.shards += [shard for shard in replica.brought.shards if VALUES in shard.tensors]
    replica.brought = found
    meet(group, replica.split, found, exact=exact)
    restore(replica, comms, found)
    return found


def hand_over(replica: OwnedReplica, group: Group, mesh: Mesh, hosts: Sequence[str]) -> None:
    """As a worker that leaves: give others what they lack. ``group`` begins with the workers of ``mesh``."""
    found = kept(replica).brought(group, mesh, hosts, replica.store.home)
    meet(group, replica.split, found, exact=False)  # it has nothing of this any more


def restore(replica: OwnedReplica, comms: Comms, found: PlacedState) -> None:
    """Have what was ``found`` for this worker, and stand where ``comms`` says."""
    store = replica.store
    if replica.stranger or replica.version != found.version:  # what is here was never the run's
        store.optimizer.state.clear()
    incoming = Incoming(
        {(shard.segment, name): tensor for shard in found.shards for name, tensor in shard.tensors.items()},
        {param_block: decoded(facts) for param_block, facts in found.facts.items() if facts},
    )
    store.rebuild(*replica.wanted_in(comms), incoming)
    for shard in found.shards:  # the values here may be older
        if VALUES in shard.tensors:
            store.put_values(shard.segment, shard.tensors[VALUES])
    replica.brought = PlacedState()
    replica.version, replica.stranger, replica.spread_out = found.version, False, True
    replica.enter(comms)
