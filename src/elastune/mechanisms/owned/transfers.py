"""From who has what to who wants what: a pure plan of transfers, equal on every worker that makes it.

What a worker has stays there. Every other byte comes to it exactly once, and the sending is spread over all that can
send. Where more workers want something than have it, it goes to them in parts, and each passes its part on: nobody
sends it more often than he must (a broadcast is a scatter and a gather).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from elastune.core.leaves import UNIT

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

    leaf: int
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
