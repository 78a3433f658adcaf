"""From the steps that workers note (see ``programs/workload.py``) to the pauses that events cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Tick:
    """A worker completed ``step`` as ``rank`` of ``world`` workers. ``time_s`` is this machine's monotonic clock."""

    time_s: float
    step: int
    world: int
    rank: int
    discarded: int


class Ticks:
    """The ticks in ``folder``, by process, as far as they have been read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of: dict[int, list[Tick]] = {}
        self._read: dict[int, int] = {}

    def refresh(self) -> None:
        for file in self.folder.glob("*.ticks"):
            pid = int(file.stem)
            with file.open("rb") as stream:
                stream.seek(self._read.get(pid, 0))
                new = stream.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[pid] = self._read.get(pid, 0) + len(whole)
            for line in whole.decode().splitlines():
                time_ns, step, world, rank, discarded = map(int, line.split())
                self.of.setdefault(pid, []).append(Tick(time_ns / 1e9, step, world, rank, discarded))

    def newest(self) -> Tick | None:
        """The tick that was written last."""
        return max((ticks[-1] for ticks in self.of.values()), key=lambda tick: tick.time_s, default=None)

    def pids(self) -> list[int]:
        """The living processes that took part in the newest step, or the one before it, by rank."""
        newest = self.newest()
        if newest is None:
            return []
        recent = {pid: t[-1] for pid, t in self.of.items() if abs(t[-1].step - newest.step) <= 1 and _lives(pid)}
        return sorted(recent, key=lambda pid: recent[pid].rank)

    def rank_zero(self) -> list[Tick]:
        """What whoever was rank 0 noted: the line of a job whose processes are all replaced at a fault."""
        return sorted((t for ticks in self.of.values() for t in ticks if t.rank == 0), key=lambda tick: tick.time_s)


def _lives(pid: int) -> bool:
    """Whether ``pid`` is a process that has not ended. A number can be given again, but not within one benchmark."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def usual_gaps(lines: Iterable[Sequence[Tick]]) -> dict[int, float]:
    """Number of workers -> median seconds between two steps."""
    gaps: dict[int, list[float]] = {}
    for line in lines:
        for a, b in pairwise(line):
            if a.world == b.world and b.step == a.step + 1:
                gaps.setdefault(b.world, []).append(b.time_s - a.time_s)
    return {world: statistics.median(values) for world, values in gaps.items()}


def pause_s(line: Sequence[Tick], since: float, until: float, usual: dict[int, float]) -> float | None:
    """The longest gap between two steps that ends within the window, less the median step of as many workers.

    None where ``line`` is no survivor's: it must reach from before the window to its end.
    """
    if not line or line[0].time_s > since or line[-1].time_s < until:
        return None
    gaps = [b.time_s - a.time_s - usual.get(b.world, 0.0) for a, b in pairwise(line) if since < b.time_s <= until]
    return max(gaps, default=None)


def survivors_pause_s(ticks: Ticks, since: float, until: float) -> float | None:
    """The longest pause of any survivor."""
    usual = usual_gaps(ticks.of.values())
    pauses = [pause_s(line, since, until, usual) for line in ticks.of.values()]
    return max((pause for pause in pauses if pause is not None), default=None)


def reached(ticks: Ticks, since: float, condition: Callable[[Tick], bool], then_steps: int = 0) -> float | None:
    """When a worker was ``then_steps`` steps beyond its first tick after ``since`` that met ``condition``."""
    results = []
    for line in ticks.of.values():
        after = [tick for tick in line if tick.time_s > since]
        first = next((i for i, tick in enumerate(after) if condition(tick)), None)
        if first is not None and first + then_steps < len(after) and condition(after[first + then_steps]):
            results.append(after[first + then_steps].time_s)
    return min(results, default=None)


def step_end(ticks: Ticks, time_s: float) -> float:
    """When the last worker noted the step that was noted by one at ``time_s``."""
    noted = next(tick for line in ticks.of.values() for tick in line if tick.time_s == time_s)
    same = [t.time_s for line in ticks.of.values() for t in line if (t.step, t.world) == (noted.step, noted.world)]
    return max(t for t in same if t < time_s + 1.0)  # the same step can be done again, much later


def irregular(ticks: Ticks) -> dict[str, int]:
    """How many steps the survivors' own lines skip or repeat: 0 and 0, if no step was lost or done twice."""
    steps = [b.step - a.step for line in ticks.of.values() for a, b in pairwise(line)]
    return {"skipped": sum(max(0, s - 1) for s in steps), "repeated": sum(s < 1 for s in steps)}


def summary(values: Sequence[float], digits: int = 1) -> dict[str, Any]:
    """Median, quartiles and extremes."""
    if not values:
        return {"count": 0}
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {
        "median": round(statistics.median(values), digits),
        "quartiles": [round(low, digits), round(high, digits)],
        "most": round(max(values), digits),
        "count": len(values),
    }
