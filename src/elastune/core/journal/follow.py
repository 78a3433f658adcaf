"""Read a journal while it is written: each call returns the records that are new, and no byte is read twice."""

from __future__ import annotations

import os
from pathlib import Path

from elastune.core.journal.records import Entry, decode_entry

BLOCK_BYTES = 1 << 20  # read at once: a page can show the first records of a long journal meanwhile


class JournalFollower:
    """Reads a journal that another process writes. It needs no lock, and disturbs no writer.

    Attributes:
        path: The journal.
        broken: The number of lines that were no records; they are left out.
        generation: Counts how often the file was replaced, or cut before the place that was read.

    Args:
        path: The journal; it may not exist yet.
        at_end: Begin with the records that are written from now on.

    Example:
        >>> follower = JournalFollower(out / "journal.jsonl")
        >>> while entries := follower.read_block():
        ...     for entry in entries:
        ...         table.observe(entry)
    """

    def __init__(self, path: Path, *, at_end: bool = False) -> None:
        self.path = Path(path)
        self.broken = 0
        self.generation = 0
        self._file: tuple[int, int] | None = None
        self._at = 0
        self._rest = b""  # the beginning of a line whose end is not written yet
        if at_end:
            self._skip()

    def _skip(self) -> None:
        try:
            status = self.path.stat()
        except OSError:
            return
        self._file, self._at = (status.st_dev, status.st_ino), status.st_size

    @property
    def behind(self) -> bool:
        """Whether the file has bytes that were not read."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return status.st_size != self._at or (status.st_dev, status.st_ino) != self._file

    def read_block(self) -> list[Entry]:
        """Return the next records, from ``BLOCK_BYTES`` at most; an empty list if there are none now.

        If the file was replaced or became shorter than what was read, it is read from its beginning, and ``generation``
        is higher than before. (A writer cuts off a line that a crash tore; that line was never returned.)
        """
        while self.behind:
            try:
                with self.path.open("rb") as file:
                    self._begin_again_if_replaced(file.fileno())
                    file.seek(self._at)
                    block = file.read(BLOCK_BYTES)
            except OSError:
                return []
            if not block:
                return []
            self._at += len(block)
            lines = (self._rest + block).split(b"\n")
            self._rest = lines.pop()
            if entries := [entry for line in lines if (entry := self._entry(line)) is not None]:
                return entries
        return []

    def _begin_again_if_replaced(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        identity = status.st_dev, status.st_ino
        whole = self._at - len(self._rest)
        if self._file is not None and (identity != self._file or status.st_size < whole):
            self.generation += 1
            self._at, self._rest = 0, b""
        elif status.st_size < self._at:  # a torn line was cut off
            self._at, self._rest = whole, b""
        self._file = identity

    def _entry(self, line: bytes) -> Entry | None:
        try:
            return decode_entry(line)
        except (ValueError, RecursionError):
            self.broken += 1
            return None
