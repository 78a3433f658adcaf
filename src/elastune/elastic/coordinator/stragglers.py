"""Who keeps the others waiting, told in one line from what the members last said of themselves."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastune.elastic.protocol.messages import Beat

COLLECTIVES = {"reducing": "all-reduce", "gathering": "gather"}
LEAST_PATIENCE_S = 3.0
PATIENCE_STEPS = 5.0
LOG_LIMIT = 200  # characters


@dataclass(frozen=True)
class Sight:
    """What was last heard of one member: its ``beat``, ``age_s`` seconds ago."""

    worker: int
    rank: int
    host: str
    beat: Beat
    age_s: float

    @property
    def since_s(self) -> float:
        """How long it has been doing what it does."""
        return self.beat.since_s + self.age_s

    def __str__(self) -> str:
        return f"worker {self.worker} (rank {self.rank}, host {self.host or 'unknown'})"


@dataclass(frozen=True)
class Straggler:
    """A worker that keeps others waiting in ``step``, and the sentence about it."""

    worker: int
    step: int
    line: str


class Pace:
    """The median time of a step, from the step numbers that beats tell."""

    def __init__(self) -> None:
        self._newest: tuple[float, int] | None = None
        self._step_s: deque[float] = deque(maxlen=31)

    def heard(self, at_s: float, step: int) -> None:
        """Some member was in ``step`` at ``at_s``."""
        if self._newest is None:
            self._newest = at_s, step
        elif step > self._newest[1]:
            self._step_s.append((at_s - self._newest[0]) / (step - self._newest[1]))
            self._newest = at_s, step

    @property
    def patience_s(self) -> float:
        """How long a collective may last before somebody is named."""
        return max(LEAST_PATIENCE_S, PATIENCE_STEPS * statistics.median(self._step_s or [0.0]))


def straggler(sights: Sequence[Sight], patience_s: float, last_line: Callable[[int], str]) -> Straggler | None:
    """The member that keeps others waiting for longer than ``patience_s``, the furthest behind if there are several.

    Where all wait in the same collective nobody is to blame: it hangs, and the sentence names them all.
    ``last_line(worker)``: the last line of a worker's log.
    """
    working = [sight for sight in sights if sight.beat.doing != "done"]
    waiting = [sight for sight in working if sight.beat.doing in COLLECTIVES and sight.since_s > patience_s]
    if not waiting:
        return None
    first = max(waiting, key=lambda sight: (sight.beat.step, sight.since_s))
    where, step = first.beat.doing, first.beat.step
    together = [sight for sight in working if (sight.beat.doing, sight.beat.step) == (where, step)]
    size = f" ({_size(first.beat.size_bytes)})" if first.beat.size_bytes else ""
    what = f"{COLLECTIVES[where]} of step {step}{size}"
    behind = [sight for sight in working if sight not in together and sight.beat.step <= step]
    if not behind:
        if len(together) < len(working):  # somebody has completed it: the beats are not of one moment
            return None
        names = ", ".join(map(str, together))
        return Straggler(first.worker, step, f"all have been waiting for {first.since_s:.0f} s in {what}: {names}")
    last = min(behind, key=lambda sight: (sight.beat.step, -sight.since_s, sight.rank))
    others = len({sight.worker for sight in waiting} - {last.worker})
    also = [str(sight.worker) for sight in behind if sight is not last]
    log = " ".join(last_line(last.worker).split())[-LOG_LIMIT:]
    line = (
        f"{last} keeps {others} other{'s' * (others != 1)} waiting for {first.since_s:.0f} s in {what}: "
        f"it has been {last.beat.doing} for {last.since_s:.1f} s"
        + (f" in step {last.beat.step}" if last.beat.step != step else "")
        + (f"; behind as well: worker {', '.join(also)}" if also else "")
        + (f'; its log ends: "{log}"' if log else "")
    )
    return Straggler(last.worker, step, line)


def _size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB" if count >= 1 << 19 else f"{count / (1 << 10):.1f} KiB"
