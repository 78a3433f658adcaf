"""The contract of a cluster: start the workers of a run, hear from them, stop them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from elastune.core.run import RunSpec
from elastune.journal.records import Record


@dataclass(frozen=True)
class Message:
    """A record that a worker sent."""

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


class Handle(ABC):
    """A run's workers, as their starter holds them."""

    spec: RunSpec

    @abstractmethod
    def poll(self) -> list[Event]:
        """What happened since the last call, each worker's messages before its exit. Never blocks."""

    @property
    @abstractmethod
    def alive(self) -> int:
        """Workers whose ``Exited`` has not been handed out yet."""

    @abstractmethod
    def stop(self) -> None:
        """Ask the run to checkpoint and end at its next step boundary. Returns at once."""

    @abstractmethod
    def kill(self) -> None:
        """End every worker now. Their ``Exited`` events still come."""


class Cluster(ABC):
    """A place with room for ``capacity`` workers at a time."""

    capacity: int

    @abstractmethod
    def start(self, spec: RunSpec) -> Handle:
        """Start ``spec.means.workers`` workers. Raises ``UserError`` where the request cannot be met."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Sleep until some handle has an event to poll, at most ``timeout_s``."""

    @abstractmethod
    def close(self) -> None:
        """End everything this cluster started. Idempotent."""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
