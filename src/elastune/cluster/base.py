"""The contract of a cluster: start the workers of a run, hear from them, stop them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastune.cluster.run_files import LocalFiles, RunFiles
from elastune.core.cost import UNTOLD
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import RunSpec
from elastune.journal.records import Record

NOBODY = -1
"""The rank of a message that no worker sent."""


@dataclass(frozen=True)
class Message:
    """A record that a worker sent, or (``rank`` is ``NOBODY``) that tells of the run as a whole."""

    rank: int
    record: Record


@dataclass(frozen=True)
class Exited:
    """A worker process ended with exit ``code`` (negative: the signal that ended it).

    ``log`` is the tail of what it printed. Where the cluster ended it, or could not start it, the last line says why.
    """

    rank: int
    code: int
    log: str


Event = Message | Exited


def how_it_ended(code: int | None) -> str:
    """A process's exit code in words, to follow "worker 3"."""
    if code is None:
        return "ended, nobody knows how"
    if code >= 0:
        return f"exited with code {code}"
    return f"was ended by signal {-code}" + (" (out of memory?)" if code == -9 else "")


class NoRoomError(UserError):
    """There is no room for so many workers now."""


class Handle(ABC):
    """A run's workers, as their starter holds them."""

    spec: RunSpec

    @abstractmethod
    def poll(self) -> list[Event]:
        """What happened since the last call, each worker's messages before its exit. Never blocks."""

    @property
    @abstractmethod
    def alive(self) -> int:
        """Workers whose ``Exited`` has not been handed out yet; at least 1 while the run may still start some."""

    @abstractmethod
    def stop(self) -> None:
        """Ask the run to checkpoint and end at its next step boundary. Returns at once."""

    @abstractmethod
    def kill(self) -> None:
        """End every worker now. Their ``Exited`` events still come."""


@dataclass(frozen=True)
class LeftRun:
    """A run whose workers may have outlived its controller. ``kept``: what that has put into its journal, in order.

    ``begun_at``: when it was started or resumed last, and ``stop_at`` when it was asked to pause (None: it was not),
    both in seconds since the epoch, where the caller knows.
    """

    spec: RunSpec
    kept: Sequence[Record]
    begun_at: float = 0.0
    stop_at: float | None = None


class ElasticHandle(Handle):
    """A run whose workers may change. They have numbers that are never used twice; ``rank`` in its events is one.

    A worker whose end the run survives (it left, or was replaced) is told by a ``WorkerGone`` record; ``Exited`` comes
    only of those that end with the run.
    """

    @property
    @abstractmethod
    def pids(self) -> dict[int, int]:
        """Worker -> process, of the workers that run."""

    @property
    @abstractmethod
    def members(self) -> list[int]:
        """The workers that train together now, by rank; empty before the first step and after the last."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Completed steps, as last heard."""

    @abstractmethod
    def resize(self, workers: int, why: str = "") -> None:
        """Wish for so many workers, within the bounds of ``spec.elastic``. Returns at once."""

    @abstractmethod
    def reshape(self, mesh: Mesh, why: str = "") -> None:
        """Wish for workers that stand as ``mesh`` says; what the run cannot have changes nothing. Returns at once."""

    @abstractmethod
    def kill_worker(self, worker: int) -> None:
        """SIGKILL to one worker: a fault, for those who test what a run survives."""


class Cluster(ABC):
    """A place with room for ``capacity`` workers at a time."""

    files: RunFiles = LocalFiles()
    """How a controller reaches what workers have written."""
    varies: bool = False
    """Whether its capacity changes by itself, as hosts come and go: who finds no room may wait for some."""
    patience_s: float = 0.5
    """How long a ``wait`` may be at most, so that whoever waits sees a signal in time."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Workers that there is room for in all; may change by itself."""

    @property
    @abstractmethod
    def free(self) -> int:
        """Workers that could be started now. One counts until its process has ended."""

    @property
    def host_rooms(self) -> tuple[int, ...]:
        """Workers that there is room for on each host, the largest first; empty where all are on one machine."""
        return ()

    @property
    def rooms(self) -> Mapping[str, int]:
        """Workers that there is room for by the kind of their hosts, used or not: what is paid for (``core.cost``)."""
        return {UNTOLD: self.capacity}

    def held(self, handle: Handle) -> Mapping[str, int]:
        """Worker processes of a run by the kind of their hosts, those that are still starting included."""
        return {UNTOLD: len(handle.pids) if isinstance(handle, ElasticHandle) else handle.alive}

    @abstractmethod
    def start(self, spec: RunSpec) -> Handle:
        """Start ``spec.means.workers`` workers.

        Raises ``UserError`` where the request cannot be met, as ``NoRoomError`` for want of room.
        """

    def adopt(self, left: Sequence[LeftRun]) -> list[Handle | None]:
        """Go on with each of these runs whose workers have outlived the controller before this one. Before any start.

        None where nobody has, or they hold no state to go on with: nothing is left of that run then.
        """
        return [None for _ in left]

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Sleep until some handle has an event to poll, at most ``timeout_s``."""

    def news(self) -> Collection[Handle] | None:
        """The handles with events to poll; None where only asking them tells."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End everything this cluster started. Idempotent."""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
