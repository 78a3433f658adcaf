"""State moves to the workers that need it: all report what they have, plan the same transfers, and carry them out.

The plan (``plan_transfers``) is pure and equal on every worker. A worker keeps what it has. Every other byte arrives
exactly once, and all workers that can send share the sending. Where more workers want an item than have it, each gets
a part and passes it on. So no worker sends an element more often than necessary.
Arriving state gets memory of its own (``bring``), so a group that breaks meanwhile has changed nothing. Nothing is
freed before every worker has everything (``meet``). There workers also compare copies by digests: a fault that made
copies different ends the run instead of changing its result.
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

VALUES = "values"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shard:
    """A range of one parameter block on a worker, with its flat tensors.

    Attributes:
        segment: The range.
        tensors: Tensors of the segment's size by name: the values (``VALUES``), the optimizer's tensors, or both.
        held: ``tensors`` has all that the optimizer keeps of the segment (perhaps nothing yet), not only values.
    """

    segment: Segment
    tensors: Mapping[str, torch.Tensor]
    held: bool


@dataclass(frozen=True)
class StateRequest:
    """The state that a worker is to have: the segments that it ``holds``, and the ``values`` to compute with."""

    holds: tuple[Segment, ...]
    values: tuple[Segment, ...]


@dataclass
class PlacedState:
    """The state that ``bring`` gave a worker.

    Attributes:
        version: See ``OwnedReplica``.
        shards: The optimizer's tensors of every segment to hold, and the values that were not on this worker before.
        facts: For each parameter block, the numbers that are no tensors of its size; see ``bring``.
        bytes: The bytes sent between all workers.
        most: The bytes that the busiest worker has sent.
        shared: The ranges that several workers are to have.
        digests: The digest of each of ``shared``; 0 where this worker does not have the range.
    """

    version: int = -1
    shards: list[Shard] = field(default_factory=list)
    facts: dict[int, Any] = field(default_factory=dict)
    bytes: int = 0
    most: int = 0
    shared: Sequence[Shared] = ()
    digests: Sequence[int] = ()


def bring(
    group: Group,
    split: Split,
    version: int,
    shards: Sequence[Shard],
    facts: Mapping[int, Any],
    want: Sequence[StateRequest],
    device: torch.device = CPU,
) -> PlacedState:
    """Give every worker of ``group`` the state that it wants. All workers call this, and it blocks.

    Args:
        group: All workers that have or want state.
        split: The parameter blocks.
        version: The version of this worker's state, counted from 0; -1: it has none. State older than the newest
            version of any worker is ignored.
        shards: This worker's state. An element may occur in several shards.
        facts: For each block that it holds, the numbers that all shards of the block share (a JSON value).
        want: The state that each worker is to have, by rank of the group.
        device: The device for arriving state.

    Returns:
        The state to swap in once ``meet`` returns. Its tensors may be those of ``shards``.

    Raises:
        GroupBroken: The group broke. Nothing has changed.
        Unrecoverable: No worker has something that a worker wants. Raised on every worker.
    """
    rows = _gather(group, _encoded(version, shards, facts))
    decoded_rows = {row: _decoded(row) for row in set(rows)}  # replicas have equal rows
    reports = [decoded_rows[row] for row in rows]
    newest = max(report.version for report in reports)
    have = [report.have if report.version == newest else {} for report in reports]
    kinds: dict[int, list[list[str]]] = {}
    merged: dict[int, Any] = {}
    for report in reversed(reports):
        if report.version == newest:
            kinds |= report.kinds
            merged |= report.facts
    wanted = [_holdings(request) for request in want]
    sizes = {item: _size(split, item, kinds) for item in {item for request in wanted for item in request}}
    plan = plan_transfers(have, wanted, sizes)
    if plan.lost:
        raise Unrecoverable(
            [Piece(split.param_blocks[item.param_block].name, ((start, stop),)) for item, start, stop in plan.lost]
        )
    held_here = _Reader(shards if version == newest else ())
    new_shards, local = _room(split, want[group.rank], held_here, kinds, device)
    held_here.add(new_shards)
    placed = PlacedState(
        newest, new_shards, {segment.param_block: merged.get(segment.param_block) for segment in want[group.rank].holds}
    )
    sent = [0] * group.size
    goal = _Reader(new_shards)
    for hop in plan.hops:
        for transfer in hop:
            sent[transfer.source] += (transfer.stop - transfer.start) * sizes[transfer.item]
        _carry_out(group, hop, sizes, held_here, goal, local)
        local = []
    placed.bytes, placed.most = sum(sent), max(sent, default=0)
    placed.shared = shared(wanted)
    placed.digests = [_digest(held_here, request) if group.rank in request.ranks else 0 for request in placed.shared]
    return placed


def meet(group: Group, split: Split, placed: PlacedState, *, exact: bool) -> None:
    """Return once every worker has its state. With ``exact``, copies are compared.

    Raises:
        GroupBroken: The group broke. Nothing has changed.
        CopiesDiffer: Two copies have different bits. Raised on every worker.
    """
    if group.size == 1:
        return
    numbers = [0, *placed.digests]  # never empty: workers meet also where they share nothing
    mine = torch.tensor(numbers, dtype=torch.int64, device=group.wire)
    table = mine.new_empty(group.size * len(mine))
    group.all_gather(table, mine).wait()
    rows = table.view(group.size, -1)[:, 1:].tolist()
    for place, each in enumerate(placed.shared if exact else ()):
        if len({rows[rank][place] for rank in each.ranks}) > 1:
            what, name = (
                "values" if each.item.values else "optimizer state",
                split.param_blocks[each.item.param_block].name,
            )
            copies = f"{what} of {name} that ranks {', '.join(map(str, each.ranks))} have"
            raise CopiesDiffer(f"copies must be equal: {copies} differ; --resume from a checkpoint, and report this")


# --- the plan of transfers ---

LONGEST = 256 * UNIT
"""The most elements of one transfer: the unit in which sending is balanced and rounds are filled."""
SHORTEST = 16 * UNIT
"""Shorter ranges are not cut for balance."""
ROUND_BYTES = 16 << 20
"""The most bytes that a worker sends, and that it receives, in one round, unless one transfer is larger. Two rounds are
in memory at a time, beside the memory for the result."""


class Item(NamedTuple):
    """The tensors of a block that travel together: its ``values``, or the optimizer's tensors of its size."""

    param_block: int
    values: bool


Ranges = Sequence[tuple[int, int]]
"""Start (inclusive) and stop (exclusive) of each range, in elements of a parameter block."""
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
    """All transfers, in order.

    Attributes:
        hops: Two groups of transfers. Those of the second may pass on elements that the first has brought.
        lost: The ranges that a worker wants and that no worker has.
    """

    hops: tuple[tuple[Transfer, ...], ...]
    lost: tuple[tuple[Item, int, int], ...]


class Shared(NamedTuple):
    """The elements ``start`` to ``stop`` of ``item``, which exactly the workers ``ranks`` are to have."""

    item: Item
    start: int
    stop: int
    ranks: tuple[int, ...]


def plan_transfers(have: Sequence[Holdings], want: Sequence[Holdings], sizes: Mapping[Item, int]) -> TransferPlan:
    """Plan the transfers by which every worker gets what it wants.

    Args:
        have: By rank: what the worker has.
        want: By rank: what it is to have.
        sizes: The bytes of one element of each item; 0: the item has no tensors.
    """
    atoms = [atom for item in sorted({item for of in want for item in of}) for atom in _atoms(item, have, want)]
    lost = tuple((atom.item, atom.start, atom.stop) for atom in atoms if not atom.have)
    moving = [atom for atom in atoms if atom.have and sizes.get(atom.item, 0)]
    # Large ranges first: the small ones then even out the loads.
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


class _Atom(NamedTuple):
    """A range that the same workers ``have`` and the same others ``want``."""

    item: Item
    start: int
    stop: int
    have: tuple[int, ...]
    want: tuple[int, ...]


def _atoms(item: Item, have: Sequence[Holdings], want: Sequence[Holdings]) -> Iterable[_Atom]:
    """The ranges of ``item`` that workers want and do not have, cut where the workers that have or want them change."""
    edges: dict[int, list[tuple[int, int, int]]] = {}
    for kind, holdings in enumerate((have, want)):
        for rank, held in enumerate(holdings):
            for start, stop in held.get(item, ()):
                edges.setdefault(start, []).append((kind, rank, 1))
                edges.setdefault(stop, []).append((kind, rank, -1))
    counts = [[0] * len(have) for _ in range(2)]
    atoms: list[_Atom] = []
    places = sorted(edges)
    for start, stop in pairwise(places):
        for kind, rank, change in edges[start]:
            counts[kind][rank] += change
        having = tuple(rank for rank, count in enumerate(counts[0]) if count)
        wanting = tuple(rank for rank, count in enumerate(counts[1]) if count and not counts[0][rank])
        if not wanting:
            continue
        if atoms and (atoms[-1].stop, atoms[-1].have, atoms[-1].want) == (start, having, wanting):
            atoms[-1] = atoms[-1]._replace(stop=stop)
        else:
            atoms.append(_Atom(item, start, stop, having, wanting))
    return atoms


def _cut(atom: _Atom, parts: int) -> list[tuple[int, int]]:
    """Cut ``atom`` into about ``parts`` parts of whole units, for several senders. Short ones stay whole."""
    length = atom.stop - atom.start
    if parts == 1 or length < SHORTEST:
        return [(atom.start, atom.stop)]
    step = -(-length // (parts * UNIT)) * UNIT
    return [(start, min(start + step, atom.stop)) for start in range(atom.start, atom.stop, step)]


def shared(want: Sequence[Holdings]) -> list[Shared]:
    """The ranges that several workers want, in an order that is the same on all workers. ``want``: by rank."""
    items = sorted({item for of in want for item in of})
    atoms = (atom for item in items for atom in _atoms(item, [{}] * len(want), want))
    return [Shared(atom.item, atom.start, atom.stop, atom.want) for atom in atoms if len(atom.want) > 1]


def rounds(hop: Sequence[Transfer], sizes: Mapping[Item, int], limit: int = ROUND_BYTES) -> list[list[Transfer]]:
    """All transfers in rounds. In a round no worker sends or receives more than ``limit`` bytes.

    A larger transfer is the only one of its two workers in its round.
    """
    fetch_rounds: list[list[Transfer]] = []
    loads: list[dict[tuple[str, int], int]] = []
    for transfer in hop:
        size = (transfer.stop - transfer.start) * sizes[transfer.item]
        ends = ("out", transfer.source), ("in", transfer.target)
        fits = (all(not load.get(end) or load[end] + size <= limit for end in ends) for load in loads)
        number = next((number for number, has_room in enumerate(fits) if has_room), len(loads))
        if number == len(loads):
            loads.append({})
            fetch_rounds.append([])
        for end in ends:
            loads[number][end] = loads[number].get(end, 0) + size
        fetch_rounds[number].append(transfer)
    return fetch_rounds


# --- reports: the message of each worker about its state ---


@dataclass(frozen=True)
class _Report:
    """One worker's message about its state. ``kinds``: for each block that it holds, the tensors' names and dtypes."""

    version: int
    have: Holdings
    kinds: Mapping[int, list[list[str]]]
    facts: Mapping[int, Any]


def _encoded(version: int, shards: Sequence[Shard], facts: Mapping[int, Any]) -> bytes:
    values = [[s.segment.param_block, s.segment.start, s.segment.stop] for s in shards if VALUES in s.tensors]
    held = [[s.segment.param_block, s.segment.start, s.segment.stop] for s in shards if s.held]
    kinds = {
        shard.segment.param_block: [[name, str(t.dtype)[6:]] for name, t in shard.tensors.items() if name != VALUES]
        for shard in shards
        if shard.held
    }
    return json.dumps([version, values, held, kinds, dict(facts)], separators=(",", ":")).encode()


def _decoded(row: bytes) -> _Report:
    version, values, held, kinds, facts = json.loads(row)
    have: dict[Item, list[tuple[int, int]]] = {}
    for segments, are_values in ((values, True), (held, False)):
        for param_block, start, stop in segments:
            have.setdefault(Item(param_block, are_values), []).append((start, stop))
    return _Report(version, have, {int(i): of for i, of in kinds.items()}, {int(i): of for i, of in facts.items()})


def _gather(group: Group, encoded: bytes) -> list[bytes]:
    rows = group.gather_tensors(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
    return [row.numpy().tobytes() for row in rows]


def _holdings(want: StateRequest) -> Holdings:
    holdings: dict[Item, list[tuple[int, int]]] = {}
    for segments, values in ((want.values, True), (want.holds, False)):
        for segment in segments:
            holdings.setdefault(Item(segment.param_block, values), []).append((segment.start, segment.stop))
    return holdings


def _size(split: Split, item: Item, kinds: Mapping[int, list[list[str]]]) -> int:
    """The bytes of one element of ``item``."""
    names = (
        [split.param_blocks[item.param_block].dtype]
        if item.values
        else [name for _, name in kinds.get(item.param_block, [])]
    )
    return sum(_dtype(name).itemsize for name in names)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


# --- memory: finding elements among shards, and room for arriving ones ---


class _Reader:
    """Finds elements among shards."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._by_item: dict[Item, list[Shard]] = {}
        self.add(shards)

    def add(self, shards: Sequence[Shard]) -> None:
        """Add shards. Earlier shards are found first."""
        for shard in shards:
            for values in (True, False):
                if shard.held if not values else VALUES in shard.tensors:
                    self._by_item.setdefault(Item(shard.segment.param_block, values), []).append(shard)

    def parts(self, item: Item, start: int, stop: int) -> list[tuple[int, int, Shard]]:
        """The shards with elements between ``start`` and ``stop``, and the range from each. Each element comes once."""
        parts, left = [], [(start, stop)]
        for shard in self._by_item.get(item, ()):
            rest = []
            for a, b in left:
                first, last = max(a, shard.segment.start), min(b, shard.segment.stop)
                if first >= last:
                    rest.append((a, b))
                    continue
                parts.append((first, last, shard))
                rest += [(x, y) for x, y in ((a, first), (last, b)) if x < y]
            left = rest
            if not left:
                break
        return parts

    def tensors(self, transfer: Transfer) -> list[list[torch.Tensor]]:
        """For each tensor of the item, in the same order on every worker, its parts one after the other."""
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
    """The names of the tensors of ``item``, in the same order on every worker."""
    return [VALUES] if item.values else sorted(name for name in shard.tensors if name != VALUES)


def _slice(shard: Shard, name: str, start: int, stop: int) -> torch.Tensor:
    return shard.tensors[name].detach()[start - shard.segment.start : stop - shard.segment.start]


def _room(
    split: Split, want: StateRequest, reader: _Reader, kinds: Mapping[int, list[list[str]]], device: torch.device
) -> tuple[list[Shard], list[_Copy]]:
    """Allocate the state that this worker is to have.

    Returns:
        Shards for every segment to hold and for all missing values. Then the local copies that fill them with state
        that this worker has.
    """
    shards: list[Shard] = []
    local: list[_Copy] = []
    for segment in want.holds:
        item = Item(segment.param_block, False)
        parts = reader.parts(item, segment.start, segment.stop)
        same = next((shard for _, _, shard in parts if shard.segment == segment), None)
        if same is not None:  # it stays where it is
            kept = {name: same.tensors[name] for name in _names(same, item)}
            shards.append(Shard(segment, kept, held=True))
            continue
        tensors = kinds.get(segment.param_block, [])
        room = {name: torch.empty(segment.size, dtype=_dtype(kind), device=device) for name, kind in tensors}
        shard = Shard(segment, room, held=True)
        for first, last, source in parts:
            for name in _names(shard, item):
                local.append((_slice(shard, name, first, last), _slice(source, name, first, last)))
        shards.append(shard)
    for segment in want.values:
        present = sorted(
            (a, b) for a, b, _ in reader.parts(Item(segment.param_block, True), segment.start, segment.stop)
        )
        for (_, start), (stop, _) in pairwise([(0, segment.start), *present, (segment.stop, 0)]):
            if start < stop:
                values = torch.empty(
                    stop - start, dtype=_dtype(split.param_blocks[segment.param_block].dtype), device=device
                )
                shards.append(Shard(Segment(segment.param_block, start, stop), {VALUES: values}, held=False))
    return shards, local


# --- carrying out transfers ---


def _carry_out(
    group: Group,
    hop: Sequence[Transfer],
    sizes: Mapping[Item, int],
    reader: _Reader,
    goal: _Reader,
    local: Sequence[_Copy],
) -> None:
    """Carry out one hop, and meanwhile the copies ``local``.

    Over gloo, CPU tensors travel directly between their places, so all transfers run at once. Other tensors are copied
    in between, in rounds that bound the memory: while one round travels, the next is prepared.
    """
    straight = group.backend == "gloo" and goal.on_cpu
    finish: Callable[[], None] | None = None
    for moving in [hop] if straight else rounds(hop, sizes):
        start = _start_transfers(group, moving, reader, goal)
        if finish is not None:
            finish()
        finish = start
    for target, source in local:
        target.copy_(source)
    if finish is not None:
        finish()


def _start_transfers(group: Group, moving: Sequence[Transfer], reader: _Reader, goal: _Reader) -> Callable[[], None]:
    """Begin ``moving``: one message for each tensor of a transfer, in the same order on all workers.

    Returns:
        A function that waits for the messages and copies them to their places.
    """
    sends: list[tuple[torch.Tensor, int]] = []
    receives: list[tuple[torch.Tensor, int]] = []
    late: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for transfer in moving:
        if transfer.source == group.rank:
            for parts in reader.tensors(transfer):
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


# --- digests of copies ---


def _digest(reader: _Reader, what: Shared) -> int:
    """The digest of the tensors of ``what``, which does not depend on how shards cut them."""
    parts = reader.parts(what.item, what.start, what.stop)
    number = 0
    for name in _names(parts[0][2], what.item):
        number *= 3
        number += sum(digest(_slice(shard, name, first, last), first) for first, last, shard in parts)
    return number % (1 << 63)


_STEP = 0x9E3779B97F4A7C15  # odd, so no two units have one weight
_MODULUS = 1 << 64
_WEIGHTS: dict[torch.device, torch.Tensor] = {}


def digest(values: torch.Tensor, start: int) -> int:
    """A number that depends on the bits of flat ``values``, the elements of a parameter block from ``start`` on.

    Each unit's 8-byte words are added up. The digest is the sum over units of that sum times a number that depends on
    the unit's place. So a copy with one wrong element, or with right elements in a wrong unit, has another digest. It
    is no checksum against an adversary, and two faults in one unit may cancel out. It runs at the speed of reading
    memory.

    Returns:
        A number below 2**64. However elements are cut into ranges, the digests of the ranges have the same sum modulo
        2**64.
    """
    stop = start + len(values)
    first, last = -(-start // UNIT), stop // UNIT
    number = 0
    if first < last:
        rows = _words(values[first * UNIT - start : last * UNIT - start]).view(last - first, -1).sum(1)
        number += int(rows.mul_(_weights(first, last, values.device)).sum())
    for low, high in ((start, min(stop, first * UNIT)), (max(first, last) * UNIT, stop)):
        if low < high:  # a part of a unit: its other elements count as zero
            unit, part = low // UNIT, values[low - start : high - start]
            if (low - unit * UNIT) * part.element_size() % 8 or part.nbytes % 8:  # it begins or ends within a word
                part = values.new_zeros(UNIT)
                part[low - unit * UNIT : high - unit * UNIT] = values[low - start : high - start]
            number += int(_words(part).sum()) * (2 * unit + 1) * _STEP
    return number % _MODULUS


def _weights(first: int, last: int, device: torch.device) -> torch.Tensor:
    """The weights of the units ``first`` to ``last`` (exclusive). They are cached, since short tensors are many."""
    weights = _WEIGHTS.get(device)
    if weights is None or len(weights) < last:
        weights = (2 * torch.arange(max(2 * last, 1024), device=device) + 1) * (_STEP - _MODULUS)
        _WEIGHTS[device] = weights
    return weights[first:last]


def _words(values: torch.Tensor) -> torch.Tensor:
    data = values.detach().contiguous()
    return (data.clone() if data.storage_offset() * data.element_size() % 8 else data).view(torch.int64)
