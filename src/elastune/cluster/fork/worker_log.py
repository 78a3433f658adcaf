"""One worker's log file: what it printed, attempt after attempt."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from elastune.core.errors import UserError

TAIL_BYTES = 8192
TAIL_LINES = 60


class WorkerLog:
    """``folder/worker-N.log``, opened for one more attempt. Raises ``UserError`` where it cannot be written."""

    def __init__(self, folder: Path, worker: int) -> None:
        self.path = folder / f"worker-{worker}.log"
        header = f"--- worker {worker}, {datetime.now().isoformat(' ', 'seconds')}\n"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(header.encode())
                file.flush()
                self._start = file.tell()
        except OSError as error:
            rule = "the output folder must be writable"
            raise UserError(rule, f"{self.path}: {error.strerror}", "choose another folder or make room") from error

    def opened(self) -> BinaryIO:
        """The file, for appending."""
        return self.path.open("ab")

    def last_line(self) -> str:
        """The last line that this attempt printed."""
        return self.tail().rpartition("\n")[2]

    def tail(self, note: str = "") -> str:
        """The end of what this attempt printed, and ``note`` as its last line; the note is kept in the file too."""
        try:
            if note:
                with self.path.open("ab") as file:
                    file.write(f"elastune: {note}\n".encode())
            with self.path.open("rb") as file:
                end = file.seek(0, 2)
                file.seek(max(self._start, end - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            text = f"elastune: {note or 'no log'} ({self.path}: {error.strerror})"
        return "\n".join(text.rstrip("\n").split("\n")[-TAIL_LINES:])
