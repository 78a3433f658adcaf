"""Which workers are late for a round of learners: a quorum has taken its steps, and the grace period is over.

``Timers`` holds the actions that the coordinator's thread is to take later.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count

from elastune.elastic.coordinator.machine import Membership
from elastune.elastic.wire.messages import Message, RoundTaken, Running

# [later] What a thread is to do at a time to come.

Action = Callable[[], None]


class Timers:
    """Actions, by when they are due; those of one moment in the order in which they were put."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._nth = count()

    def put(self, at: float, action: Action) -> None:
        """Have ``action`` done at ``at``."""
        heapq.heappush(self._heap, (at, next(self._nth), action))

    @property
    def next_at(self) -> list[float]:
        """When the first is due; empty where there is none."""
        return [at for at, *_ in self._heap[:1]]

    def run(self, now: float) -> None:
        """Do what is due."""
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()


# [latecomers] Who has come too late for a round of learners: a quorum has taken its steps, and the grace time is over.

NO_ROUND = (0, 0)
STALL_S = 0.25  # a look that comes so late was kept back, and with it perhaps what workers had said in time
GRACE_PART = 0.5  # of the time that a round has taken its quorum, at least: what makes one late grows with the round


def patience_s(taken: Collection[RoundTaken]) -> float:
    """How long the workers that have ``taken`` a round wait for the others from then on.

    The grace time, or half as long as the round took them, if that is more; and before that as much longer as a worker
    needs at the pace of the slowest of these that has the most learners of all, where none of these has: at seven
    workers for eight learners one has two, and needs twice the time of the others.
    """
    took_s = max(each.took_s for each in taken)
    most_s = max(each.took_s / each.learners * each.most for each in taken)
    return max(0.0, most_s - took_s) + max(GRACE_PART * took_s, *(each.grace_s for each in taken))


class RoundQuorum:
    """Hears of each worker's part of a round. A round is known by its view and its first step.

    This is the one place that decides: whoever is named is no member of the next view, whether it comes or not.
    ``round``: the newest one that any worker has taken.
    """

    def __init__(self) -> None:
        self.round = NO_ROUND
        self._taken: dict[int, RoundTaken] = {}  # by worker
        self._due: float | None = None
        self._patience_s = 0.0
        self._running = (0, 0.0, 0.0)  # the newest view that is heard of; when its first member ran, and its newest one
        self._late_start = 0

    def runs(self, version: int, now: float) -> None:
        """Another member of the view ``version`` runs: it has all that it needs to begin the view's first round.

        Who hands its state to a joiner, and the joiner, begin that later than the others, and have as much longer.
        """
        if version >= self._running[0]:
            first = self._running[1] if version == self._running[0] else now
            self._running = version, first, now

    def heard(self, worker: int, said: RoundTaken, now: float) -> float | None:
        """``worker`` waits for the others. When to ask for ``late``, where that was not known before."""
        name = said.version, said.step
        if name < self.round or not said.quorum:
            return None
        if name > self.round:
            self._late_start = said.version if said.version > self.round[0] else 0
            self.round, self._taken, self._due = name, {}, None
        self._taken[worker] = said
        if self._due is not None or sum(each.learners for each in self._taken.values()) < said.quorum:
            return None
        self._patience_s = patience_s(self._taken.values())
        self._due = now + self._patience_s
        return self.due

    @property
    def due(self) -> float | None:
        """When the others are waited for no longer; None as long as no quorum waits. Of a view that is not complete yet
        it may become later.
        """
        version, first, last = self._running
        if self._due is None or version != self._late_start:
            return self._due
        return self._due + last - first

    @property
    def view(self) -> int:
        """The view of the newest round."""
        return self.round[0]

    def missing(self, members: Sequence[int]) -> list[int]:
        """Those of ``members``, who are in ``view``, that have not taken the newest round."""
        return [worker for worker in members if worker not in self._taken]

    def late(self, members: Sequence[int], now: float) -> list[int]:
        """Those of them that the others wait for no longer."""
        return [] if self.due is None or now < self.due else self.missing(members)

    @property
    def why(self) -> str:
        """Why they are lost."""
        late_s = round(self._patience_s, 2)
        return f"it came later than {late_s:g} s after a quorum of learners to the end of a round (grace)"


class RoundWatch:
    """Asks in time who has come too late. ``later``: of the thread that this is used in; ``lose``: what becomes of a
    worker and why; ``membership``: as it is now; ``deaf``: whether nobody can be heard just now; ``hurry``: for a
    worker and a step at whose end others wait that can do without it, see ``WorkerConnections.waits``.
    """

    def __init__(
        self,
        later: Timers,
        lose: Callable[[int, str], None],
        membership: Callable[[], Membership],
        deaf: Callable[[], bool],
        hurry: Callable[[int, int, float, float], None],
    ) -> None:
        self._timers, self._lose, self._membership, self._deaf, self._hurry = later, lose, membership, deaf, hurry
        self._latecomers = RoundQuorum()

    def heard(self, worker: int, said: Message, now: float) -> None:
        """``worker`` has said something. What it says of a view that is over, or never had it, is ignored."""
        match said:
            case Running(version=version) if self._has(version, worker):
                self._latecomers.runs(version, now)
            case RoundTaken(version=version) if self._has(version, worker):
                before, due = self._latecomers.round, self._latecomers.heard(worker, said, now)
                hurried = [worker]
                if due is not None:
                    self._timers.put(due, partial(self._look, due))
                # Who is silent is waited for no longer by the first that is there, and by a quorum.
                if (due is not None or self._latecomers.round != before) and not self._forms(version):
                    hurried += self._latecomers.missing(self._members(version))
                for each in hurried:
                    self._hurry(each, said.step, said.grace_s, now)

    def _has(self, version: int, worker: int) -> bool:
        """Whether members of the view ``version`` may train now, and ``worker`` is one."""
        return worker in self._members(version)

    def _members(self, version: int) -> Sequence[int]:
        return next((view.members for view in self._membership().live if view.number == version), ())

    def _forms(self, version: int) -> bool:
        """Whether some member of the view ``version`` may still wait for its state."""
        forming = self._membership().proposed
        return forming is not None and forming.number == version

    def _look(self, due: float) -> None:
        now, version = time.monotonic(), self._latecomers.view
        late = now > due + STALL_S
        if self._deaf() or late or self._forms(version):  # it may be that all have said that they are there
            self._again(now + STALL_S)
        elif (newest := self._latecomers.due) is not None and now < newest:
            self._again(newest)
        else:
            for worker in self._latecomers.late(self._members(version), now):
                self._lose(worker, self._latecomers.why)

    def _again(self, at: float) -> None:
        self._timers.put(at, partial(self._look, at))
