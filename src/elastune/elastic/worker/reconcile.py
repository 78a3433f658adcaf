"""The members of a new view compare how far each is and decide how to go on; the same decision on every member."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastune.elastic.coordinator.membership import ProtocolViolation
from elastune.elastic.worker.open_round import NO_ROUND, OpenRound


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
    round_steps: int = 1  # steps since before its newest operation: of a step, a round, what was loaded behind a gather
    open: OpenRound = NO_ROUND  # what it has begun and not completed


@dataclass(frozen=True)
class RecoveryPlan:
    """What every member has to do. Workers are named by their ranks in the new view.

    ``rewind_to``: all go back to the snapshot of this step, which ``rewind_source`` holds and sends to those that lack
    it; -1: nobody holds one, all begin at the newest checkpoint or at the start. ``result_source`` sends the newest
    operation's result to the ``lagging``. ``state_source``: who sends each joiner the state, in this order: a member,
    or a joiner that has got it. ``step``: completed steps once all that is done, and so the first step of the view,
    counted from 0; 0 where ``rewind_to`` is -1 (the caller finds the checkpoint's). ``rewinds``: how often all members
    were rewound then. ``dealt_by``: the view by which the open round goes on to be dealt out; 0: none goes on.
    """

    rewind_to: int | None
    rewind_source: int | None
    rewind_lacking: tuple[int, ...]
    result_source: int | None
    lagging: tuple[int, ...]
    state_source: dict[int, int]
    step: int
    rewinds: int
    dealt_by: int = 0


def reconcile(
    rows: Sequence[MemberStatus],
    hosts: Sequence[str] = (),
    goes_on: Callable[[Sequence[OpenRound]], int] = lambda rounds: 0,
) -> RecoveryPlan:
    """The decision for members whose statuses, by rank, are ``rows``. Raises ``ProtocolViolation``.

    ``hosts``: where each of them runs; empty where that is one machine. ``goes_on``: see ``open_round.goes_on``.
    """
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
    # A round that goes on is not repeated.
    dealt_by = goes_on([rows[rank].open for rank in furthest])
    redone = [rows[rank] for rank in furthest if not dealt_by or rows[rank].open.dealt_by != dealt_by]
    spoilt = open_ended and any(rows[rank].lost for rank in holders) and any(row.unrepeatable for row in redone)
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
        state_source=_sources(holders, joiners, hosts),
        step=step,
        rewinds=max(rewinds),
        dealt_by=dealt_by,
    )


def _sources(holders: Sequence[int], joiners: Sequence[int], hosts: Sequence[str]) -> dict[int, int]:
    """Who sends each joiner the state, in this order.

    Between hosts it travels once for each host that lacks it; who has got it passes it on to two others there.
    """
    if not hosts:
        return {joiner: holders[i % len(holders)] for i, joiner in enumerate(joiners)}
    there: dict[str, list[int]] = {}
    for rank in holders:
        there.setdefault(hosts[rank], []).append(rank)
    nth = [(place, rank) for ranks in there.values() for place, rank in enumerate(ranks)]
    afar = [rank for _, rank in sorted(nth)]  # one of each host before the second of any
    served: dict[str, int] = {}
    sources: dict[int, int] = {}
    for joiner in joiners:
        near, count = there.setdefault(hosts[joiner], []), served.get(hosts[joiner], 0)
        if near:
            sources[joiner], served[hosts[joiner]] = near[count // 2], count + 1
        else:
            sources[joiner] = afar[(len(there) - 1) % len(afar)]
        near.append(joiner)
    return sources


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
    """The step of the furthest ranks; all have it once the others have the newest operation: a step, or a round."""
    steps = {rows[rank].step for rank in furthest}
    step = max(steps)
    known = {step, *(step - rows[rank].round_steps for rank in furthest)}
    if len(steps) > 1 or any(rows[rank].step not in known for rank in lagging):
        raise ProtocolViolation(f"members that completed the same took different steps: {list(rows)}")
    if any(rows[rank].completed < rows[furthest[0]].completed - 1 for rank in lagging):
        raise ProtocolViolation(f"members differ by more than one operation: {list(rows)}")
    return step
