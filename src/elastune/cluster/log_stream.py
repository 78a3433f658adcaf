"""What a worker prints goes to a log on its host. Where the disk is full there, it is left out: the worker trains."""

from __future__ import annotations

import errno
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LogFile(io.FileIO):
    """The file of ``stream``: it takes whatever there is room for, and says so of the rest, too."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(stream.fileno(), "wb", closefd=False)
        self._stream = stream  # or it would close the file

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return memoryview(data).nbytes


def log_stream(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """What is to be printed to in place of ``stream``, to the same file: line by line, since a log is read while it
    grows, and in whatever locale."""
    stream.flush()
    file = io.BufferedWriter(LogFile(stream))
    return io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=True)
