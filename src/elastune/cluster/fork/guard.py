"""What is left to do when a fork server is killed: its workers die with it, what they have started would not.

A guard is a small process that knows the workers' process groups. It waits for the end of a pipe whose other end the
server alone holds, so for the server's death, however sudden, and then kills the groups that are left. It needs no
controller for that: both may be killed at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NoReturn

READ_BYTES = 4096


class GroupGuard:
    """The server's end. To be made before anything large is imported: the guard is a fork of this process."""

    def __init__(self) -> None:
        theirs, self._pipe = os.pipe2(os.O_CLOEXEC)
        self.process = os.fork()
        if self.process == 0:
            os.close(self._pipe)
            _watch(theirs)
        os.close(theirs)

    def protect(self, leader: int) -> None:
        """``leader`` founds a process group."""
        self._tell(leader)

    def forget(self, leader: int) -> None:
        """Its group was killed. To be said before the number can be given to another process."""
        self._tell(-leader)

    def close(self) -> None:
        """In a forked child: this end is the server's alone."""
        os.close(self._pipe)

    def _tell(self, number: int) -> None:
        with contextlib.suppress(OSError):  # somebody has killed the guard: workers end without it, too
            os.write(self._pipe, b"%d\n" % number)


def _watch(pipe: int) -> NoReturn:
    leaders: set[int] = set()
    try:
        os.setsid()
        for request in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(request, signal.SIG_IGN)
        os.closerange(0, pipe)
        os.closerange(pipe + 1, 4096)
        rest = b""
        while data := os.read(pipe, READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for number in map(int, lines):
                leaders.add(number) if number > 0 else leaders.discard(-number)
        for leader in leaders:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
    finally:
        os._exit(0)
