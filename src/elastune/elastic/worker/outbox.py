"""What a worker sends: any thread puts in, none waits for another, and the one that listens sends what is left."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque

from elastune.elastic.protocol.transport import WakeupPipe

LIMIT_BYTES = 1 << 23


class Outbox:
    """Lines for ``connection``, which does not block, and whose other side may read slowly.

    ``put`` returns at once, even in a signal handler that interrupts another ``put``. What the connection does not take
    at once goes out by ``flush``, for which ``fileno`` is readable. A connection that is gone is for its reader to see.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines: deque[bytes] = deque()
        self._rest = memoryview(b"")
        self._sending = threading.Lock()
        self._bell = WakeupPipe()
        self.full = False
        """Whether the connection took less than it was given."""

    def begin(self, connection: socket.socket) -> None:
        """From now on lines are for ``connection``; those that the one before has not taken are forgotten."""
        with self._sending:
            self._connection, self._rest, self.full = connection, memoryview(b""), False
            self._lines.clear()

    def fileno(self) -> int:
        """Readable once there is something to ``flush``."""
        return self._bell.fileno()

    @property
    def size_bytes(self) -> int:
        """What waits here."""
        return len(self._rest) + sum(map(len, list(self._lines)))

    def put(self, line: bytes) -> None:
        """Send ``line``, after all that was put before."""
        self._lines.append(line)
        if not self.full and not self.flush():
            self._bell.ring()

    def flush(self) -> bool:
        """Send what the connection takes now; False where it does not take all."""
        while (self._lines or self._rest) and self._sending.acquire(blocking=False):
            try:
                if self.full:
                    self._bell.quiet()
                self.full = not self._send()
            finally:
                self._sending.release()
            if self.full:
                return False
        return True

    def _send(self) -> bool:
        with contextlib.suppress(IndexError):
            while True:
                if not self._rest:
                    self._rest = memoryview(self._lines.popleft())
                try:
                    self._rest = self._rest[self._connection.send(self._rest) :]
                except BlockingIOError:
                    return False
                except OSError:  # nobody reads any more
                    self._lines.clear()
                    self._rest = memoryview(b"")
        return True

    def close(self) -> None:
        """Idempotent."""
        self._bell.close()
