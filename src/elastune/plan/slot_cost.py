"""What it costs a worker to run its slots one by one, as ``exact`` mode does, over plain PyTorch's one pass."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MEASURED: Mapping[int, tuple[float, float]] = MappingProxyType(
    {1: (1.0, 1.0), 2: (1.0, 1.1), 4: (1.1, 1.3), 8: (1.3, 1.65)}
)
"""CPU time of a step in ``exact`` mode over that of plain PyTorch, by slots a worker: the least and the most of a LeNet
(batch 64), a ResNet-18 and a small GPT (batch 32), one thread. From ``benchmarks/results/slots.json``."""
TOLD_FROM = 1.15


def slot_cost(num_slots: int, workers: int) -> tuple[float, float]:
    """The least and the most that the busiest of ``workers`` takes, as a multiple of plain PyTorch's CPU time.

    Between counts that were measured it is the next larger one's; beyond the largest, that one's: more than that.
    """
    most = -(-num_slots // workers)
    return MEASURED[next((count for count in MEASURED if count >= most), max(MEASURED))]


def slot_cost_text(num_slots: int, workers: int) -> str:
    """In words, with what costs less; empty where it costs about nothing."""
    low, high = slot_cost(num_slots, workers)
    if high < TOLD_FROM:
        return ""
    on = "1 worker" if workers == 1 else f"{workers} workers"
    more = "at least " if -(-num_slots // workers) > max(MEASURED) else "about "
    fewer = max(workers, num_slots // 4)
    told = f"{num_slots} slots on {on}: {more}{low:g} to {high:g} x the CPU time of plain PyTorch, by small passes"
    return f"{told} (measured on a LeNet, a ResNet-18 and a small GPT, not here); --slots {fewer} or --mode fast: less"
