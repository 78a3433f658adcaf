"""Where the workers' time goes: step time and its parts, throughput, who is slow, how much of the time is work.

Each worker times its own step: ``data_s`` for fetching samples, ``compute_s`` for forward and backward pass, ``wait_s``
for waiting for the reduction. Means are over the workers that know their times; medians are over the last ``memory``
readings of the same batch and number of workers. A step brings the times of the step before it, and they count for that
step's batch and workers. Two equal steps in a row replace the readings of other settings. An epoch's end may cut every
other round short. Where no two steps are equal, the signals are those of the largest batch of the last three steps. So
a short last batch does not move the medians. Where five steps in a row take 1.5 times the median of those before, or
two thirds of it, something has changed. The medians are then of those five. (With ``every`` above 1 the step before a
reading is not seen. Then only readings count whose batch and workers equal those of the reading before.)

    throughput = batch / step_s                    samples a second
    reduce_s: the shortest time that a worker is blocked    the reduction itself: the last worker waits for no other
    wait_s: the time that workers are blocked beyond that   waiting for slower workers
    busy_share = (data_s + compute_s) / step_s              the part of the workers' time without waiting
    straggler: a rank whose data_s + compute_s exceed ``factor`` times the median of the other workers' in ``patience``
    readings in a row; the slowest, where there are several

Bias and variance: a median ignores pauses (a checkpoint, a garbage collection) that a mean would count, so
``samples / throughput`` is a little less than the whole time. The median's standard error is
1.2533 x 1.4826 MAD / sqrt(n), of a normal sample. The busy share counts the network's time as waiting, and the time of
a straggler's victims, too. It is not the scaling efficiency, which a run on one number of workers cannot know
(``tuning/frontier/criteria.py`` compares several).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from elastune.adapt.monitors.base import Monitor, Reading, State, WorkerTimes
from elastune.core.decisions import Signal
from elastune.core.options import Range, check

_MEDIAN_ERROR = 1.2533 * 1.4826
REMEMBERED = 3  # steps whose batches and workers separate the times
CHANGED_STEPS, CHANGED = 5, 1.5  # so many steps in a row that differ by this factor are a change, not a pause


@dataclass(frozen=True)
class Performance(Monitor):
    """Measures step times, throughput and stragglers.

    Gives the signals ``step_s`` and its parts ``data_s``, ``compute_s``, ``reduce_s`` and ``wait_s`` (seconds),
    ``throughput`` (samples a second), ``busy_share``, and ``straggler`` (a rank) while there is one.

    Args:
        every: Steps from one reading to the next.
        memory: The number of readings that medians are of.
        factor: A straggler takes more than this many times the median of the other workers.
        patience: Readings in a row that make a straggler.
    """

    every: Annotated[int, Range(1)] = 1
    memory: Annotated[int, Range(1)] = 20
    factor: Annotated[float, Range(1, open_low=True)] = 1.5
    patience: Annotated[int, Range(1)] = 5

    name = "performance"
    gives = frozenset({"step_s", "data_s", "compute_s", "reduce_s", "wait_s", "throughput", "busy_share", "straggler"})
    needs = frozenset({"times"})

    def __post_init__(self) -> None:
        check(self.name, self)

    def init(self) -> State:
        return {"steps": [], "window": [], "slow": []}

    def update(self, state: State, reading: Reading) -> State:
        known = [times for times in reading.times if _known(times)]
        if not known:
            return state
        now, seen, window = [reading.batch, reading.workers], state["steps"], state["window"]
        before, steps = seen[-1] if seen else [0, 0], [*seen, now][-REMEMBERED:]
        slow = state["slow"] if len(state["slow"]) == reading.workers else []
        if now == before:
            slow = self._slow(slow, reading.times)
        if now == before or (reading.workers == before[1] and self.every == 1):
            others = [row for row in window if row[:2] != before and row[:2] in steps] if now != before else []
            same = [*(row for row in window if row[:2] == before), [*before, *_parts(known)]]
            window = [*others, *_since_change(same)][-self.memory :]
        return {"steps": steps, "window": window, "slow": slow}

    def _slow(self, before: Sequence[Sequence[float]], times: Sequence[WorkerTimes]) -> list[list[float]]:
        """By rank: the number of slow readings in a row, and the last ratio to the other workers."""
        busy = [worker.data_s + worker.compute_s if _known(worker) else None for worker in times]
        ordered = sorted(busy_s for busy_s in busy if busy_s is not None)
        rows: list[list[float]] = []
        for rank, own_s in enumerate(busy):
            typical_s = _median_of_others(ordered, own_s)
            excess = own_s / typical_s if own_s is not None and typical_s > 0 else 0.0
            so_far = before[rank][0] if len(before) == len(times) else 0
            rows.append([so_far + 1 if excess > self.factor else 0, excess])
        return rows

    def signals(self, state: State) -> dict[str, Signal]:
        if not state["window"]:
            return {}
        workers = state["window"][-1][1]
        batch = max(row[0] for row in state["window"] if row[1] == workers)
        rows = [row[2:] for row in state["window"] if row[:2] == [batch, workers]]
        data_s, compute_s, reduce_s, wait_s = (list(part) for part in zip(*rows, strict=True))
        step_s = [sum(parts) for parts in zip(data_s, compute_s, reduce_s, wait_s, strict=True)]
        busy = [(d + c) / s for d, c, s in zip(data_s, compute_s, step_s, strict=True)]
        step = _median(step_s)
        throughput = batch / step.value
        error = None if step.error is None else throughput * (step.error / step.value)
        signals = {
            "step_s": step,
            "data_s": _median(data_s),
            "compute_s": _median(compute_s),
            "reduce_s": _median(reduce_s),
            "wait_s": _median(wait_s),
            "throughput": Signal(throughput, error),
            "busy_share": _median(busy),
        }
        stragglers = [(excess, rank) for rank, (times, excess) in enumerate(state["slow"]) if times >= self.patience]
        if stragglers:
            signals["straggler"] = Signal(float(max(stragglers)[1]))
        return signals


def _parts(known: Sequence[WorkerTimes]) -> list[float]:
    """``data_s``, ``compute_s``, ``reduce_s`` and ``wait_s`` of a step, from the times of its workers."""
    data_s, compute_s, blocked_s = (
        sum(part) / len(known) for part in zip(*((t.data_s, t.compute_s, t.wait_s) for t in known), strict=True)
    )
    reduce_s = min(times.wait_s for times in known)  # who is last has only the reduction itself to wait for
    return [data_s, compute_s, reduce_s, blocked_s - reduce_s]


def _since_change(rows: list[list[float]]) -> list[list[float]]:
    """The last ``CHANGED_STEPS`` of ``rows``, where all of them took longer, or shorter, than the rows before."""
    step_s = [sum(row[2:]) for row in rows]
    if len(rows) <= CHANGED_STEPS:
        return rows
    usual_s, last_s = statistics.median(step_s[:-CHANGED_STEPS]), step_s[-CHANGED_STEPS:]
    changed = min(last_s) > CHANGED * usual_s or max(last_s) * CHANGED < usual_s
    return rows[-CHANGED_STEPS:] if changed else rows


def _known(times: WorkerTimes) -> bool:
    return min(times.data_s, times.compute_s, times.wait_s) >= 0 and 0 < times.step_s < math.inf


def _median_of_others(ordered: Sequence[float], excluded: float | None) -> float:
    """The median of the ``ordered`` values without ``excluded``, one of them; 0 where it is the only one."""
    if excluded is None or len(ordered) < 2:
        return 0.0
    at, count = bisect_left(ordered, excluded), len(ordered) - 1

    def other(index: int) -> float:
        return ordered[index if index < at else index + 1]

    return (other((count - 1) // 2) + other(count // 2)) / 2


def _median(values: Sequence[float]) -> Signal:
    """The median, and its standard error from the median absolute deviation, of two values or more."""
    middle = statistics.median(values)
    if len(values) < 2:
        return Signal(middle)
    spread = statistics.median(abs(value - middle) for value in values)
    return Signal(middle, _MEDIAN_ERROR * spread / math.sqrt(len(values)))
