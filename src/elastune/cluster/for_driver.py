"""What a run has to tell its driver, and what that has been given."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from elastune.cluster.base import NOBODY, Event, Exited, Message
from elastune.journal.records import Record


class DriverQueue:
    """Filled by a run, emptied by its ``poll``.

    ``given``: by worker, so many of its records were handed out: who asks for more has kept them.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._woken = 0
        self._taken: dict[int, int] = {}
        self.given: Mapping[int, int] = {}

    def put(self, *events: Event) -> None:
        """Append ``events``."""
        self._events.extend(events)

    def put_of_run(self, records: Iterable[Record]) -> None:
        """Append ``records`` that no worker has sent."""
        self._events.extend(Message(NOBODY, record) for record in records)

    def put_first(self, records: Iterable[Record]) -> None:
        """Put ``records`` that no worker has sent before all others, the last one first."""
        self._events.extendleft(Message(NOBODY, record) for record in records)

    def took(self, worker: int, nth: int) -> None:
        """``worker``'s ``nth`` record is here, or needs not be."""
        self._taken[worker] = nth

    def hand_out(self) -> list[Event]:
        """All that is here, in order."""
        events = list(self._events)
        self._events.clear()
        self._woken = 0
        self.given, self._taken = self._taken, {}
        return events

    def clear(self) -> None:
        """Nobody is to hear of what is here."""
        self._events.clear()

    @property
    def ends(self) -> int:
        """How many ends of workers are here."""
        return sum(isinstance(event, Exited) for event in self._events)

    @property
    def pending(self) -> bool:
        """Whether there is something here that nobody was ``woken`` for."""
        return len(self._events) > self._woken

    def woken(self) -> None:
        """Whoever waits for news has heard that there are some."""
        self._woken = len(self._events)
