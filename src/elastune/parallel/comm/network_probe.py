"""Measurements of the network: the speed of a group's all-reduce, of links between hosts, and of whole routes.

Routes are measured by summing along them, because a model of links knows nothing of busy processors.
"""

from __future__ import annotations

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

# --- a group's all-reduce --------------------------------------------------------------------------------------------

SMALL_BYTES = 4 << 10
LARGE_BYTES = 4 << 20
REPEATS = 7


def measure_link(group: Group, hosts: int = 1) -> LinkMeasured:
    """Measure how fast a group reduces: latency and seconds per byte, from a small and a large all-reduce.

    All workers call it; each time is a median of several all-reduces. ``hosts``: how many hosts the workers run on.
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
    return median(times)


# --- the links between hosts -----------------------------------------------------------------------------------------

PINGS = 5
BLOCK_BYTES = 256 << 10
LONGEST_S = 0.02  # of one link in one direction, plus one block more: all workers wait meanwhile, in every view
BURST_BLOCKS = 2  # the first ones, which do not show a link's rate
MOST_BLOCKS = 6


def probe_links(group: Group, hosts: Sequence[str]) -> list[float]:
    """Measure the links of this worker's host: latency and bytes a second to each host.

    All workers call it. The first worker of each host measures, in rounds in which each host exchanges messages with
    one other host.

    Args:
        group: The workers.
        hosts: The host of each worker, by rank.

    Returns:
        Latency and rate for each host, in order of first appearance in ``hosts``. Both are zero for the worker's own
        host, and all are zero on workers that do not measure.

    Raises:
        GroupBroken: If the group ends.
    """
    names = list(dict.fromkeys(hosts))
    first_ranks = [hosts.index(name) for name in names]
    measured = [0.0] * (2 * len(names))
    if group.rank not in first_ranks:
        return measured
    host = first_ranks.index(group.rank)
    for pairs in rounds(len(names)):
        for i, j in pairs:
            if host in (i, j):
                other = j if host == i else i
                measured[2 * other : 2 * other + 2] = _exchange(group, first_ranks[other], begins=host == i)
    return measured


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of ``count`` hosts, each pair once, in rounds in which no host appears twice (the circle method)."""
    ring = list(range(count + count % 2))
    schedule = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        schedule.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return schedule


def _exchange(group: Group, other: int, *, begins: bool) -> tuple[float, float]:
    """Latency and rate from this worker to ``other``; the two measure one after the other."""
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
        _send_flag(group, other, 1.0)
        blocks.append(_round_trip(group, other, block, token))
    _send_flag(group, other, 0.0)
    # A link may let a burst pass at once, but only the rate in the long run counts.
    block_s = median(blocks[BURST_BLOCKS:] or blocks[-1:])
    return trip_s / 2, BLOCK_BYTES / max(1e-6, block_s - trip_s)


def _answer(group: Group, other: int) -> None:
    token, block = torch.zeros(1), torch.zeros(BLOCK_BYTES // 4)
    for _ in range(PINGS):
        group.receive(token, other)
        group.send(token, other)
    while _receive_flag(group, other):
        group.receive(block, other)
        group.send(token, other)


def _round_trip(group: Group, other: int, sent: torch.Tensor, reply: torch.Tensor) -> float:
    started = time.perf_counter()
    group.send(sent, other)
    group.receive(reply, other)
    return time.perf_counter() - started


def _send_flag(group: Group, other: int, flag: float) -> None:
    group.send(torch.full((1,), flag), other)


def _receive_flag(group: Group, other: int) -> bool:
    flag = torch.zeros(1)
    group.receive(flag, other)
    return bool(flag.item())


# --- whole routes ----------------------------------------------------------------------------------------------------


RouteChoice = tuple[tuple[Route, ...], int]
"""Routes, and the KiB of a chunk; without routes the backend sums, or each worker sends to each."""
Action = Callable[[], object]
TURNS = 4  # the first counts only if no other follows
LONG_S = 0.5  # of all choices together: no further turn begins after this time


def time_routes(group: Group, choices: Sequence[RouteChoice], numel: int, num_slots: int = 0) -> list[float]:
    """Measure the seconds of a sum of ``numel`` numbers along each of ``choices``, in turns.

    All workers of ``group`` call it alike, with no other operation among them. The group's routes stay as they were.

    Args:
        group: The workers.
        choices: The routes to measure.
        numel: The size of the sum.
        num_slots: Sum in the order of the canonical tree over so many slots; 0: in any order.

    Returns:
        For each choice the median over turns of the workers' mean seconds; equal on all workers.

    Raises:
        GroupBroken: If the group ends.
    """
    before, times = (group.routes, group.chunk_kib), list[list[float]]()
    prepare = _in_tree_order if num_slots else _in_any_order
    try:
        while len(times) < TURNS and sum(map(sum, times)) < LONG_S:
            times.append([])
            for group.routes, group.chunk_kib in choices:
                sum_up, settle = prepare(group, numel, num_slots)
                group.all_reduce(torch.zeros(1)).wait()  # now all workers have allocated their memory
                started = time.perf_counter()
                try:
                    sum_up()
                    seconds = time.perf_counter() - started
                finally:
                    settle()
                rows = group.gather_floats([seconds])
                times[-1].append(sum(worker_s for (worker_s,) in rows) / group.size)
    finally:
        group.routes, group.chunk_kib = before
    return [median(turns) for turns in zip(*(times[1:] or times), strict=True)]


def _in_any_order(group: Group, numel: int, num_slots: int) -> tuple[Action, Action]:
    """A function that sums in any order (``num_slots`` is 0), and one that cleans up after it."""
    value = torch.zeros(numel)
    if not group.routes:
        return lambda: group.all_reduce(value).wait(), lambda: None
    relay = Relay(group, value, NUMBER)

    def sum_up() -> None:
        relay.start([value], value)
        relay.wait()

    return sum_up, relay.settle


def _in_tree_order(group: Group, numel: int, num_slots: int) -> tuple[Action, Action]:
    """The same, in the order of the canonical tree."""
    reducer = ExactReducer([torch.zeros(numel)], num_slots, group, lane=NUMBER)
    value, slots = torch.zeros(numel), cut(num_slots, group.size)[group.rank]

    def sum_up() -> None:
        reducer.begin_with({slot: [value] for slot in slots})
        reducer.finish()

    return sum_up, reducer.drain
