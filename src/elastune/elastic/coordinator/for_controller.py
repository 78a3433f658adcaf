"""What a coordinator has for its controller: things to do, and what workers report."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from elastune.elastic.protocol.instructions import End, GiveUp, Start, StopRun
from elastune.elastic.protocol.transport import WakeupPipe
from elastune.journal.records import Record

BACKLOG_LIMIT_BYTES = 1 << 26  # of reports that were not taken


@dataclass(frozen=True)
class RecordSent:
    """``worker`` sent ``record``."""

    worker: int
    record: Record


@dataclass(frozen=True)
class Parted:
    """``worker`` has ended its connection: with the exit ``code`` of its entry point, or without a word (None)."""

    worker: int
    code: int | None


@dataclass(frozen=True)
class Buried:
    """The end of ``worker``, which the controller told of, is known here; all that it ever sent was handed over."""

    worker: int


ForController = Start | End | GiveUp | StopRun | RecordSent | Parted | Buried


class ControllerQueue:
    """Filled by the coordinator's thread, emptied by the controller's."""

    def __init__(self) -> None:
        self._told: list[ForController] = []
        self._records: list[Record] = []
        self._backlog_bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._bell = WakeupPipe()

    def fileno(self) -> int:
        """Readable while there is anything to take."""
        return self._bell.fileno()

    def put(self, told: ForController, size_bytes: int = 0) -> None:
        """Append ``told``. Waits while too much lies here: a coordinator that reads no more slows its workers down."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._backlog_bytes <= BACKLOG_LIMIT_BYTES)
            self._told.append(told)
            self._backlog_bytes += size_bytes
            self._bell.ring()

    def keep(self, record: Record) -> None:
        """Append a record of what happened."""
        with self._changed:
            self._records.append(record)
            self._bell.ring()

    def take(self) -> list[ForController]:
        """All that was ``put``, in order."""
        with self._changed:
            taken, self._told, self._backlog_bytes = self._told, [], 0
            self._changed.notify_all()
            if not self._records:
                self._bell.quiet()
            return taken

    def take_records(self) -> list[Record]:
        """All that was ``kept``, in order."""
        with self._changed:
            taken, self._records = self._records, []
            if not self._told:
                self._bell.quiet()
            return taken

    def close(self) -> None:
        """Let nobody wait any more. What is here can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def release(self) -> None:
        """Give the file descriptor back. Idempotent."""
        self._bell.close()
