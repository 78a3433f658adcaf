"""Two loops in one process, step times compared in pairs: rounds of a few steps take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Seconds = tuple[float, float]
"""By the clock, and of this process's CPU time, which other processes hardly change."""
Timed = Callable[[int], Seconds]
"""Takes so many steps; seconds of one."""


def now() -> Seconds:
    return time.perf_counter(), time.process_time()


def since(started: Seconds, steps: int) -> Seconds:
    wall, cpu = (end - begin for begin, end in zip(started, now(), strict=True))
    return wall / steps, cpu / steps


def timed(run: Callable[[int], None]) -> Timed:
    """``run``, which takes so many steps and does nothing else."""

    def take(steps: int) -> Seconds:
        started = now()
        run(steps)
        return since(started, steps)

    return take


def paired(variants: Mapping[str, Timed], rounds: int, steps: int) -> dict[str, Any]:
    """Medians and quartiles over rounds of "fast" over "plain", by the clock and of CPU time."""
    results: dict[str, list[Seconds]] = {variant: [] for variant in variants}
    for round_ in range(rounds):
        for variant in list(variants)[:: 1 - 2 * (round_ % 2)]:
            results[variant].append(variants[variant](steps))
    lines: dict[str, Any] = {"rounds": rounds, "steps": steps}
    for place, of in enumerate(("", "cpu_")):
        ratios = sorted(a[place] / b[place] for a, b in zip(results["fast"], results["plain"], strict=True))
        low, middle, high = (ratios[int(q * (len(ratios) - 1))] for q in (0.25, 0.5, 0.75))
        lines[f"{of}fast_over_plain"] = {"median": middle, "quartiles": [low, high]}
        lines[f"{of}ms"] = {
            variant: statistics.median(each[place] for each in values) * 1e3 for variant, values in results.items()
        }
    return lines
