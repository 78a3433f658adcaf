"""Measurements of the network: the speed of a group's all-reduce, of links between hosts, and of whole routes.

Routes are measured by summing along them, because a model of links knows nothing of busy processors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from elastune.core.communication import Route
from elastune.core.journal.records import LinkMeasured
from elastune.core.slots import cut
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.relay import NUMBER, Relay

# [link] How fast this group's workers reduce: measured with a few all-reduces.

SMALL_BYTES = 4 << 10
LARGE_BYTES = 4 << 20
REPEATS = 7


def measure_link(group: Group, hosts: int = 1) -> LinkMeasured:
    """Median all-reduce times of a small and a large tensor, as latency and seconds per byte. All workers call it.

    ``hosts``: on how many of them the workers stand.
    """
    small, large = (_median_s(group, size) for size in (SMALL_BYTES, LARGE_BYTES))
    per_byte = max(0.0, large - small) / (LARGE_BYTES - SMALL_BYTES)
    return LinkMeasured(group.size, max(0.0, small - per_byte * SMALL_BYTES), per_byte, hosts)


def _median_s(group: Group, size_bytes: int) -> float:
    data = torch.zeros(size_bytes // 4, device=group.wire)
    times = []
    for _ in range(REPEATS):
        group.all_reduce(torch.zeros(1, device=group.wire)).wait()  # start together
        started = time.perf_counter()
        group.all_reduce(data).wait()
        if group.wire.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


# [probe] Latency and rate of the links between hosts, measured by messages between one worker of each.

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


# [route trial] How long sums take on several routes, measured by doing them: a model of links knows nothing of busy processors.

RouteChoice = tuple[tuple[Route, ...], int]
"""Routes, and the KiB of a chunk; no routes: the backend's own way, or everybody to everybody."""
Action = Callable[[], object]
TURNS = 4  # the first of which counts where it is the only one
LONG_S = 0.5  # of all ways together: one turn that takes as long is enough, and so are several


def time_routes(group: Group, ways: Sequence[RouteChoice], numel: int, num_slots: int = 0) -> list[float]:
    """Seconds of a sum of ``numel`` numbers on each of ``ways``, in turns; medians of the workers' means.

    All workers of ``group`` call it alike, with nothing under way among them, and all come to the same seconds.
    ``num_slots``: in the order of the canonical tree over so many; 0: as they come. Leaves the group's routes as they
    were. Raises ``GroupBroken``.
    """
    before, times = (group.routes, group.chunk_kib), list[list[float]]()
    prepared = _exactly if num_slots else _as_it_comes
    try:
        while len(times) < TURNS and sum(map(sum, times)) < LONG_S:
            times.append([])
            for group.routes, group.chunk_kib in ways:
                sum_up, settle = prepared(group, numel, num_slots)
                group.all_reduce(torch.zeros(1)).wait()  # now all have room for it
                started = time.perf_counter()
                try:
                    sum_up()
                    seconds = time.perf_counter() - started
                finally:
                    settle()
                told = group.gather_floats([seconds])
                times[-1].append(sum(own_s for (own_s,) in told) / group.size)
    finally:
        group.routes, group.chunk_kib = before
    return [median(own) for own in zip(*(times[1:] or times), strict=True)]


def _as_it_comes(group: Group, numel: int, num_slots: int) -> tuple[Action, Action]:
    """How to sum, and what has to be done behind it. In no order, so that ``num_slots`` is 0."""
    value = torch.zeros(numel)
    if not group.routes:
        return lambda: group.all_reduce(value).wait(), lambda: None
    relay = Relay(group, value, NUMBER)

    def sum_up() -> None:
        relay.start([value], value)
        relay.wait()

    return sum_up, relay.settle


def _exactly(group: Group, numel: int, num_slots: int) -> tuple[Action, Action]:
    """The same in the order of the canonical tree."""
    reducer = ExactReducer([torch.zeros(numel)], num_slots, group, lane=NUMBER)
    value, slots = torch.zeros(numel), cut(num_slots, group.size)[group.rank]

    def sum_up() -> None:
        reducer.begin_with({slot: [value] for slot in slots})
        reducer.finish()

    return sum_up, reducer.drain
