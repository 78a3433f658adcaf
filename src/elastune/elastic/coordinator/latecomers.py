"""Who has come too late for a round of learners: a quorum has taken its steps, and the grace time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from elastune.elastic.coordinator.later import Later
from elastune.elastic.coordinator.membership import Membership
from elastune.elastic.protocol.messages import Message, RoundTaken, Running

NO_ROUND = (0, 0)
STALL_S = 0.25  # a look that comes so late was kept back, and with it perhaps what workers had said in time


class Latecomers:
    """Hears of each worker's part of a round. A round is known by its view and its first step.

    This is the one place that decides: whoever is named is no member of the next view, whether it comes or not.
    """

    def __init__(self) -> None:
        self._round = NO_ROUND
        self._taken: dict[int, int] = {}  # by worker: its learners
        self._due: float | None = None
        self._grace_s = 0.0
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
        if name < self._round or not said.quorum:
            return None
        if name > self._round:
            self._late_start = said.version if said.version > self._round[0] else 0
            self._round, self._taken, self._due = name, {}, None
        self._taken[worker] = said.learners
        if self._due is not None or sum(self._taken.values()) < said.quorum:
            return None
        self._due, self._grace_s = now + said.grace_s, said.grace_s
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
        return self._round[0]

    def late(self, members: Sequence[int], now: float) -> list[int]:
        """Those of ``members``, who are in ``view``, that the others wait for no longer."""
        if self.due is None or now < self.due:
            return []
        return [worker for worker in members if worker not in self._taken]

    @property
    def why(self) -> str:
        """Why they are lost."""
        return f"it came later than {self._grace_s:g} s after a quorum of learners to the end of a round (grace)"


class RoundWatch:
    """Asks in time who has come too late. ``later``: of the thread that this is used in; ``lose``: what becomes of a
    worker and why; ``membership``: as it is now; ``deaf``: whether nobody can be heard just now.
    """

    def __init__(
        self,
        later: Later,
        lose: Callable[[int, str], None],
        membership: Callable[[], Membership],
        deaf: Callable[[], bool],
    ) -> None:
        self._later, self._lose, self._membership, self._deaf = later, lose, membership, deaf
        self._latecomers = Latecomers()

    def heard(self, worker: int, said: Message, now: float) -> None:
        """``worker`` has said something. What it says of a view that is over, or never had it, is ignored."""
        match said:
            case Running(version=version) if self._has(version, worker):
                self._latecomers.runs(version, now)
            case RoundTaken(version=version) if self._has(version, worker):
                due = self._latecomers.heard(worker, said, now)
                if due is not None:
                    self._later.put(due, partial(self._look, due))

    def _has(self, version: int, worker: int) -> bool:
        """Whether members of the view ``version`` may train now, and ``worker`` is one."""
        return worker in self._members(version)

    def _members(self, version: int) -> Sequence[int]:
        return next((view.members for view in self._membership().live if view.number == version), ())

    def _look(self, due: float) -> None:
        now, version, forming = time.monotonic(), self._latecomers.view, self._membership().proposed
        late = now > due + STALL_S
        if (
            self._deaf() or late or (forming is not None and forming.number == version)
        ):  # nobody was heard: it may be that all have said that they are there
            self._again(now + STALL_S)
        elif (newest := self._latecomers.due) is not None and now < newest:
            self._again(newest)
        else:
            for worker in self._latecomers.late(self._members(version), now):
                self._lose(worker, self._latecomers.why)

    def _again(self, at: float) -> None:
        self._later.put(at, partial(self._look, at))
