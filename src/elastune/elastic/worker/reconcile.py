"""The members of a new view compare how far each is and decide how to go on; the same decision on every member."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastune.elastic.coordinator.membership import ProtocolViolation


@dataclass(frozen=True)
class MemberStatus:
    """One member's line of the table. All numbers, so that it travels in one gather."""

    completed: int  # operations whose result this worker holds or has used
    step: int  # completed steps
    unrepeatable: bool  # since its last step it has evaluated something that a lost worker may have had a part of
    lost: bool  # since the last reconciliation it saw a member go without leaving, or broke off what cannot be repeated
    snapshot: int  # the step of its in-memory snapshot, -1: none
    rewinds: int  # how often it was rewound
    joins: bool  # it holds no state
    done: bool = False  # it has completed the last operation that there is


@dataclass(frozen=True)
class RecoveryPlan:
    """What every member has to do. Workers are named by their ranks in the new view.

    ``rewind_to``: all go back to the snapshot of this step, which ``rewind_source`` holds and sends to those that lack
    it; -1: nobody holds one, all begin at the newest checkpoint or at the start. ``result_source`` sends the newest
    operation's result to the ``lagging``. ``state_source``: the member that sends each joiner the state. ``step``:
    completed steps once all that is done, and so the first step of the view, counted from 0; 0 where ``rewind_to`` is
    -1 (the caller finds the checkpoint's). ``rewinds``: how often all members were rewound then.
    """

    rewind_to: int | None
    rewind_source: int | None
    rewind_lacking: tuple[int, ...]
    result_source: int | None
    lagging: tuple[int, ...]
    state_source: dict[int, int]
    step: int
    rewinds: int


def reconcile(rows: Sequence[MemberStatus]) -> RecoveryPlan:
    """The decision for members whose statuses, by rank, are ``rows``. Raises ``ProtocolViolation``."""
    holders = [rank for rank, row in enumerate(rows) if not row.joins]
    joiners = [rank for rank, row in enumerate(rows) if row.joins]
    if not holders:
        raise ProtocolViolation(f"nobody holds the state: {list(rows)}")
    newest = max(rows[rank].completed for rank in holders)
    furthest = [rank for rank in holders if rows[rank].completed == newest]
    lagging = tuple(rank for rank in holders if rows[rank].completed < newest)
    rewinds = {rows[rank].rewinds for rank in holders}
    # A member that lacks the newest operation had given its part to it, so all that it evaluated before is in that
    # operation's result: only what the furthest have evaluated since their last step can lack a lost worker's part.
    # And once one has completed the last operation of all, nothing that was evaluated is still to be gathered.
    open_ended = not any(rows[rank].done for rank in holders)
    spoilt = (
        open_ended and any(rows[rank].lost for rank in holders) and any(rows[rank].unrepeatable for rank in furthest)
    )
    # Some were rewound in a view that broke before the others were.
    unfinished = len(rewinds) > 1
    if joiners and (lagging or spoilt or unfinished):
        raise ProtocolViolation(f"a worker joins before the members have reconciled: {list(rows)}")
    if spoilt or unfinished:
        return _rewound(rows, holders, max(rewinds) + 1)
    step = _common_step(rows, furthest, lagging)
    return RecoveryPlan(
        rewind_to=None,
        rewind_source=None,
        rewind_lacking=(),
        result_source=furthest[0] if lagging else None,
        lagging=lagging,
        state_source={joiner: holders[i % len(holders)] for i, joiner in enumerate(joiners)},
        step=step,
        rewinds=max(rewinds),
    )


def _rewound(rows: Sequence[MemberStatus], holders: Sequence[int], rewinds: int) -> RecoveryPlan:
    newest = max(rows[rank].snapshot for rank in holders)
    having = [rank for rank in holders if rows[rank].snapshot == newest]
    found = newest >= 0
    return RecoveryPlan(
        rewind_to=newest if found else -1,
        rewind_source=having[0] if found else None,
        rewind_lacking=tuple(rank for rank in holders if rank not in having),
        result_source=None,
        lagging=(),
        state_source={},
        step=max(newest, 0),
        rewinds=rewinds,
    )


def _common_step(rows: Sequence[MemberStatus], furthest: Sequence[int], lagging: Sequence[int]) -> int:
    """The step of the furthest ranks; all have it once the others have the newest operation, which may be a step."""
    steps = {rows[rank].step for rank in furthest}
    step = max(steps)
    if len(steps) > 1 or any(rows[rank].step not in (step - 1, step) for rank in lagging):
        raise ProtocolViolation(f"members that completed the same took different steps: {list(rows)}")
    if any(rows[rank].completed < rows[furthest[0]].completed - 1 for rank in lagging):
        raise ProtocolViolation(f"members differ by more than one operation: {list(rows)}")
    return step
