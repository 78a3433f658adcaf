"""How fast this group's workers reduce: measured with a few all-reduces."""

from __future__ import annotations

import statistics
import time

import torch

from elastune.comm.group import Group
from elastune.journal.records import LinkMeasured

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
