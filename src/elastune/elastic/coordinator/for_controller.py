"""What a coordinator has for its controller: things to do, and what workers report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastune.elastic.coordinator.standstill import Standstill
from elastune.elastic.coordinator.stragglers import Straggler
from elastune.elastic.protocol.instructions import End, GiveUp, Start, StopRun
from elastune.elastic.protocol.transport import WakeupPipe
from elastune.journal.records import Record, Straggling

BACKLOG_LIMIT_BYTES = 1 << 26  # of reports that were not taken


@dataclass(frozen=True)
class RecordSent:
    """``worker`` sent ``record``, its ``nth``."""

    worker: int
    record: Record
    nth: int = 0


@dataclass(frozen=True)
class Parted:
    """``worker`` has ended its connection: with the exit ``code`` of its entry point, or without a word (None)."""

    worker: int
    code: int | None


@dataclass(frozen=True)
class Buried:
    """The end of ``worker``, which the controller told of, is known here; all that it ever sent was handed over."""

    worker: int


ForController = Start | End | GiveUp | StopRun | RecordSent | Parted | Buried | Standstill


class ControllerQueue:
    """Filled by the coordinator's thread, which never waits here; emptied by the controller's.

    The coordinator calls ``wake`` once it has nothing more to put: thousands of events wake the controller once. Each
    call of the system in one thread would wait for the other's turn to end, else. ``on_room`` is called in the
    controller's thread when it has taken what was too much.
    """

    def __init__(self, on_room: Callable[[], None] = lambda: None) -> None:
        self._told: list[ForController] = []
        self._records: list[Record] = []
        self._backlog_bytes = 0
        self._on_room = on_room
        self._changing = threading.Lock()
        self._bell = WakeupPipe()

    def fileno(self) -> int:
        """Readable while there is anything to take."""
        return self._bell.fileno()

    @property
    def full(self) -> bool:
        """Whether so much lies here that nothing more should be heard: workers that nobody reads slow down."""
        return self._backlog_bytes > BACKLOG_LIMIT_BYTES

    def put(self, told: ForController, size_bytes: int = 0) -> None:
        """Append ``told``."""
        with self._changing:
            self._told.append(told)
            self._backlog_bytes += size_bytes

    def keep(self, record: Record) -> None:
        """Append a record of what happened."""
        with self._changing:
            self._records.append(record)

    def wake(self) -> None:
        """Have the controller look, if there is anything to take."""
        with self._changing:
            if self._told or self._records:
                self._bell.ring()

    def nudge(self) -> None:
        """There is something to look at that is not taken from here."""
        self._bell.ring()

    def take(self) -> list[ForController]:
        """All that was ``put``, in order."""
        with self._changing:
            was_full = self.full
            taken, self._told, self._backlog_bytes = self._told, [], 0
            if not self._records:
                self._bell.quiet()
        if was_full:
            self._on_room()
        return taken

    def take_records(self) -> list[Record]:
        """All that was ``kept``, in order."""
        with self._changing:
            taken, self._records = self._records, []
            if not self._told:
                self._bell.quiet()
            return taken

    def tell(self, found: Standstill | Straggler | None) -> bool:
        """Who keeps the others waiting, or why they will never come together: True for that, the end of the run."""
        if isinstance(found, Standstill):
            self.put(found)
        elif found is not None:
            self.keep(Straggling(found.worker, found.line))
        return isinstance(found, Standstill)

    def release(self) -> None:
        """Give the file descriptor back. Idempotent."""
        self._bell.close()
