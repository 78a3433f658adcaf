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

NO_ROUND = (0, 0)
STALL_S = 0.25  # a check that runs this late was delayed; messages that came in time may be delayed with it
GRACE_PART = 0.5  # the least patience, as a part of the quorum's round time: delays grow with the length of a round

Action = Callable[[], None]


def patience_s(taken: Collection[RoundTaken]) -> float:
    """The time for which the workers that have ``taken`` a round wait for the others from then on.

    It is the grace period, or half the time that the round took them, if that is more. It grows if another worker has
    more learners than each of these: with seven workers for eight learners one worker has two, and needs twice the
    time. The added time follows the pace of the slowest of these workers.
    """
    took_s = max(each.took_s for each in taken)
    most_s = max(each.took_s / each.learners * each.most for each in taken)
    return max(0.0, most_s - took_s) + max(GRACE_PART * took_s, *(each.grace_s for each in taken))


class RoundQuorum:
    """Decides which workers are late for a round: it collects each worker's report that it has taken its steps.

    A round is identified by its view and its first step. This is the one place that decides: a worker that is reported
    as late is no member of the next view, even if it arrives afterwards.

    Attributes:
        round: The newest round that any worker has taken.
    """

    def __init__(self) -> None:
        self.round = NO_ROUND
        self._taken: dict[int, RoundTaken] = {}  # by worker
        self._due: float | None = None
        self._patience_s = 0.0
        self._running = (0, 0.0, 0.0)  # the newest view, and when its first and its newest member began to run
        self._late_start = 0

    def runs(self, view: int, now: float) -> None:
        """Note that another member of ``view`` has all that it needs to begin the view's first round.

        A joiner, and the member that sends it the state, begin that round later than the others. They get as much more
        time.
        """
        if view >= self._running[0]:
            first = self._running[1] if view == self._running[0] else now
            self._running = view, first, now

    def message_received(self, worker: int, message: RoundTaken, now: float) -> float | None:
        """Note that ``worker`` has taken a round and waits for the others.

        Returns:
            The time at which to ask for ``late``, if it became known by this message; else None.
        """
        round_ = message.version, message.step
        if round_ < self.round or not message.quorum:
            return None
        if round_ > self.round:
            self._late_start = message.version if message.version > self.round[0] else 0
            self.round, self._taken, self._due = round_, {}, None
        self._taken[worker] = message
        if self._due is not None or sum(each.learners for each in self._taken.values()) < message.quorum:
            return None
        self._patience_s = patience_s(self._taken.values())
        self._due = now + self._patience_s
        return self.due

    @property
    def due(self) -> float | None:
        """The time until which the others are waited for; None as long as no quorum waits.

        It may still become later while the view is not complete.
        """
        view, first, last = self._running
        if self._due is None or view != self._late_start:
            return self._due
        return self._due + last - first

    @property
    def view(self) -> int:
        """The view of the newest round."""
        return self.round[0]

    def missing(self, members: Sequence[int]) -> list[int]:
        """The ``members`` of ``view`` that have not taken the newest round."""
        return [worker for worker in members if worker not in self._taken]

    def late(self, members: Sequence[int], now: float) -> list[int]:
        """The ``members`` that the others wait for no longer."""
        return [] if self.due is None or now < self.due else self.missing(members)

    @property
    def why(self) -> str:
        """The reason why late workers are lost."""
        late_s = round(self._patience_s, 2)
        return f"it came later than {late_s:g} s after a quorum of learners to the end of a round (grace)"


class RoundWatch:
    """Checks in time which workers are late for a round, and has them lost.

    Args:
        later: The timers of the thread that uses this object.
        lose: Called with a worker that is late, and the reason.
        membership: Returns the state of the membership machine.
        deaf: Returns whether no worker can be heard just now.
        hurry: Called for a worker and the step at whose end others wait; see ``WorkerConnections.waits``.
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

    def message_received(self, worker: int, message: Message, now: float) -> None:
        """Note a ``message`` of ``worker``.

        Messages about a view that is over, or never had this worker, are ignored.
        """
        match message:
            case Running(version=view) if self._has(view, worker):
                self._latecomers.runs(view, now)
            case RoundTaken(version=view) if self._has(view, worker):
                before, due = self._latecomers.round, self._latecomers.message_received(worker, message, now)
                hurried = [worker]
                if due is not None:
                    self._timers.put(due, partial(self._look, due))
                # From the first worker on that has taken the round, and again with the quorum, silence counts sooner.
                if (due is not None or self._latecomers.round != before) and not self._forms(view):
                    hurried += self._latecomers.missing(self._members(view))
                for each in hurried:
                    self._hurry(each, message.step, message.grace_s, now)

    def _has(self, view: int, worker: int) -> bool:
        """Whether members of ``view`` may train now, and ``worker`` is one of them."""
        return worker in self._members(view)

    def _members(self, view: int) -> Sequence[int]:
        return next((live.members for live in self._membership().live if live.number == view), ())

    def _forms(self, view: int) -> bool:
        """Whether some member of ``view`` may still wait for its state."""
        forming = self._membership().proposed
        return forming is not None and forming.number == view

    def _look(self, due: float) -> None:
        now, view = time.monotonic(), self._latecomers.view
        late = now > due + STALL_S
        if self._deaf() or late or self._forms(view):  # the missing reports may only be delayed
            self._again(now + STALL_S)
        elif (newest := self._latecomers.due) is not None and now < newest:
            self._again(newest)
        else:
            for worker in self._latecomers.late(self._members(view), now):
                self._lose(worker, self._latecomers.why)

    def _again(self, at: float) -> None:
        self._timers.put(at, partial(self._look, at))


class Timers:
    """Actions that a thread is to take later, by the time when they are due; equal times keep their order."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._nth = count()

    def put(self, at: float, action: Action) -> None:
        """Schedule ``action`` for the time ``at``."""
        heapq.heappush(self._heap, (at, next(self._nth), action))

    @property
    def next_at(self) -> list[float]:
        """The time of the first action, in a list; empty if there is none."""
        return [at for at, *_ in self._heap[:1]]

    def run(self, now: float) -> None:
        """Run all actions that are due."""
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()
