"""Which members keep the others waiting, or wait for each other for ever: found in their newest heartbeats.

Members complete one sequence of operations. Two members that are in operations of the same number, but not in the
same operation, never come together. The result is one line that says which rank is where. Pure functions.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastune.core.errors import UserError
from elastune.elastic.wire.messages import Beat

# [difference] Ranks that do not do the same, told in one line: which rank is where.

MOST_NAMED = 8  # different things, of as many ranks as there are


def rank_differences(step: int, doing: Mapping[int, str]) -> UserError:
    """What to raise where ranks, after ``step`` completed steps, are ``doing`` what does not go together."""
    rule = "all ranks must make the same session calls in the same order"
    fix = "let no rank skip or add one; decide by what session.mean gives, which is equal on all"
    return UserError(rule, f"after step {step}, {lines_by_rank(doing)}", fix)


def lines_by_rank(told: Mapping[int, str]) -> str:
    """ "rank 0 in this; ranks 1, 2 in that": ranks of which the same is told are named together."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(told.items()):
        ranks.setdefault(text, []).append(rank)
    parts = [f"{_names(of)} {text}" for text, of in list(ranks.items())[:MOST_NAMED]]
    return "; ".join(parts)


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_NAMED])) + (", ..." if len(ranks) > MOST_NAMED else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


# [stragglers] Who keeps the others waiting, told in one line from what the members last said of themselves.

COLLECTIVES = {"reducing": "all-reduce", "gathering": "gather"}
LEAST_PATIENCE_S = 3.0
PATIENCE_STEPS = 5.0
LOG_LIMIT = 200  # characters


@dataclass(frozen=True)
class HeartbeatSample:
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


def straggler(
    sights: Sequence[HeartbeatSample], patience_s: float, last_line: Callable[[int], str]
) -> Straggler | None:
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


# [standstill] Members that will wait for each other for ever, found in what they last said of themselves.
#
# Members complete one sequence of operations. So two that are in the operation of one number, and not in the same one,
# never come together; nor does one that has ended with one that still waits. No clock is needed to know that.

Reason = Literal["user_error", "timeout"]


@dataclass(frozen=True)
class Stall:
    """Why a run cannot go on: ``worker`` is one that does what most do not, or that is waited for."""

    worker: int
    reason: Reason
    detail: str


def find_stall(sights: Sequence[HeartbeatSample], limit_s: float) -> Stall | None:
    """Why the members that are seen in ``sights`` will never come together; None where they may.

    ``limit_s``: how long an operation may wait for a member that does something else.
    """
    waiting = [sight for sight in sights if sight.beat.doing in COLLECTIVES]
    return _in_different_operations(sights) or _too_long(sights, waiting, limit_s)


def _in_different_operations(sights: Sequence[HeartbeatSample]) -> Stall | None:
    here: dict[tuple[int, int], list[HeartbeatSample]] = {}
    for sight in sights:
        if sight.beat.doing in COLLECTIVES or sight.beat.doing == "done":
            here.setdefault((sight.beat.view, sight.beat.operation), []).append(sight)
    for met in here.values():
        kinds = [(sight.beat.doing, sight.beat.what) for sight in met]
        if len(set(kinds)) > 1:
            odd = min(met, key=lambda sight: (kinds.count((sight.beat.doing, sight.beat.what)), -sight.rank))
            told = rank_differences(max(sight.beat.step for sight in met), {s.rank: _doing(s) for s in met})
            return Stall(odd.worker, "user_error", str(told))
    return None


def _too_long(sights: Sequence[HeartbeatSample], waiting: Sequence[HeartbeatSample], limit_s: float) -> Stall | None:
    longest = max(waiting, key=lambda sight: sight.since_s, default=None)
    if longest is None or longest.since_s <= limit_s:
        return None
    place = longest.beat.view, longest.beat.operation
    late = [s for s in sights if s not in waiting or (s.beat.view, s.beat.operation) < place]
    named = late or sights
    told = lines_by_rank({sight.rank: f"{_doing(sight)} for {sight.since_s:.0f} s" for sight in named})
    detail = (
        f"rank {longest.rank} has waited for {longest.since_s:.0f} s in {longest.beat.what}{_line(longest)} after step "
        f"{longest.beat.step}, and --collective-timeout is {limit_s:g} s; "
        + ("missing: " if late else "all are there, but nothing comes through: ")
        + told
    )
    return Stall(named[0].worker, "timeout", detail)


def _doing(sight: HeartbeatSample) -> str:
    beat = sight.beat
    if beat.doing == "done":
        return f"has ended its training function{_line(sight)}"
    return f"in {beat.what or beat.doing}{_line(sight)}"


def _line(sight: HeartbeatSample) -> str:
    return f" ({sight.beat.line})" if sight.beat.line else ""
