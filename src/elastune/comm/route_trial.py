"""How long sums take on several routes, measured by doing them: a model of links knows nothing of busy processors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
Action = Callable[[], object]
TURNS = 4  # the first of which counts where it is the only one
LONG_S = 0.5  # of all ways together: one turn that takes as long is enough, and so are several


def try_ways(group: Group, ways: Sequence[Way], numel: int, num_slots: int = 0) -> list[float]:
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
