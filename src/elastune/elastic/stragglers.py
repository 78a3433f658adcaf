"""Which members keep the others waiting, or wait for each other for ever: found in their newest heartbeats.

Members complete one sequence of operations. Two members that are in operations of the same number, but not in the
same operation, never come together. The result is one line with the place of each rank. Pure functions.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastune.core.errors import UserError
from elastune.elastic.wire.messages import Beat

MOST_NAMED = 8  # places in one line, and ranks for each place
COLLECTIVES = {"reducing": "all-reduce", "gathering": "gather"}
LEAST_PATIENCE_S = 3.0
PATIENCE_STEPS = 5.0
LOG_LIMIT = 200  # characters
Reason = Literal["user_error", "timeout"]


@dataclass(frozen=True)
class HeartbeatSample:
    """The newest heartbeat of one member, received ``age_s`` seconds ago."""

    worker: int
    rank: int
    host: str
    beat: Beat
    age_s: float

    @property
    def since_s(self) -> float:
        """For how long the member has been doing this."""
        return self.beat.since_s + self.age_s

    def __str__(self) -> str:
        return f"worker {self.worker} (rank {self.rank}, host {self.host or 'unknown'})"


@dataclass(frozen=True)
class Straggler:
    """A worker that keeps others waiting in ``step``, with the sentence that reports it."""

    worker: int
    step: int
    line: str


class Pace:
    """The median time of a step, from the step numbers in heartbeats."""

    def __init__(self) -> None:
        self._newest: tuple[float, int] | None = None
        self._step_s: deque[float] = deque(maxlen=31)

    def message_received(self, at_s: float, step: int) -> None:
        """Note that a member was in ``step`` at ``at_s``."""
        if self._newest is None:
            self._newest = at_s, step
        elif step > self._newest[1]:
            self._step_s.append((at_s - self._newest[0]) / (step - self._newest[1]))
            self._newest = at_s, step

    @property
    def patience_s(self) -> float:
        """How long a collective may last before the worker that delays it is named."""
        return max(LEAST_PATIENCE_S, PATIENCE_STEPS * statistics.median(self._step_s or [0.0]))


def straggler(
    samples: Sequence[HeartbeatSample], patience_s: float, last_line: Callable[[int], str]
) -> Straggler | None:
    """Find the member that keeps others waiting for longer than ``patience_s``, the furthest behind of several.

    If all wait in the same collective, no member is to blame: the collective hangs, and the sentence names all members.
    ``last_line`` returns the last line of a worker's log.
    """
    working = [sample for sample in samples if sample.beat.doing != "done"]
    waiting = [sample for sample in working if sample.beat.doing in COLLECTIVES and sample.since_s > patience_s]
    if not waiting:
        return None
    first = max(waiting, key=lambda sample: (sample.beat.step, sample.since_s))
    where, step = first.beat.doing, first.beat.step
    together = [sample for sample in working if (sample.beat.doing, sample.beat.step) == (where, step)]
    size = f" ({_size(first.beat.size_bytes)})" if first.beat.size_bytes else ""
    what = f"{COLLECTIVES[where]} of step {step}{size}"
    behind = [sample for sample in working if sample not in together and sample.beat.step <= step]
    if not behind:
        if len(together) < len(working):  # a member has completed it: the heartbeats are not of one moment
            return None
        names = ", ".join(map(str, together))
        return Straggler(first.worker, step, f"all have been waiting for {first.since_s:.0f} s in {what}: {names}")
    last = min(behind, key=lambda sample: (sample.beat.step, -sample.since_s, sample.rank))
    others = len({sample.worker for sample in waiting} - {last.worker})
    also = [str(sample.worker) for sample in behind if sample is not last]
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


# --- stalls: members that will wait for each other for ever ---


@dataclass(frozen=True)
class Stall:
    """The reason why a run cannot go on.

    ``worker`` does what most others do not do, or is the one that is waited for.
    """

    worker: int
    reason: Reason
    detail: str


def find_stall(samples: Sequence[HeartbeatSample], limit_s: float) -> Stall | None:
    """The reason why the members of ``samples`` will never come together; None if they may.

    Two members that are in operations of the same number, but not in the same operation, never do. Nor does a member
    that has ended with one that waits. No clock is needed to know that. ``limit_s``: an operation may wait this long
    for a member that does something else.
    """
    waiting = [sample for sample in samples if sample.beat.doing in COLLECTIVES]
    return _in_different_operations(samples) or _too_long(samples, waiting, limit_s)


def _in_different_operations(samples: Sequence[HeartbeatSample]) -> Stall | None:
    by_operation: dict[tuple[int, int], list[HeartbeatSample]] = {}
    for sample in samples:
        if sample.beat.doing in COLLECTIVES or sample.beat.doing == "done":
            by_operation.setdefault((sample.beat.view, sample.beat.operation), []).append(sample)
    for met in by_operation.values():
        kinds = [(sample.beat.doing, sample.beat.what) for sample in met]
        if len(set(kinds)) > 1:
            odd = min(met, key=lambda sample: (kinds.count((sample.beat.doing, sample.beat.what)), -sample.rank))
            error = rank_differences(max(sample.beat.step for sample in met), {s.rank: _doing(s) for s in met})
            return Stall(odd.worker, "user_error", str(error))
    return None


def _too_long(samples: Sequence[HeartbeatSample], waiting: Sequence[HeartbeatSample], limit_s: float) -> Stall | None:
    longest = max(waiting, key=lambda sample: sample.since_s, default=None)
    if longest is None or longest.since_s <= limit_s:
        return None
    place = longest.beat.view, longest.beat.operation
    late = [s for s in samples if s not in waiting or (s.beat.view, s.beat.operation) < place]
    named = late or samples
    places = lines_by_rank({sample.rank: f"{_doing(sample)} for {sample.since_s:.0f} s" for sample in named})
    detail = (
        f"rank {longest.rank} has waited for {longest.since_s:.0f} s in {longest.beat.what}{_line(longest)} after step "
        f"{longest.beat.step}, and --collective-timeout is {limit_s:g} s; "
        + ("missing: " if late else "all are there, but nothing comes through: ")
        + places
    )
    return Stall(named[0].worker, "timeout", detail)


def _doing(sample: HeartbeatSample) -> str:
    beat = sample.beat
    if beat.doing == "done":
        return f"has ended its training function{_line(sample)}"
    return f"in {beat.what or beat.doing}{_line(sample)}"


def _line(sample: HeartbeatSample) -> str:
    return f" ({sample.beat.line})" if sample.beat.line else ""


# --- which rank is where, in one line ---


def rank_differences(step: int, doing: Mapping[int, str]) -> UserError:
    """The error that names which rank is in which operation, after ``step`` completed steps.

    ``doing``: the operation and place of each rank, in words.
    """
    rule = "all ranks must make the same session calls in the same order"
    fix = "let no rank skip or add one; decide by what session.mean gives, which is equal on all"
    return UserError(rule, f"after step {step}, {lines_by_rank(doing)}", fix)


def lines_by_rank(places: Mapping[int, str]) -> str:
    """ "rank 0 in this; ranks 1, 2 in that": the ranks in the same place are named together."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(places.items()):
        ranks.setdefault(text, []).append(rank)
    parts = [f"{_names(same)} {text}" for text, same in list(ranks.items())[:MOST_NAMED]]
    return "; ".join(parts)


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_NAMED])) + (", ..." if len(ranks) > MOST_NAMED else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
