"""An agent's part in moving files: where workers leave theirs, and whose end is told only once those have arrived.

A worker that has ended well may have written its run's last checkpoint: whoever hears of its end goes on from that.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from elastune.cluster.launcher import Bootstrap, ProcessEnded, ProcessEvent
from elastune.cluster.transfer.mover import Mover
from elastune.elastic.protocol.handshake import SALT_DIGITS
from elastune.elastic.worker.last_resort import ABANDONED_CODE

WELL = (0, ABANDONED_CODE)  # how a worker ends that has written what it had to
LOOK_S = 0.05
STALLED_S = 30.0  # nothing has been moved for so long: nobody waits any more


def run_of(worker: Bootstrap) -> str:
    """The run of ``worker``, by the salt of its token."""
    return worker.token[:SALT_DIGITS]


class HeldEnds:
    """Of the workers of one agent. ``folder``: where their files may lie; nothing is made there before it is needed.

    ``tell``: is called with a line that whoever looks after this machine should see.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self._folder, self._tell = folder, tell
        self._mover: Mover | None = None
        self._used = False
        self._held: list[tuple[float, ProcessEnded]] = []
        self._closing = False

    def use(self, host: str, port: int, token: str) -> None:
        """The controller takes files at this ``port``; 0: its workers write into their runs' folders."""
        self._used = port > 0
        if not self._used:
            return
        if self._mover is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._mover = Mover(Path(tempfile.mkdtemp(prefix="files-", dir=self._folder)), self._tell)
        self._mover.use(f"{host}:{port}", token)

    def spool_of(self, run: str) -> str:
        """The folder by which new workers of ``run`` pass files on; "": they write into the run's own."""
        return str(self._mover.spool_of(run)) if self._used and self._mover is not None else ""

    def begin(self, run: str) -> None:
        """Before a worker of ``run`` begins here. Raises ``OSError``."""
        if self._used and self._mover is not None:
            self._mover.begin(run)

    def leave(self, run: str) -> None:
        """No worker of ``run`` is left here."""
        if self._mover is not None:
            self._mover.leave(run)

    @property
    def look_s(self) -> float:
        """After how long ``released`` is to be asked."""
        return LOOK_S if self._held else math.inf

    def holds(self, event: ProcessEvent) -> bool:
        """Whether ``event`` is an end that is not to be told yet."""
        if not isinstance(event, ProcessEnded) or event.code not in WELL or not self._waits(event, time.monotonic()):
            return False
        self._held.append((time.monotonic(), event))
        return True

    def released(self) -> list[ProcessEnded]:
        """Ends that are to be told now."""
        due = [event for since, event in self._held if not self._waits(event, since)]
        self._held = [(since, event) for since, event in self._held if event not in due]
        return due

    def given_up(self) -> list[ProcessEnded]:
        """All ends that were not told; none is held from now on."""
        self._closing = True
        held, self._held = self._held, []
        return [event for _, event in held]

    def close(self) -> None:
        """Move no more. Idempotent."""
        if self._mover is not None:
            self._mover.close()

    def _waits(self, end: ProcessEnded, since: float) -> bool:
        if self._mover is None or self._closing or not self._mover.pending(run_of(end.bootstrap)):
            return False
        return time.monotonic() < max(since, self._mover.moved_at) + STALLED_S
