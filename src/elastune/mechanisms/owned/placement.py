"""State to where it belongs: workers tell what they have, plan the same transfers, and carry them out.

What comes lies in memory of its own, beside what a worker had before: a group that breaks on the way has changed
nothing. Only once everybody has everything (``meet``) may anything be let go. There workers also compare what several
of them are to have: copies that a fault has made different end the run instead of showing in its result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from elastune.comm.group import Group
from elastune.core.layout import CopiesDiffer, Piece, Unrecoverable
from elastune.core.leaves import Split
from elastune.core.ownership import Segment
from elastune.mechanisms.owned.digest import digest
from elastune.mechanisms.owned.transfers import Holdings, Item, Shared, Transfer, plan_transfers, rounds, shared

VALUES = "values"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shard:
    """Elements of one leaf: flat tensors by name, ``VALUES`` among them or not, as long as ``segment``.

    ``held``: with all the tensors that the optimizer has of them (perhaps none yet); else they are values alone.
    """

    segment: Segment
    tensors: Mapping[str, torch.Tensor]
    held: bool


@dataclass(frozen=True)
class Wanted:
    """What one worker is to have: the shards that it ``holds``, and the ``values`` that it computes with."""

    holds: tuple[Segment, ...]
    values: tuple[Segment, ...]


@dataclass
class Placed:
    """What a placement brought a worker to.

    Attributes:
        version: See ``OwnedReplica``.
        shards: Every shard that is to be held, optimizer's tensors only; and the values that were not here before.
        facts: Of each leaf, what is not a tensor of its size; see ``bring``.
        bytes: What was sent between workers, all together.
        most: What the busiest worker has sent.
        shared: What several workers are to have, and its ``digests``: 0 where this worker is not one of them.
    """

    version: int = -1
    shards: list[Shard] = field(default_factory=list)
    facts: dict[int, Any] = field(default_factory=dict)
    bytes: int = 0
    most: int = 0
    shared: Sequence[Shared] = ()
    digests: Sequence[int] = ()


@dataclass(frozen=True)
class _Told:
    """What one worker has, as it tells the others. ``kinds``: by leaf that it holds, its tensors' names and dtypes."""

    version: int
    have: Holdings
    kinds: Mapping[int, list[list[str]]]
    facts: Mapping[int, Any]


def bring(
    group: Group,
    split: Split,
    version: int,
    shards: Sequence[Shard],
    facts: Mapping[int, Any],
    want: Sequence[Wanted],
    device: torch.device = CPU,
) -> Placed:
    """Have every worker of ``group`` get what it wants; all call it, and it blocks.

    Args:
        group: All that have something or want something.
        split: The leaves.
        version: Of what this worker has, counted from 0; -1: it has nothing. What is older than the newest that anybody
            has counts for nothing.
        shards: What this worker has; parts of a leaf may be there twice.
        facts: By leaf that it holds: numbers that every shard of the leaf has alike (a JSON value).
        want: By rank of the group.
        device: Where what comes is to lie.

    Returns:
        What this worker has to swap in once ``meet`` returns. A tensor of it may be one of ``shards``.

    Raises:
        GroupBroken: With nothing changed.
        Unrecoverable: On every worker, where nobody has something that is wanted.
    """
    rows = _gather(group, _encoded(version, shards, facts))
    read = {row: _decoded(row) for row in set(rows)}  # replicas have the same
    told = [read[row] for row in rows]
    newest = max(of.version for of in told)
    have = [of.have if of.version == newest else {} for of in told]
    kinds: dict[int, list[list[str]]] = {}
    merged: dict[int, Any] = {}
    for of in reversed(told):
        if of.version == newest:
            kinds |= of.kinds
            merged |= of.facts
    wanted = [_holdings(each) for each in want]
    sizes = {item: _size(split, item, kinds) for item in {item for each in wanted for item in each}}
    plan = plan_transfers(have, wanted, sizes)
    if plan.lost:
        raise Unrecoverable([Piece(split.leaves[item.leaf].name, ((start, stop),)) for item, start, stop in plan.lost])
    own = _Reader(shards if version == newest else ())
    found, local = _room(split, want[group.rank], own, kinds, device)
    own.add(found)
    placed = Placed(newest, found, {segment.leaf: merged.get(segment.leaf) for segment in want[group.rank].holds})
    sent = [0] * group.size
    goal = _Reader(found)
    for hop in plan.hops:
        for transfer in hop:
            sent[transfer.source] += (transfer.stop - transfer.start) * sizes[transfer.item]
        _carry_out(group, hop, sizes, own, goal, local)
        local = []
    placed.bytes, placed.most = sum(sent), max(sent, default=0)
    placed.shared = shared(wanted)
    placed.digests = [_digest(own, each) if group.rank in each.ranks else 0 for each in placed.shared]
    return placed


def meet(group: Group, split: Split, placed: Placed, *, exact: bool) -> None:
    """Return once everybody has come here: what was brought is everywhere; where ``exact``, copies are equal.

    Raises:
        GroupBroken: With nothing changed.
        CopiesDiffer: On every worker.
    """
    if group.size == 1:
        return
    numbers = [0, *placed.digests]  # where nothing is shared they meet, too
    own = torch.tensor(numbers, dtype=torch.int64, device=group.wire)
    table = own.new_empty(group.size * len(own))
    group.all_gather(table, own).wait()
    rows = table.view(group.size, -1)[:, 1:].tolist()
    for place, each in enumerate(placed.shared if exact else ()):
        if len({rows[rank][place] for rank in each.ranks}) > 1:
            what, name = "values" if each.item.values else "optimizer state", split.leaves[each.item.leaf].name
            found = f"{what} of {name} that ranks {', '.join(map(str, each.ranks))} have"
            raise CopiesDiffer(f"copies must be equal: {found} differ; --resume from a checkpoint, and report this")


# -- what is told -----------------------------------------------------------------------------------------------------


def _encoded(version: int, shards: Sequence[Shard], facts: Mapping[int, Any]) -> bytes:
    values = [[s.segment.leaf, s.segment.start, s.segment.stop] for s in shards if VALUES in s.tensors]
    held = [[s.segment.leaf, s.segment.start, s.segment.stop] for s in shards if s.held]
    kinds = {
        shard.segment.leaf: [[name, str(t.dtype)[6:]] for name, t in shard.tensors.items() if name != VALUES]
        for shard in shards
        if shard.held
    }
    return json.dumps([version, values, held, kinds, dict(facts)], separators=(",", ":")).encode()


def _decoded(row: bytes) -> _Told:
    version, values, held, kinds, facts = json.loads(row)
    have: dict[Item, list[tuple[int, int]]] = {}
    for segments, are_values in ((values, True), (held, False)):
        for leaf, start, stop in segments:
            have.setdefault(Item(leaf, are_values), []).append((start, stop))
    return _Told(version, have, {int(i): of for i, of in kinds.items()}, {int(i): of for i, of in facts.items()})


def _gather(group: Group, own: bytes) -> list[bytes]:
    rows = group.gather_tensors(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    return [row.numpy().tobytes() for row in rows]


def _holdings(want: Wanted) -> Holdings:
    found: dict[Item, list[tuple[int, int]]] = {}
    for segments, values in ((want.values, True), (want.holds, False)):
        for segment in segments:
            found.setdefault(Item(segment.leaf, values), []).append((segment.start, segment.stop))
    return found


def _size(split: Split, item: Item, kinds: Mapping[int, list[list[str]]]) -> int:
    """Bytes of one element."""
    names = [split.leaves[item.leaf].dtype] if item.values else [name for _, name in kinds.get(item.leaf, [])]
    return sum(_dtype(name).itemsize for name in names)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _digest(own: _Reader, what: Shared) -> int:
    """Of its bits, one tensor after the other: the same however they lie here."""
    parts = own.parts(what.item, what.start, what.stop)
    found = 0
    for name in _names(parts[0][2], what.item):
        found *= 3
        found += sum(digest(_slice(shard, name, first, last), first) for first, last, shard in parts)
    return found % (1 << 63)


# -- memory -----------------------------------------------------------------------------------------------------------


class _Reader:
    """Finds elements among shards."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._by_item: dict[Item, list[Shard]] = {}
        self.add(shards)

    def add(self, shards: Sequence[Shard]) -> None:
        """These too; what was there before is found first."""
        for shard in shards:
            for values in (True, False):
                if shard.held if not values else VALUES in shard.tensors:
                    self._by_item.setdefault(Item(shard.segment.leaf, values), []).append(shard)

    def parts(self, item: Item, start: int, stop: int) -> list[tuple[int, int, Shard]]:
        """Shares that have elements between ``start`` and ``stop``, with what of it comes from each; each once."""
        found, left = [], [(start, stop)]
        for shard in self._by_item.get(item, ()):
            rest = []
            for a, b in left:
                first, last = max(a, shard.segment.start), min(b, shard.segment.stop)
                if first >= last:
                    rest.append((a, b))
                    continue
                found.append((first, last, shard))
                rest += [(x, y) for x, y in ((a, first), (last, b)) if x < y]
            left = rest
            if not left:
                break
        return found

    def tensors(self, transfer: Transfer) -> list[list[torch.Tensor]]:
        """By name, in one order on every worker: the parts of one tensor, one behind the other."""
        parts = sorted(self.parts(transfer.item, transfer.start, transfer.stop), key=lambda part: part[0])
        names = _names(parts[0][2], transfer.item)
        return [[_slice(shard, name, first, last) for first, last, shard in parts] for name in names]

    @property
    def on_cpu(self) -> bool:
        """Whether all tensors lie in the CPU's memory."""
        shards = (shard for of in self._by_item.values() for shard in of)
        return all(tensor.is_cpu for shard in shards for tensor in shard.tensors.values())


_Copy = tuple[torch.Tensor, torch.Tensor]
"""Target and source."""


def _names(shard: Shard, item: Item) -> list[str]:
    """The tensors of ``item``, in one order on every worker."""
    return [VALUES] if item.values else sorted(name for name in shard.tensors if name != VALUES)


def _slice(shard: Shard, name: str, start: int, stop: int) -> torch.Tensor:
    return shard.tensors[name].detach()[start - shard.segment.start : stop - shard.segment.start]


def _room(
    split: Split, want: Wanted, own: _Reader, kinds: Mapping[int, list[list[str]]], device: torch.device
) -> tuple[list[Shard], list[_Copy]]:
    """Every shard that is to be held, and room for the values that are not here; and the copies by which shards are
    filled with what is here.
    """
    found: list[Shard] = []
    local: list[_Copy] = []
    for segment in want.holds:
        item = Item(segment.leaf, False)
        parts = own.parts(item, segment.start, segment.stop)
        same = next((shard for _, _, shard in parts if shard.segment == segment), None)
        if same is not None:  # it stays where it is
            kept = {name: same.tensors[name] for name in _names(same, item)}
            found.append(Shard(segment, kept, held=True))
            continue
        tensors = kinds.get(segment.leaf, [])
        room = {name: torch.empty(segment.size, dtype=_dtype(kind), device=device) for name, kind in tensors}
        shard = Shard(segment, room, held=True)
        for first, last, source in parts:
            for name in _names(shard, item):
                local.append((_slice(shard, name, first, last), _slice(source, name, first, last)))
        found.append(shard)
    for segment in want.values:
        here = sorted((a, b) for a, b, _ in own.parts(Item(segment.leaf, True), segment.start, segment.stop))
        for (_, start), (stop, _) in pairwise([(0, segment.start), *here, (segment.stop, 0)]):
            if start < stop:
                values = torch.empty(stop - start, dtype=_dtype(split.leaves[segment.leaf].dtype), device=device)
                found.append(Shard(Segment(segment.leaf, start, stop), {VALUES: values}, held=False))
    return found, local


# -- on the wire ------------------------------------------------------------------------------------------------------


def _carry_out(
    group: Group,
    hop: Sequence[Transfer],
    sizes: Mapping[Item, int],
    own: _Reader,
    goal: _Reader,
    local: Sequence[_Copy],
) -> None:
    """One hop, and the copies that are ``local`` while it travels.

    Over gloo tensors of the CPU go from where they lie to where they are to lie, without a copy between, so all at
    once; else there are copies, and rounds that bound them: while one travels, the next is put together.
    """
    straight = group.backend == "gloo" and goal.on_cpu
    finish: Callable[[], None] | None = None
    for moving in [hop] if straight else rounds(hop, sizes):
        begun = _begun(group, moving, own, goal)
        if finish is not None:
            finish()
        finish = begun
    for target, source in local:
        target.copy_(source)
    if finish is not None:
        finish()


def _begun(group: Group, moving: Sequence[Transfer], own: _Reader, goal: _Reader) -> Callable[[], None]:
    """Begin ``moving``: of each transfer one message a tensor, in one order everywhere. What is returned ends it."""
    sends: list[tuple[torch.Tensor, int]] = []
    receives: list[tuple[torch.Tensor, int]] = []
    late: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for transfer in moving:
        if transfer.source == group.rank:
            for parts in own.tensors(transfer):
                whole = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
                sends.append((whole.view(torch.uint8).to(group.wire), transfer.target))
        if transfer.target == group.rank:
            for parts in goal.tensors(transfer):
                room = parts[0]
                if len(parts) > 1 or room.device != group.wire:
                    size = transfer.stop - transfer.start
                    room = torch.empty(size, dtype=room.dtype, device=group.wire)
                    late.append((room, parts))
                receives.append((room.view(torch.uint8), transfer.source))
    work = group.exchange(sends, receives)

    def finish() -> None:
        work.wait()
        for room, parts in late:
            for part, values in zip(parts, room.split([len(part) for part in parts]), strict=True):
                part.copy_(values)

    return finish
