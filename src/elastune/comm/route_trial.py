"""How long sums take on several routes, measured by doing them: a model of links knows nothing of busy processors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from elastune.comm.exact import ExactReducer
from elastune.comm.group import Group
from elastune.comm.relay import Relay
from elastune.comm.route_check import NUMBER
from elastune.core.routes import Route
from elastune.core.slots import cut

Way = tuple[tuple[Route, ...], int]
"""Routes, and the KiB of a chunk; no routes: the backend's own way, or everybody to everybody."""
TURNS = 4  # the first of which counts where it is the only one
ENOUGH_S = 0.1  # of all ways together: what takes longer is not noise


def try_ways(group: Group, ways: Sequence[Way], numel: int, num_slots: int = 0) -> list[float]:
    """Seconds of a sum of ``numel`` numbers on each of ``ways``, in turns; medians of the workers' means.

    All workers of ``group`` call it alike, with nothing under way among them, and all come to the same seconds.
    ``num_slots``: in the order of the canonical tree over so many; 0: as they come. Leaves the group's routes as they
    were. Raises ``GroupBroken``.
    """
    before, times = (group.routes, group.chunk_kib), list[list[float]]()
    value = torch.zeros(numel)
    try:
        while len(times) < TURNS and sum(times[-1] if times else ()) < ENOUGH_S:
            times.append([])
            for group.routes, group.chunk_kib in ways:
                told = group.gather_floats([_summed_s(group, value, num_slots)])
                times[-1].append(sum(seconds for (seconds,) in told) / group.size)
    finally:
        group.routes, group.chunk_kib = before
    return [median(own) for own in zip(*(times[1:] or times), strict=True)]


def _summed_s(group: Group, value: torch.Tensor, num_slots: int) -> float:
    """Seconds of one sum, where there is room for it already."""
    summed = _exactly if num_slots else _as_it_comes
    group.all_reduce(torch.zeros(1)).wait()
    return summed(group, value, num_slots)


def _as_it_comes(group: Group, value: torch.Tensor, num_slots: int) -> float:
    if not group.routes:
        started = time.perf_counter()
        group.all_reduce(value).wait()
        return time.perf_counter() - started
    relay = Relay(group, value, NUMBER)
    started = time.perf_counter()
    relay.start([value], value)
    try:
        relay.wait()
        return time.perf_counter() - started
    finally:
        relay.settle()


def _exactly(group: Group, value: torch.Tensor, num_slots: int) -> float:
    reducer = ExactReducer([value], num_slots, group, lane=NUMBER)
    started = time.perf_counter()
    try:
        reducer.begin_with({slot: [value] for slot in cut(num_slots, group.size)[group.rank]})
        reducer.finish()
        return time.perf_counter() - started
    finally:
        reducer.drain()
