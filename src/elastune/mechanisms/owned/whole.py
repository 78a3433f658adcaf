"""State that lies in shares, as whole tensors: what plain PyTorch would have, put together one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from elastune.core.layout import Box
from elastune.core.ownership import Segment, buckets
from elastune.core.stretches import Stretch
from elastune.mechanisms.owned.facts import decoded, encoded
from elastune.mechanisms.owned.placement import VALUES
from elastune.mechanisms.owned.replica import OwnedReplica
from elastune.mechanisms.scattered import elements, whole


class Lazy(Mapping[Any, Any]):
    """Values that are made when they are asked for, every time. Workers must ask for the same ones in one order."""

    def __init__(self, makers: Mapping[Any, Callable[[], Any]]) -> None:
        self._makers = makers

    def __getitem__(self, key: Any) -> Any:
        return self._makers[key]()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class WholeState:
    """A replica's ``model`` and ``optimizer`` as ``state_dict`` gives them, with tensors that are gathered when they
    are read: all workers read all of them, in one order. On the CPU. Raises ``GroupBroken``, as does every reading.
    """

    def __init__(self, replica: OwnedReplica) -> None:
        self._replica = replica
        self._store, self._split = replica.store, replica.split
        self._group = replica.comms.everyone
        own = {i: (self._store.kinds(i), encoded(self._store.scalars(i))) for i in {s.leaf for s in self._store.held}}
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
                if not split.leaves[i].trained:
                    found[i].append((first, Segment(i, 0, split.leaves[i].size)))
            for plan in buckets(split, computed, mesh.batch):
                for rank, part in zip(ranks, plan.parts, strict=True):
                    for segment in part:
                        if segment.leaf in new:
                            found[segment.leaf].append((rank, segment))
        return found

    @property
    def model(self) -> Mapping[str, Any]:
        """By the names of the program's model."""
        kept: dict[str, Callable[[], Any]] = {}
        for name, tensor in self._replica.state_names.items():
            kept[name] = self._maker(tensor, VALUES) if tensor is not None else self._other(name)
        return Lazy(kept)

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
                state[number] = Lazy(makers)
        return {"state": state, "param_groups": whole_groups(self._replica)}

    def _leaves(self, tensor: str) -> list[int]:
        return self._replica.leaves_of[tensor]

    def _maker(self, tensor: str, name: str) -> Callable[[], torch.Tensor]:
        return lambda: self._assembled(tensor, name)

    def _assembled(self, tensor: str, name: str) -> torch.Tensor:
        leaves = self._leaves(tensor)
        shape = self._replica.shapes[tensor]
        flats = [self._gathered(i, name) for i in leaves]
        if len(leaves) == 1:
            return flats[0].view(shape)
        found = torch.empty(shape, dtype=flats[0].dtype)
        for i, flat in zip(leaves, flats, strict=True):
            leaf = self._split.leaves[i]
            found[tuple(slice(*edge) for edge in leaf.box)] = flat.view(leaf.shape)
        return found

    def _gathered(self, leaf: int, name: str) -> torch.Tensor:
        """One leaf's flat tensor."""
        group, sources = self._group, self._sources[leaf]
        kind = self._split.leaves[leaf].dtype if name == VALUES else self._told[leaf][0][name]
        dtype: torch.dtype = getattr(torch, kind)
        flat = torch.empty(self._split.leaves[leaf].size, dtype=dtype)
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
    """Take over the values that ``WholeState`` gave, plain PyTorch, or a file has: this worker's part of them.

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
    for i, leaf in enumerate(replica.split.leaves):
        store.fill(i, partial(_between, model[first[leaf.tensor]], leaf.box))
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
    for i, leaf in enumerate(replica.split.leaves):
        if leaf.tensor in store.places:
            store.load(i, optimizer["state"].get(store.places[leaf.tensor], {}))


def _between(value: Any, box: Box, start: int, stop: int) -> torch.Tensor:
    return elements(value, Stretch(box, start, stop))


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value
