"""Whether a round of learners goes on without the workers that were lost in it, and who has which learner then.

A round's learners are dealt out over the members of the view by which its first worker began it. Where members are
lost, the others go on with theirs, by the next view, as long as a quorum of learners is left; those that had not begun
yet begin with the learners that they had in the same deal. Who is in the round's mean is who is in the view by which
it ends, so it is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastune.core.slots import cut
from elastune.elastic.protocol.view import View


@dataclass(frozen=True)
class OpenRound:
    """A round that a worker has begun: dealt out by the view ``dealt_by``; ``quorum`` of ``learners`` have to be there.

    ``dealt_by`` is 0 where there is none, or none that can end without some of its learners.
    """

    dealt_by: int = 0
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
    newest = max(rounds, key=lambda each: each.dealt_by, default=NO_ROUND)
    if not newest.dealt_by:
        return 0
    shares = cut(newest.learners, size_of(newest.dealt_by))
    here = sum(len(shares[seat]) for seat in dealt(newest.dealt_by) if seat is not None)
    return newest.dealt_by if here >= newest.quorum > 0 else 0


class Dealing:
    """By which view learners are dealt out to this worker and the others: the newest, or that of the open round."""

    def __init__(self) -> None:
        self._known: dict[int, View] = {}
        self._by: View | None = None

    def entered(self, view: View) -> None:
        """This worker forms ``view``; an open round may turn out to be dealt out by it, or by one before it."""
        self._known[view.number] = view

    def decided(self, dealt_by: int) -> None:
        """The open round goes on as the view ``dealt_by`` deals it out; 0: there is none that does."""
        self._by = self._known[dealt_by] if dealt_by else None

    def round_over(self, now: View | None) -> None:
        """A round is completed here; the next one is dealt out by ``now``."""
        self._by, self._known = None, {} if now is None else {now.number: now}

    def by(self, now: View) -> View:
        """The view by which the open round, or the next one, is dealt out; ``now``: the newest."""
        return self._by or now

    def carriers(self, dealt_by: int, learners: int) -> Mapping[int, int]:
        """Which worker has each of so many ``learners`` in the deal of the view ``dealt_by``."""
        members = self._known[dealt_by].members
        parts = cut(learners, len(members))
        return {learner: worker for worker, part in zip(members, parts, strict=True) for learner in part}

    def seats(self, dealt_by: int, members: Sequence[int]) -> Sequence[int | None]:
        """See ``Dealt``, for a view of ``members``."""
        ranks = self._known[dealt_by].ranks
        return [ranks.get(worker) for worker in members]

    def size_of(self, dealt_by: int) -> int:
        """How many members the view ``dealt_by`` had."""
        return len(self._known[dealt_by].members)
