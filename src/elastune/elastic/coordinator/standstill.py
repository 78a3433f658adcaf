"""Members that will wait for each other for ever, found in what they last said of themselves.

Members complete one sequence of operations. So two that are in the operation of one number, and not in the same one,
never come together; nor does one that has ended with one that still waits. No clock is needed to know that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elastune.elastic.coordinator.stragglers import COLLECTIVES, Sight
from elastune.elastic.protocol.difference import ranks_differ, told_by_rank

Reason = Literal["user_error", "timeout"]


@dataclass(frozen=True)
class Standstill:
    """Why a run cannot go on: ``worker`` is one that does what most do not, or that is waited for."""

    worker: int
    reason: Reason
    detail: str


def standstill(sights: Sequence[Sight], limit_s: float) -> Standstill | None:
    """Why the members that are seen in ``sights`` will never come together; None where they may.

    ``limit_s``: how long an operation may wait for a member that does something else.
    """
    waiting = [sight for sight in sights if sight.beat.doing in COLLECTIVES]
    return _in_different_operations(sights) or _too_long(sights, waiting, limit_s)


def _in_different_operations(sights: Sequence[Sight]) -> Standstill | None:
    here: dict[tuple[int, int], list[Sight]] = {}
    for sight in sights:
        if sight.beat.doing in COLLECTIVES or sight.beat.doing == "done":
            here.setdefault((sight.beat.view, sight.beat.operation), []).append(sight)
    for met in here.values():
        kinds = [(sight.beat.doing, sight.beat.what) for sight in met]
        if len(set(kinds)) > 1:
            odd = min(met, key=lambda sight: (kinds.count((sight.beat.doing, sight.beat.what)), -sight.rank))
            told = ranks_differ(max(sight.beat.step for sight in met), {s.rank: _doing(s) for s in met})
            return Standstill(odd.worker, "user_error", str(told))
    return None


def _too_long(sights: Sequence[Sight], waiting: Sequence[Sight], limit_s: float) -> Standstill | None:
    longest = max(waiting, key=lambda sight: sight.since_s, default=None)
    if longest is None or longest.since_s <= limit_s:
        return None
    place = longest.beat.view, longest.beat.operation
    late = [s for s in sights if s not in waiting or (s.beat.view, s.beat.operation) < place]
    named = late or sights
    told = told_by_rank({sight.rank: f"{_doing(sight)} for {sight.since_s:.0f} s" for sight in named})
    detail = (
        f"rank {longest.rank} has waited for {longest.since_s:.0f} s in {longest.beat.what}{_line(longest)} after step "
        f"{longest.beat.step}, and --collective-timeout is {limit_s:g} s; "
        + ("missing: " if late else "all are there, but nothing comes through: ")
        + told
    )
    return Standstill(named[0].worker, "timeout", detail)


def _doing(sight: Sight) -> str:
    beat = sight.beat
    if beat.doing == "done":
        return f"has ended its training function{_line(sight)}"
    return f"in {beat.what or beat.doing}{_line(sight)}"


def _line(sight: Sight) -> str:
    return f" ({sight.beat.line})" if sight.beat.line else ""
