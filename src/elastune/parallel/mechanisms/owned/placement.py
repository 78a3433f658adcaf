"""State moves to the workers that need it: all say what they have, plan the same transfers, and carry them out.

The plan is pure and equal on every worker. What a worker has stays there; every other byte comes exactly once, and
all workers that can send share the sending. Where many want one item, each gets a part and passes it on.
What comes lies in memory of its own: a group that breaks on the way has changed nothing. Nothing is freed before
everybody has everything (``meet``). There workers also compare copies by digests: a fault that made copies
different ends the run. (A digest is no checksum against an adversary.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from elastune.core.layout import UNIT, CopiesDiffer, Piece, Segment, Split, Unrecoverable
from elastune.parallel.comm.group import Group

# [transfers] From who has what to who wants what: a pure plan of transfers, equal on every worker that makes it.
#
# What a worker has stays there. Every other byte comes to it exactly once, and the sending is spread over all that can
# send. Where more workers want something than have it, it goes to them in parts, and each passes its part on: nobody
# sends it more often than he must (a broadcast is a scatter and a gather).

LONGEST = 256 * UNIT
"""Elements of one transfer at most: the grain by which sending is balanced, and rounds are filled."""
SHORTEST = 16 * UNIT
"""Less than that is not cut to be balanced."""
ROUND_BYTES = 16 << 20
"""What a worker sends, and what it receives, in one round at most, unless one transfer is larger. Two rounds are in
memory at a time, beside the goal's.
"""


class Item(NamedTuple):
    """What travels together of one leaf: its ``values``, or the optimizer's tensors of its size."""

    param_block: int
    values: bool


Ranges = Sequence[tuple[int, int]]
"""From (inclusive) and to (exclusive), in elements of a leaf."""
Holdings = Mapping[Item, Ranges]


@dataclass(frozen=True)
class Transfer:
    """``source`` sends the elements ``start`` to ``stop`` of ``item`` to ``target``. Workers by rank."""

    item: Item
    start: int
    stop: int
    source: int
    target: int


@dataclass(frozen=True)
class TransferPlan:
    """``hops``: those of the second may pass on what the first has brought. ``lost``: wanted, and nobody has it."""

    hops: tuple[tuple[Transfer, ...], ...]
    lost: tuple[tuple[Item, int, int], ...]


class Shared(NamedTuple):
    """The elements ``start`` to ``stop`` of ``item``, which all of ``ranks`` are to have, and nobody else."""

    item: Item
    start: int
    stop: int
    ranks: tuple[int, ...]


class _Atom(NamedTuple):
    """A range that the same workers ``have`` and the same others ``want``."""

    item: Item
    start: int
    stop: int
    have: tuple[int, ...]
    want: tuple[int, ...]


def plan_transfers(have: Sequence[Holdings], want: Sequence[Holdings], sizes: Mapping[Item, int]) -> TransferPlan:
    """The way from ``have`` to ``want``, both by rank. ``sizes``: bytes of an item's element; 0: it has no tensors."""
    atoms = [atom for item in sorted({item for of in want for item in of}) for atom in _atoms(item, have, want)]
    lost = tuple((atom.item, atom.start, atom.stop) for atom in atoms if not atom.have)
    moving = [atom for atom in atoms if atom.have and sizes.get(atom.item, 0)]
    # The large ones first: what comes later evens out.
    moving.sort(key=lambda atom: -len(atom.want) * (atom.stop - atom.start) * sizes[atom.item])
    sent = [0] * len(have)
    hops: tuple[list[Transfer], list[Transfer]] = [], []

    def send(atom: _Atom, start: int, stop: int, target: int, relays: Sequence[int] = ()) -> None:
        for first in range(start, stop, LONGEST):
            last = min(first + LONGEST, stop)
            source = min((*atom.have, *relays), key=lambda rank: (sent[rank], rank))
            sent[source] += (last - first) * sizes[atom.item]
            hops[source in relays].append(Transfer(atom.item, first, last, source, target))

    passed_on: list[tuple[_Atom, int, int, int]] = []
    for atom in moving:
        relayed = len(atom.want) > len(atom.have)
        for number, (start, stop) in enumerate(_cut(atom, len(atom.want) if relayed else len(atom.have))):
            first = atom.want[number % len(atom.want)]
            for target in [first] if relayed else atom.want:
                send(atom, start, stop, target)
            if relayed:
                passed_on.append((atom, start, stop, first))
    for atom, start, stop, first in passed_on:
        for target in atom.want:
            if target != first:
                send(atom, start, stop, target, (first,))
    return TransferPlan(tuple(map(tuple, hops)), lost)


def _atoms(item: Item, have: Sequence[Holdings], want: Sequence[Holdings]) -> Iterable[_Atom]:
    """What of ``item`` is wanted where it is not, cut where the workers that have or want it change."""
    edges: dict[int, list[tuple[int, int, int]]] = {}
    for kind, holdings in enumerate((have, want)):
        for rank, held in enumerate(holdings):
            for start, stop in held.get(item, ()):
                edges.setdefault(start, []).append((kind, rank, 1))
                edges.setdefault(stop, []).append((kind, rank, -1))
    counts = [[0] * len(have) for _ in range(2)]
    found: list[_Atom] = []
    places = sorted(edges)
    for start, stop in pairwise(places):
        for kind, rank, change in edges[start]:
            counts[kind][rank] += change
        having = tuple(rank for rank, count in enumerate(counts[0]) if count)
        wanting = tuple(rank for rank, count in enumerate(counts[1]) if count and not counts[0][rank])
        if not wanting:
            continue
        if found and (found[-1].stop, found[-1].have, found[-1].want) == (start, having, wanting):
            found[-1] = found[-1]._replace(stop=stop)
        else:
            found.append(_Atom(item, start, stop, having, wanting))
    return found


def shared(want: Sequence[Holdings]) -> list[Shared]:
    """What several workers want, by rank, in an order that is the same on all of them."""
    items = sorted({item for of in want for item in of})
    atoms = (atom for item in items for atom in _atoms(item, [{}] * len(want), want))
    return [Shared(atom.item, atom.start, atom.stop, atom.want) for atom in atoms if len(atom.want) > 1]


def _cut(atom: _Atom, parts: int) -> list[tuple[int, int]]:
    """``atom`` in about ``parts`` parts of whole units, so that several can send it; short ones in one."""
    length = atom.stop - atom.start
    if parts == 1 or length < SHORTEST:
        return [(atom.start, atom.stop)]
    step = -(-length // (parts * UNIT)) * UNIT
    return [(start, min(start + step, atom.stop)) for start in range(atom.start, atom.stop, step)]


def rounds(hop: Sequence[Transfer], sizes: Mapping[Item, int], limit: int = ROUND_BYTES) -> list[list[Transfer]]:
    """All transfers in rounds, each of which no worker sends or receives more than ``limit`` bytes in.

    One transfer that is larger has a round of its own at its workers.
    """
    found: list[list[Transfer]] = []
    loads: list[dict[tuple[str, int], int]] = []
    for transfer in hop:
        size = (transfer.stop - transfer.start) * sizes[transfer.item]
        ends = ("out", transfer.source), ("in", transfer.target)
        fits = (all(not load.get(end) or load[end] + size <= limit for end in ends) for load in loads)
        number = next((number for number, free in enumerate(fits) if free), len(loads))
        if number == len(loads):
            loads.append({})
            found.append([])
        for end in ends:
            loads[number][end] = loads[number].get(end, 0) + size
        found[number].append(transfer)
    return found


# [digest] What is compared of copies: a number of their bits, the same however they are cut, at the speed of reading memory.
#
# Each unit's 8-byte words are added up, and the units' sums times a number that depends on the unit's place, all modulo
# 2**64. So a copy with one wrong element, or with right ones at a wrong unit, has another number. (It is no checksum
# against an adversary, and two faults of one unit may cancel out.)

_STEP = 0x9E3779B97F4A7C15  # odd, so no two units have one weight
_MODULUS = 1 << 64
_WEIGHTS: dict[torch.device, torch.Tensor] = {}


def digest(values: torch.Tensor, start: int) -> int:
    """Of flat ``values``, the elements of a leaf from ``start`` on.

    Returns:
        A number below 2**64. Those of neighbours add up to that of both, modulo 2**64.
    """
    stop = start + len(values)
    first, last = -(-start // UNIT), stop // UNIT
    found = 0
    if first < last:
        rows = _words(values[first * UNIT - start : last * UNIT - start]).view(last - first, -1).sum(1)
        found += int(rows.mul_(_weights(first, last, values.device)).sum())
    for low, high in ((start, min(stop, first * UNIT)), (max(first, last) * UNIT, stop)):
        if low < high:  # a part of a unit: the rest of it is zero
            unit, part = low // UNIT, values[low - start : high - start]
            if (low - unit * UNIT) * part.element_size() % 8 or part.nbytes % 8:  # it begins or ends within a word
                part = values.new_zeros(UNIT)
                part[low - unit * UNIT : high - unit * UNIT] = values[low - start : high - start]
            found += int(_words(part).sum()) * (2 * unit + 1) * _STEP
    return found % _MODULUS


def _weights(first: int, last: int, device: torch.device) -> torch.Tensor:
    """By unit, from ``first`` to ``last`` (exclusive); made once, for short tensors are many."""
    known = _WEIGHTS.get(device)
    if known is None or len(known) < last:
        known = (2 * torch.arange(max(2 * last, 1024), device=device) + 1) * (_STEP - _MODULUS)
        _WEIGHTS[device] = known
    return known[first:last]


def _words(values: torch.Tensor) -> torch.Tensor:
    data = values.detach().contiguous()
    return (data.clone() if data.storage_offset() * data.element_size() % 8 else data).view(torch.int64)


# [placement] State to where it belongs: workers tell what they have, plan the same transfers, and carry them out.
#
# What comes lies in memory of its own, beside what a worker had before: a group that breaks on the way has changed
# nothing. Only once everybody has everything (``meet``) may anything be let go. There workers also compare what several
# of them are to have: copies that a fault has made different end the run instead of showing in its result.

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
class StateRequest:
    """What one worker is to have: the shards that it ``holds``, and the ``values`` that it computes with."""

    holds: tuple[Segment, ...]
    values: tuple[Segment, ...]


@dataclass
class PlacedState:
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
    want: Sequence[StateRequest],
    device: torch.device = CPU,
) -> PlacedState:
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
        raise Unrecoverable(
            [Piece(split.param_blocks[item.param_block].name, ((start, stop),)) for item, start, stop in plan.lost]
        )
    own = _Reader(shards if version == newest else ())
    found, local = _room(split, want[group.rank], own, kinds, device)
    own.add(found)
    placed = PlacedState(
        newest, found, {segment.param_block: merged.get(segment.param_block) for segment in want[group.rank].holds}
    )
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


def meet(group: Group, split: Split, placed: PlacedState, *, exact: bool) -> None:
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
            what, name = (
                "values" if each.item.values else "optimizer state",
                split.param_blocks[each.item.param_block].name,
            )
            found = f"{what} of {name} that ranks {', '.join(map(str, each.ranks))} have"
            raise CopiesDiffer(f"copies must be equal: {found} differ; --resume from a checkpoint, and report this")


# -- what is told -----------------------------------------------------------------------------------------------------
def _encoded(version: int, shards: Sequence[Shard], facts: Mapping[int, Any]) -> bytes:
    values = [[s.segment.param_block, s.segment.start, s.segment.stop] for s in shards if VALUES in s.tensors]
    held = [[s.segment.param_block, s.segment.start, s.segment.stop] for s in shards if s.held]
    kinds = {
        shard.segment.param_block: [[name, str(t.dtype)[6:]] for name, t in shard.tensors.items() if name != VALUES]
        for shard in shards
        if shard.held
    }
    return json.dumps([version, values, held, kinds, dict(facts)], separators=(",", ":")).encode()


def _decoded(row: bytes) -> _Told:
    version, values, held, kinds, facts = json.loads(row)
    have: dict[Item, list[tuple[int, int]]] = {}
    for segments, are_values in ((values, True), (held, False)):
        for param_block, start, stop in segments:
            have.setdefault(Item(param_block, are_values), []).append((start, stop))
    return _Told(version, have, {int(i): of for i, of in kinds.items()}, {int(i): of for i, of in facts.items()})


def _gather(group: Group, own: bytes) -> list[bytes]:
    rows = group.gather_tensors(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    return [row.numpy().tobytes() for row in rows]


def _holdings(want: StateRequest) -> Holdings:
    found: dict[Item, list[tuple[int, int]]] = {}
    for segments, values in ((want.values, True), (want.holds, False)):
        for segment in segments:
            found.setdefault(Item(segment.param_block, values), []).append((segment.start, segment.stop))
    return found


def _size(split: Split, item: Item, kinds: Mapping[int, list[list[str]]]) -> int:
    """Bytes of one element."""
    names = (
        [split.param_blocks[item.param_block].dtype]
        if item.values
        else [name for _, name in kinds.get(item.param_block, [])]
    )
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
                    self._by_item.setdefault(Item(shard.segment.param_block, values), []).append(shard)

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
    split: Split, want: StateRequest, own: _Reader, kinds: Mapping[int, list[list[str]]], device: torch.device
) -> tuple[list[Shard], list[_Copy]]:
    """Every shard that is to be held, and room for the values that are not here; and the copies by which shards are
    filled with what is here.
    """
    found: list[Shard] = []
    local: list[_Copy] = []
    for segment in want.holds:
        item = Item(segment.param_block, False)
        parts = own.parts(item, segment.start, segment.stop)
        same = next((shard for _, _, shard in parts if shard.segment == segment), None)
        if same is not None:  # it stays where it is
            kept = {name: same.tensors[name] for name in _names(same, item)}
            found.append(Shard(segment, kept, held=True))
            continue
        tensors = kinds.get(segment.param_block, [])
        room = {name: torch.empty(segment.size, dtype=_dtype(kind), device=device) for name, kind in tensors}
        shard = Shard(segment, room, held=True)
        for first, last, source in parts:
            for name in _names(shard, item):
                local.append((_slice(shard, name, first, last), _slice(source, name, first, last)))
        found.append(shard)
    for segment in want.values:
        here = sorted((a, b) for a, b, _ in own.parts(Item(segment.param_block, True), segment.start, segment.stop))
        for (_, start), (stop, _) in pairwise([(0, segment.start), *here, (segment.stop, 0)]):
            if start < stop:
                values = torch.empty(
                    stop - start, dtype=_dtype(split.param_blocks[segment.param_block].dtype), device=device
                )
                found.append(Shard(Segment(segment.param_block, start, stop), {VALUES: values}, held=False))
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
