"""How members of a new view go on: each compares how far all are, and all come to the same decision.

A round's learners are distributed over the members of the view in which its first worker began it. Where members
are lost, the others go on with their own learners as long as a quorum is left. The view in which the round ends
decides who is in its mean, so the mean is the same everywhere. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastune.core.slots import cut
from elastune.elastic.coordinator.machine import ProtocolViolation
from elastune.elastic.wire.view import View

# [open round] Whether a round of learners goes on without the workers that were lost in it, and who has which learner then.
#
# A round's learners are dealt out over the members of the view by which its first worker began it. Where members are
# lost, the others go on with theirs, by the next view, as long as a quorum of learners is left; those that had not begun
# yet begin with the learners that they had in the same deal. Who is in the round's mean is who is in the view by which
# it ends, so it is the same everywhere.


@dataclass(frozen=True)
class OpenRound:
    """A round that a worker has begun: dealt out by the view ``assignment_view``; ``quorum`` of ``learners`` have to be there.

    ``assignment_view`` is 0 where there is none, or none that can end without some of its learners.
    """

    assignment_view: int = 0
    learners: int = 0
    quorum: int = 0


NO_ROUND = OpenRound()
Dealt = Callable[[int], Sequence[int | None]]
"""Of the members of a new view, by rank: the rank of each in an earlier one, by its number; None: it was not there."""


def goes_on(rounds: Sequence[OpenRound], dealt: Dealt, size_of: Callable[[int], int]) -> int:
    """By which view the open round is dealt out, if it goes on among the workers that have begun ``rounds``; else 0.

    Args:
        rounds: Of all that have come as far as any, each worker's.
        dealt: Where the new view's members stood in an earlier one.
        size_of: How many members that had.
    """
    newest = max(rounds, key=lambda each: each.assignment_view, default=NO_ROUND)
    if not newest.assignment_view:
        return 0
    shares = cut(newest.learners, size_of(newest.assignment_view))
    here = sum(len(shares[seat]) for seat in dealt(newest.assignment_view) if seat is not None)
    return newest.assignment_view if here >= newest.quorum > 0 else 0


class LearnerAssignment:
    """By which view learners are dealt out to this worker and the others: the newest, or that of the open round."""

    def __init__(self) -> None:
        self._known: dict[int, View] = {}
        self._by: View | None = None

    def entered(self, view: View) -> None:
        """This worker forms ``view``; an open round may turn out to be dealt out by it, or by one before it."""
        self._known[view.number] = view

    def decided(self, assignment_view: int) -> None:
        """The open round goes on as the view ``assignment_view`` deals it out; 0: there is none that does."""
        self._by = self._known[assignment_view] if assignment_view else None

    def round_over(self, now: View | None) -> None:
        """A round is completed here; the next one is dealt out by ``now``."""
        self._by, self._known = None, {} if now is None else {now.number: now}

    def by(self, now: View) -> View:
        """The view by which the open round, or the next one, is dealt out; ``now``: the newest."""
        return self._by or now

    def learner_workers(self, assignment_view: int, learners: int) -> Mapping[int, int]:
        """Which worker has each of so many ``learners`` in the deal of the view ``assignment_view``."""
        members = self._known[assignment_view].members
        parts = cut(learners, len(members))
        return {learner: worker for worker, part in zip(members, parts, strict=True) for learner in part}

    def seats(self, assignment_view: int, members: Sequence[int]) -> Sequence[int | None]:
        """See ``Dealt``, for a view of ``members``."""
        ranks = self._known[assignment_view].ranks
        return [ranks.get(worker) for worker in members]

    def size_of(self, assignment_view: int) -> int:
        """How many members the view ``assignment_view`` had."""
        return len(self._known[assignment_view].members)


# [reconcile] The members of a new view compare how far each is and decide how to go on; the same decision on every member.


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
    were rewound then. ``assignment_view``: the view by which the open round goes on to be dealt out; 0: none goes on.
    """

    rewind_to: int | None
    rewind_source: int | None
    rewind_lacking: tuple[int, ...]
    result_source: int | None
    lagging: tuple[int, ...]
    state_source: dict[int, int]
    step: int
    rewinds: int
    assignment_view: int = 0


def reconcile(
    rows: Sequence[MemberStatus],
    hosts: Sequence[str] = (),
    goes_on: Callable[[Sequence[OpenRound]], int] = lambda rounds: 0,
) -> RecoveryPlan:
    """The decision for members whose statuses, by rank, are ``rows``. Raises ``ProtocolViolation``.

    ``hosts``: where each of them runs; empty where that is one machine. ``goes_on``: see ``open_round.goes_on``.
    """
    owners = [rank for rank, row in enumerate(rows) if not row.joins]
    joiners = [rank for rank, row in enumerate(rows) if row.joins]
    if not owners:
        raise ProtocolViolation(f"nobody holds the state: {list(rows)}")
    newest = max(rows[rank].completed for rank in owners)
    furthest = [rank for rank in owners if rows[rank].completed == newest]
    lagging = tuple(rank for rank in owners if rows[rank].completed < newest)
    rewinds = {rows[rank].rewinds for rank in owners}
    # A member that lacks the newest operation had given its part to it, so all that it evaluated before is in that
    # operation's result: only what the furthest have evaluated since their last step can lack a lost worker's part.
    # And once one has completed the last operation of all, nothing that was evaluated is still to be gathered.
    open_ended = not any(rows[rank].done for rank in owners)
    # A round that goes on is not repeated.
    assignment_view = goes_on([rows[rank].open for rank in furthest])
    redone = [
        rows[rank] for rank in furthest if not assignment_view or rows[rank].open.assignment_view != assignment_view
    ]
    spoilt = open_ended and any(rows[rank].lost for rank in owners) and any(row.unrepeatable for row in redone)
    # Some were rewound in a view that broke before the others were.
    unfinished = len(rewinds) > 1
    if joiners and (lagging or spoilt or unfinished):
        raise ProtocolViolation(f"a worker joins before the members have reconciled: {list(rows)}")
    if spoilt or unfinished:
        return _rewound(rows, owners, max(rewinds) + 1)
    step = _common_step(rows, furthest, lagging)
    return RecoveryPlan(
        rewind_to=None,
        rewind_source=None,
        rewind_lacking=(),
        result_source=furthest[0] if lagging else None,
        lagging=lagging,
        state_source=_sources(owners, joiners, hosts),
        step=step,
        rewinds=max(rewinds),
        assignment_view=assignment_view,
    )


def _sources(owners: Sequence[int], joiners: Sequence[int], hosts: Sequence[str]) -> dict[int, int]:
    """Who sends each joiner the state, in this order.

    Between hosts it travels once for each host that lacks it; who has got it passes it on to two others there.
    """
    if not hosts:
        return {joiner: owners[i % len(owners)] for i, joiner in enumerate(joiners)}
    there: dict[str, list[int]] = {}
    for rank in owners:
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


def _rewound(rows: Sequence[MemberStatus], owners: Sequence[int], rewinds: int) -> RecoveryPlan:
    newest = max(rows[rank].snapshot for rank in owners)
    having = [rank for rank in owners if rows[rank].snapshot == newest]
    found = newest >= 0
    return RecoveryPlan(
        rewind_to=newest if found else -1,
        rewind_source=having[0] if found else None,
        rewind_lacking=tuple(rank for rank in owners if rank not in having),
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
