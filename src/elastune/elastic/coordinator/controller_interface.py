"""The interface between a coordinator and its controller: settings go in; work and workers' records come out."""

from __future__ import annotations

import math
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from elastune.core.journal.records import Record, StragglerDetected
from elastune.core.mesh_choice import MeshChoice
from elastune.elastic.coordinator.liveness import ProcessStatusOf
from elastune.elastic.coordinator.machine import End, GiveUp, Start, StopRun
from elastune.elastic.stragglers import Stall, Straggler
from elastune.elastic.wire.messages import WorkerSpec
from elastune.elastic.wire.transport import WakeupPipe

SILENCE_S = 30.0  # far beyond a heartbeat: a coordinator may be slow without being gone
BACKLOG_LIMIT_BYTES = 1 << 26  # of reports that the controller has not taken


@dataclass(frozen=True)
class WorkerBounds:
    """How many workers a run may have, and which meshes they may form.

    Attributes:
        low: The smallest number of workers that the run goes on with.
        high: The largest number of workers that the run may have.
        most_losses: This many losses in a row without progress end the run.
        meshes: The meshes that the workers may form.
    """

    low: int
    high: int
    most_losses: int = 8
    meshes: MeshChoice = field(default_factory=MeshChoice)


@dataclass(frozen=True)
class Timeouts:
    """How long coordinator and workers wait for each other, in seconds.

    Attributes:
        heartbeat_s: A worker is lost if the coordinator hears nothing from it for this long.
        silence_s: A worker ends itself if it hears nothing from its coordinator for this long. While a worker loads its
            program, it may itself be silent for this long.
        grace_s: Before a worker ends itself, it looks for the next coordinator for this long.
        collective_timeout_s: Members wait this long for a member that lives and does not join their operation.
    """

    heartbeat_s: float
    silence_s: float = SILENCE_S
    grace_s: float = 0.0
    collective_timeout_s: float = math.inf


@dataclass(frozen=True)
class ListenOptions:
    """Where workers find their coordinator, and what admits them.

    Attributes:
        host: The address to listen on; loopback unless workers run on other machines.
        port: The port; 0 chooses a free one. A coordinator that replaces another one has to use the same port.
        token: The secret of the run; "" creates a new one.
        tls: The certificate that the token names, if it names one.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True)
class WorkerLookups:
    """What the controller knows about a worker, by the worker's number. The coordinator's thread calls these functions.

    Attributes:
        spec_of: The worker's task.
        last_line: The last line of the worker's log; "" if the controller cannot see the log.
        vitals_of: The status of the worker's process; None if the controller cannot see the process.
    """

    spec_of: Callable[[int], WorkerSpec | None] = lambda worker: None
    last_line: Callable[[int], str] = lambda worker: ""
    vitals_of: ProcessStatusOf = lambda worker: None


@dataclass(frozen=True)
class RecordSent:
    """``worker`` sent ``record``, its ``nth``."""

    worker: int
    record: Record
    nth: int = 0


@dataclass(frozen=True)
class WorkerDisconnected:
    """``worker`` has ended its connection. ``code`` is the exit code of its entry point; None: it sent none."""

    worker: int
    code: int | None


@dataclass(frozen=True)
class WorkerDrained:
    """``worker``, whose end the controller reported, has no more messages: all that it ever sent was handed over."""

    worker: int


ForController = Start | End | GiveUp | StopRun | RecordSent | WorkerDisconnected | WorkerDrained | Stall


class ControllerQueue:
    """What the coordinator hands to its controller: instructions, workers' records and records of events.

    The coordinator's thread fills the queue and never waits for it; the controller's thread empties it. The coordinator
    calls ``wake`` once after many items, because a system call for each item would make the two threads wait for each
    other. ``on_room`` is called in the controller's thread when a full queue has been emptied.
    """

    def __init__(self, on_room: Callable[[], None] = lambda: None) -> None:
        self._pending: list[ForController] = []
        self._records: list[Record] = []
        self._backlog_bytes = 0
        self._on_room = on_room
        self._changing = threading.Lock()
        self._bell = WakeupPipe()

    def fileno(self) -> int:
        """A descriptor that is readable while the queue holds anything."""
        return self._bell.fileno()

    @property
    def full(self) -> bool:
        """Whether the queue holds so much that no more workers should be read: then the workers slow down."""
        return self._backlog_bytes > BACKLOG_LIMIT_BYTES

    def put(self, item: ForController, size_bytes: int = 0) -> None:
        """Append ``item``, of ``size_bytes``."""
        with self._changing:
            self._pending.append(item)
            self._backlog_bytes += size_bytes

    def keep(self, record: Record) -> None:
        """Append a record of what happened."""
        with self._changing:
            self._records.append(record)

    def wake(self) -> None:
        """Wake the controller, if the queue holds anything."""
        with self._changing:
            if self._pending or self._records:
                self._bell.ring()

    def nudge(self) -> None:
        """Wake the controller to look at something that is not in the queue."""
        self._bell.ring()

    def take(self) -> list[ForController]:
        """Remove and return all items that were ``put``, in order."""
        with self._changing:
            was_full = self.full
            taken, self._pending, self._backlog_bytes = self._pending, [], 0
            if not self._records:
                self._bell.quiet()
        if was_full:
            self._on_room()
        return taken

    def take_records(self) -> list[Record]:
        """Remove and return all records that were ``kept``, in order."""
        with self._changing:
            taken, self._records = self._records, []
            if not self._pending:
                self._bell.quiet()
            return taken

    def report(self, finding: Stall | Straggler | None) -> bool:
        """Hand over a ``finding``: a worker that keeps others waiting, or a stall.

        Returns:
            Whether the finding is a stall, which ends the run.
        """
        if isinstance(finding, Stall):
            self.put(finding)
        elif finding is not None:
            self.keep(StragglerDetected(finding.worker, finding.line))
        return isinstance(finding, Stall)

    def release(self) -> None:
        """Give the file descriptor back. Idempotent."""
        self._bell.close()
