"""A replica's owned state in three forms: whole tensors, the pieces that each worker writes, and state on the move.

Whole state (``FullState``) is that of plain PyTorch, assembled one tensor at a time. Of written state
(``sharded_state``) each piece has one writer. State moves (``Kept``, ``place``) to another mesh, to joiners, between
survivors, and into a snapshot and back.
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


def encoded(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that an optimizer keeps of a parameter block ("step"), as JSON values for ``decoded``.

    Tensors of one number keep their type, and floats keep their bits.
    """
    return {
        name: [str(value.dtype)[6:], value.item()] if isinstance(value, torch.Tensor) else value
        for name, value in scalars.items()
    }


def decoded(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that ``encoded`` turned into JSON values. Tensors are on the CPU."""
    return {
        name: torch.tensor(value[1], dtype=getattr(torch, value[0])) if isinstance(value, list) else value
        for name, value in scalars.items()
    }


class LazyStateDict(Mapping[Any, Any]):
    """A mapping whose values are made at each access. All workers must read the same keys in the same order."""

    def __init__(self, makers: Mapping[Any, Callable[[], Any]]) -> None:
        self._makers = makers

    def __getitem__(self, key: Any) -> Any:
        return self._makers[key]()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class FullState:
    """A replica's ``model`` and ``optimizer`` in the form of ``state_dict``, with tensors gathered when they are read.

    All workers must read all tensors in the same order. Tensors are on the CPU. The constructor and every reading raise
    ``GroupBroken`` where the group breaks.
    """

    def __init__(self, replica: OwnedReplica) -> None:
        self._replica = replica
        self._store, self._split = replica.store, replica.split
        self._group = replica.comms.everyone
        names_and_scalars = {
            i: (self._store.kinds(i), encoded(self._store.scalars(i)))
            for i in {s.param_block for s in self._store.held}
        }
        rows = self._group.gather_tensors(
            torch.frombuffer(bytearray(json.dumps(names_and_scalars).encode()), dtype=torch.uint8)
        )
        self._described: dict[int, tuple[dict[str, str], dict[str, Any]]] = {}
        for row in rows:
            self._described |= {int(i): described for i, described in json.loads(row.numpy().tobytes()).items()}
        self._sources = self._find_sources()

    def _find_sources(self) -> dict[int, list[tuple[int, Segment]]]:
        """For each parameter block the segments that ranks send."""
        mesh, split = self._replica.comms.mesh, self._split
        sources: dict[int, list[tuple[int, Segment]]] = {}
        for first in range(mesh.workers):
            if mesh.batch_rank(first) != 0:
                continue
            ranks, computed = mesh.batch_group(first), split.computed(mesh, first)
            new = [i for i in computed if i not in sources]
            sources |= {i: [] for i in new}
            for i in new:
                if not split.param_blocks[i].trained:
                    sources[i].append((first, Segment(i, 0, split.param_blocks[i].size)))
            for plan in buckets(split, computed, mesh.batch):
                for rank, part in zip(ranks, plan.parts, strict=True):
                    for segment in part:
                        if segment.param_block in new:
                            sources[segment.param_block].append((rank, segment))
        return sources

    @property
    def model(self) -> Mapping[str, Any]:
        """The model's state, by the names of the program's model."""
        kept: dict[str, Callable[[], Any]] = {}
        for name, tensor in self._replica.state_names.items():
            kept[name] = self._maker(tensor, VALUES) if tensor is not None else self._other(name)
        return LazyStateDict(kept)

    def _other(self, name: str) -> Callable[[], Any]:
        return lambda: self._replica.other_state()[name]

    @property
    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state, by the numbers of the program's parameters."""
        state = {}
        for tensor, number in self._store.places.items():
            kinds, facts = self._described.get(self._blocks_of(tensor)[0], ({}, {}))
            if kinds or facts:
                makers = {name: self._maker(tensor, name) for name in kinds}
                makers |= {name: _constant(value) for name, value in decoded(facts).items()}
                state[number] = LazyStateDict(makers)
        return {"state": state, "param_groups": whole_groups(self._replica)}

    def _blocks_of(self, tensor: str) -> list[int]:
        return self._replica.blocks_of_tensor[tensor]

    def _maker(self, tensor: str, name: str) -> Callable[[], torch.Tensor]:
        return lambda: self._assembled(tensor, name)

    def _assembled(self, tensor: str, name: str) -> torch.Tensor:
        param_blocks = self._blocks_of(tensor)
        shape = self._replica.shapes[tensor]
        flats = [self._gathered(i, name) for i in param_blocks]
        if len(param_blocks) == 1:
            return flats[0].view(shape)
        assembled = torch.empty(shape, dtype=flats[0].dtype)
        for i, flat in zip(param_blocks, flats, strict=True):
            param_block = self._split.param_blocks[i]
            assembled[tuple(slice(*edge) for edge in param_block.box)] = flat.view(param_block.shape)
        return assembled

    def _gathered(self, param_block: int, name: str) -> torch.Tensor:
        """The flat tensor ``name`` of one parameter block."""
        group, sources = self._group, self._sources[param_block]
        kind = self._split.param_blocks[param_block].dtype if name == VALUES else self._described[param_block][0][name]
        dtype: torch.dtype = getattr(torch, kind)
        flat = torch.empty(self._split.param_blocks[param_block].size, dtype=dtype)
        if group.size == 1:
            for _, segment in sources:
                flat[segment.start : segment.stop] = self._store.read(segment, name)
            return flat
        held_values = [self._store.read(segment, name).reshape(-1) for rank, segment in sources if rank == group.rank]
        mine = torch.cat([torch.empty(0, dtype=dtype), *(x.cpu() for x in held_values)]).to(group.wire)
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
    """Load this worker's part of a whole model, which comes from ``FullState``, plain PyTorch or a file.

    Raises:
        ValueError: Where names or shapes differ from the replica's.
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
    """Load this worker's part of a whole optimizer's state, and the options of its groups; see ``load_whole_model``."""
    store = replica.store
    groups = optimizer["param_groups"]
    if [list(group["params"]) for group in groups] != store.numbers:
        raise ValueError("its parameter groups are others")
    for own_group, group in zip(store.optimizer.param_groups, groups, strict=True):
        own_group.update({name: value for name, value in group.items() if name != "params"})
    for i, param_block in enumerate(replica.split.param_blocks):
        if param_block.tensor in store.places:
            store.load(i, optimizer["state"].get(store.places[param_block.tensor], {}))


def _between(value: Any, box: Box, start: int, stop: int) -> torch.Tensor:
    return elements(value, FlatRange(box, start, stop))


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def sharded_state(replica: OwnedReplica) -> dict[str, Any]:
    """The pieces that this worker writes: of ``model``, by the program's names, and of ``optimizer``, by its numbers.

    Each piece has one writer. Rank 0 writes buffers. The worker that writes a parameter's first element also writes the
    numbers that the optimizer keeps of it.
    """
    comms, store = replica.comms, replica.store
    segments_of: dict[str, list[Segment]] = {}
    for segment in written(replica.split, comms.mesh, comms.rank):
        segments_of.setdefault(replica.split.param_blocks[segment.param_block].tensor, []).append(segment)
    model: dict[str, Any] = {}
    kept = replica.other_state() if comms.rank == 0 else {}
    for name, tensor in replica.state_names.items():
        if tensor is not None:
            model[name] = _partial(replica, tensor, VALUES, segments_of.get(tensor, []))
        elif name in kept:
            model[name] = kept[name]
    state: dict[int, dict[str, Any]] = {}
    for tensor, segments in segments_of.items():
        number = store.places.get(tensor)
        if number is None:
            continue
        tensors = {name: _partial(replica, tensor, name, segments) for name in store.names(segments[0].param_block)}
        first = next(
            (s for s in segments if s.start == 0 and _is_first(replica.split.param_blocks[s.param_block])), None
        )
        scalars = {} if first is None else store.scalars(first.param_block)
        if tensors or scalars:
            state[number] = tensors | scalars
    return {"model": model, "optimizer": {"state": state, "param_groups": whole_groups(replica)}}


def _is_first(param_block: ParamBlock) -> bool:
    return all(start == 0 for start, _ in param_block.box)


def _partial(replica: OwnedReplica, tensor: str, name: str, segments: list[Segment]) -> PartialTensor:
    param_blocks = replica.split.param_blocks
    pieces = []
    for segment in segments:
        values = replica.store.read(segment, name).reshape(-1)
        pieces.append((FlatRange(param_blocks[segment.param_block].box, segment.start, segment.stop), values))
    dtype = pieces[0][1].dtype if pieces else _dtype(replica, tensor)
    return PartialTensor(f"{tensor}:{name}", replica.shapes[tensor], dtype, tuple(pieces))


def _dtype(replica: OwnedReplica, tensor: str) -> torch.dtype:
    return replica.store.parameters[replica.blocks_of_tensor[tensor][0]].dtype


NOTHING = StateRequest((), ())


@dataclass(frozen=True)
class Kept:
    """One worker's part of a model's state, with everything needed to place it on another mesh.

    Attributes:
        split: The parameter blocks.
        copies: The number of workers that hold each share.
        frees: Workers keep only the values that they hold.
        version: See ``OwnedReplica``; -1: this worker has no state.
        shards: The state on this worker.
        facts: The numbers of each block that is held; see ``placement.bring``.
    """

    split: Split
    copies: int
    frees: bool
    version: int
    shards: tuple[Shard, ...]
    facts: dict[int, Any]

    def wanted(self, mesh: Mesh, hosts: Sequence[str], size: int) -> list[StateRequest]:
        """The state that each of ``size`` workers is to have, where the first of them form ``mesh``."""
        requests = []
        for rank, holds in enumerate(held(self.split, mesh, self.copies, hosts)):
            computed = () if self.frees else self.split.computed(mesh, rank)
            whole = (Segment(i, 0, self.split.param_blocks[i].size) for i in computed)
            others = (segment for segment in holds if segment.param_block not in computed)
            requests.append(StateRequest(holds, (*whole, *others)))
        return requests + [NOTHING] * (size - mesh.workers)

    def brought(self, group: Group, mesh: Mesh, hosts: Sequence[str], device: torch.device) -> PlacedState:
        """Call ``placement.bring`` over ``group``, whose first workers form ``mesh``."""
        want = self.wanted(mesh, hosts, group.size)
        return bring(group, self.split, self.version, self.shards, self.facts, want, device)

    def copied(self) -> Kept:
        """A copy on the CPU, in memory of its own."""
        shards = [
            replace(shard, tensors={name: t.detach().to("cpu", copy=True) for name, t in shard.tensors.items()})
            for shard in self.shards
        ]
        return replace(self, shards=tuple(shards))


def kept(replica: OwnedReplica) -> Kept:
    """The state that ``replica`` has now. Its tensors are the replica's own, not copies."""
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
    """Bring all state to the workers of the mesh of ``comms`` that need it. All workers of ``group`` call this.

    ``group`` begins with the workers of the mesh. Further workers only give state (``hand_over``).

    Raises:
        GroupBroken: The group broke. The replica is unchanged, but arrived state may take memory twice.
        Unrecoverable: No worker has a piece. Raised on every worker.
        CopiesDiffer: With ``exact``: two copies of a piece have different bits. Raised on every worker.
    """
    if replica.stranger:  # all state comes again: the others may have taken steps since an earlier attempt
        replica.brought = PlacedState()
    placed = kept(replica).brought(group, comms.mesh, comms.hosts, replica.store.home)
    # State from an earlier attempt was not requested again.
    placed.shards += [shard for shard in replica.brought.shards if VALUES in shard.tensors]
    replica.brought = placed
    meet(group, replica.split, placed, exact=exact)
    restore(replica, comms, placed)
    return placed


def hand_over(replica: OwnedReplica, group: Group, mesh: Mesh, hosts: Sequence[str]) -> None:
    """Give other workers the state that they lack; a worker that leaves calls this.

    ``group`` begins with the workers of ``mesh``.
    """
    placed = kept(replica).brought(group, mesh, hosts, replica.store.home)
    meet(group, replica.split, placed, exact=False)  # this worker keeps no copy to compare


def restore(replica: OwnedReplica, comms: Comms, placed: PlacedState) -> None:
    """Swap in the state ``placed`` for this worker, and take the place that ``comms`` gives."""
    store = replica.store
    if replica.stranger or replica.version != placed.version:  # this worker's state is not the run's
        store.optimizer.state.clear()
    incoming = Incoming(
        {(shard.segment, name): tensor for shard in placed.shards for name, tensor in shard.tensors.items()},
        {param_block: decoded(facts) for param_block, facts in placed.facts.items() if facts},
    )
    store.rebuild(*replica.wanted_in(comms), incoming)
    for shard in placed.shards:  # this worker's values may be older
        if VALUES in shard.tensors:
            store.put_values(shard.segment, shard.tensors[VALUES])
    replica.brought = PlacedState()
    replica.version, replica.stranger, replica.spread_out = placed.version, False, True
    replica.enter(comms)
