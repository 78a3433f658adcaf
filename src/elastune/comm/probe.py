"""Latency and rate of the links between hosts, measured by messages between one worker of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from elastune.comm.group import Group

PINGS = 5
BLOCK_BYTES = 256 << 10
LONGEST_S = 0.02  # of one link one way, but for one block more: all wait meanwhile, in every view
BURST_BLOCKS = 2  # the first ones, which tell nothing of a link's rate
MOST_BLOCKS = 6


def probe_links(group: Group, hosts: Sequence[str]) -> list[float]:
    """What this worker has measured of its host's links: latency and bytes a second to each host, in their order.

    All workers call it. The first worker of each host measures, in rounds in which each host talks to one other; the
    others, and what lies between a host and itself, have zeros. Raises ``GroupBroken``.
    """
    names = list(dict.fromkeys(hosts))
    first = [hosts.index(name) for name in names]
    found = [0.0] * (2 * len(names))
    if group.rank not in first:
        return found
    own = first.index(group.rank)
    for pairs in rounds(len(names)):
        for i, j in pairs:
            if own in (i, j):
                other = j if own == i else i
                found[2 * other : 2 * other + 2] = _talk(group, first[other], begins=own == i)
    return found


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Each of ``count`` with each other once, in rounds in which nobody comes twice (the circle method)."""
    ring = list(range(count + count % 2))
    found = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def _talk(group: Group, other: int, *, begins: bool) -> tuple[float, float]:
    """Latency and rate of what this worker sends to ``other``; both talk, one after the other."""
    if begins:
        measured = _measure(group, other)
        _answer(group, other)
        return measured
    _answer(group, other)
    return _measure(group, other)


def _measure(group: Group, other: int) -> tuple[float, float]:
    token, block = torch.zeros(1), torch.zeros(BLOCK_BYTES // 4)
    trips = [_round_trip(group, other, token, token) for _ in range(PINGS)]
    trip_s = min(trips)
    blocks: list[float] = []
    while sum(blocks) < LONGEST_S and len(blocks) < MOST_BLOCKS:
        _say(group, other, 1.0)
        blocks.append(_round_trip(group, other, block, token))
    _say(group, other, 0.0)
    # A link may let a burst pass at once, and what holds in the long run is what counts.
    block_s = median(blocks[BURST_BLOCKS:] or blocks[-1:])
    return trip_s / 2, BLOCK_BYTES / max(1e-6, block_s - trip_s)


def _answer(group: Group, other: int) -> None:
    token, block = torch.zeros(1), torch.zeros(BLOCK_BYTES // 4)
    for _ in range(PINGS):
        group.receive(token, other)
        group.send(token, other)
    while _hears(group, other):
        group.receive(block, other)
        group.send(token, other)


def _round_trip(group: Group, other: int, sent: torch.Tensor, back: torch.Tensor) -> float:
    started = time.perf_counter()
    group.send(sent, other)
    group.receive(back, other)
    return time.perf_counter() - started


def _say(group: Group, other: int, word: float) -> None:
    group.send(torch.full((1,), word), other)


def _hears(group: Group, other: int) -> bool:
    word = torch.zeros(1)
    group.receive(word, other)
    return bool(word.item())
