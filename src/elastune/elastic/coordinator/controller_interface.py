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

# [from controller] What a coordinator gets from its controller when it begins.

SILENCE_S = 30.0  # far beyond a heartbeat: a coordinator may be slow without being gone


@dataclass(frozen=True)
class WorkerBounds:
    """How many workers there may be, and how they may stand.

    Attributes:
        low: The fewest that the run goes on with.
        high: The most that it may have.
        most_losses: So many in a row without progress end the run.
        meshes: How they may stand.
    """

    low: int
    high: int
    most_losses: int = 8
    meshes: MeshChoice = field(default_factory=MeshChoice)


@dataclass(frozen=True)
class Timeouts:
    """How long the sides wait for each other, in seconds.

    Attributes:
        heartbeat_s: A worker that is not heard for so long is lost.
        silence_s: So long a worker bears to hear nothing from its coordinator before it ends itself, and may itself say
            nothing while it loads its program.
        grace_s: So long it looks for the next coordinator first.
        collective_timeout_s: So long members wait for one that lives and does not come.
    """

    heartbeat_s: float
    silence_s: float = SILENCE_S
    grace_s: float = 0.0
    collective_timeout_s: float = math.inf


@dataclass(frozen=True)
class ListenOptions:
    """Where workers find their coordinator, and what lets them in.

    Attributes:
        host: The address to listen on; loopback unless the workers are elsewhere.
        port: Where workers look for the coordinator after another one; 0: any.
        token: The secret; "": a new one.
        tls: The certificate that the token names, if it does.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True)
class WorkerLookups:
    """What the controller can tell of a worker, by its number. The coordinator's thread asks.

    Attributes:
        spec_of: What it is to do.
        last_line: The last line of its log; "" where that is not seen.
        vitals_of: What the system says of its process; None where that is not seen.
    """

    spec_of: Callable[[int], WorkerSpec | None] = lambda worker: None
    last_line: Callable[[int], str] = lambda worker: ""
    vitals_of: ProcessStatusOf = lambda worker: None


# [for controller] What a coordinator has for its controller: things to do, and what workers report.

BACKLOG_LIMIT_BYTES = 1 << 26  # of reports that were not taken


@dataclass(frozen=True)
class RecordSent:
    """``worker`` sent ``record``, its ``nth``."""

    worker: int
    record: Record
    nth: int = 0


@dataclass(frozen=True)
class WorkerDisconnected:
    """``worker`` has ended its connection: with the exit ``code`` of its entry point, or without a word (None)."""

    worker: int
    code: int | None


@dataclass(frozen=True)
class WorkerDrained:
    """The end of ``worker``, which the controller told of, is known here; all that it ever sent was handed over."""

    worker: int


ForController = Start | End | GiveUp | StopRun | RecordSent | WorkerDisconnected | WorkerDrained | Stall


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

    def tell(self, found: Stall | Straggler | None) -> bool:
        """Who keeps the others waiting, or why they will never come together: True for that, the end of the run."""
        if isinstance(found, Stall):
            self.put(found)
        elif found is not None:
            self.keep(StragglerDetected(found.worker, found.line))
        return isinstance(found, Stall)

    def release(self) -> None:
        """Give the file descriptor back. Idempotent."""
        self._bell.close()
