"""The contract of a cluster: start the workers of a run, read their events, stop them, and reach their files.

A controller reads and removes files of workers by ``RunFiles``. Workers write checkpoints into the folder of their run,
which the controller sees if both share a file system. Otherwise agents copy the files into the folder
(``runtime.agents.transfer_client``), or a cluster has its own ``RunFiles``.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from elastune.core.cost import UNKNOWN
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import RunSpec

if TYPE_CHECKING:
    from elastune.core.journal.records import Record
    from elastune.train.data.sample_log import SampleSpans


class RunFiles(Protocol):
    """What a controller does with the files of a run. ``run``: its output folder, into which no worker writes now."""

    def checkpoints(self, run: Path) -> list[int]:
        """The steps of the run's complete checkpoints, oldest first."""
        ...

    def spans(self, run: Path, step: int) -> SampleSpans:
        """The samples that the run had used at the checkpoint of ``step``; empty if unknown."""
        ...

    def back_to_epoch(self, run: Path) -> None:
        """Let the run go on from its newest checkpoint at the end of an epoch; without one, from the newest."""
        ...

    def damaged(self, run: Path) -> dict[int, str]:
        """The steps of the newest checkpoints that are damaged, with the reasons, up to the first good one."""
        ...

    def set_aside(self, run: Path, steps: Iterable[int]) -> None:
        """Let the run not go on from the checkpoints of ``steps``. They stay under other names."""
        ...

    def size_bytes(self, run: Path) -> int:
        """The size of the run's files."""
        ...

    def seal(self, run: Path, step: int) -> str:
        """The SHA-256 of the whole checkpoint of ``step``; "" if there is none."""
        ...

    def predictions(self, run: Path) -> dict[str, str]:
        """The SHA-256 of each file that ``session.predictions`` has written, by name."""
        ...

    def remove(self, run: Path) -> None:
        """Remove the folder as far as possible. At whatever point this stops, no checkpoint in it seems complete."""
        ...


class LocalFiles:
    """The files of a run that this process and the workers share."""

    # Checkpoints are imported when they are needed, because they need torch; other uses of a cluster do not.

    def checkpoints(self, run: Path) -> list[int]:
        """See ``RunFiles``."""
        from elastune.train.checkpoints.checkpoint import complete, step_of

        return [step_of(path) for path in complete(run / "checkpoints")]

    def spans(self, run: Path, step: int) -> SampleSpans:
        """See ``RunFiles``."""
        from elastune.train.checkpoints.checkpoint import of_step, spans

        return spans(of_step(run / "checkpoints", step))

    def back_to_epoch(self, run: Path) -> None:
        """See ``RunFiles``."""
        from elastune.train.checkpoints.checkpoint import back_to_epoch

        back_to_epoch(run / "checkpoints")

    def damaged(self, run: Path) -> dict[int, str]:
        """See ``RunFiles``."""
        from elastune.train.checkpoints.checkpoint import damaged

        return damaged(run / "checkpoints")

    def set_aside(self, run: Path, steps: Iterable[int]) -> None:
        """See ``RunFiles``."""
        from elastune.train.checkpoints.checkpoint import set_aside

        set_aside(run / "checkpoints", steps)

    def size_bytes(self, run: Path) -> int:
        """See ``RunFiles``."""
        return sum(path.lstat().st_size for path in run.rglob("*") if path.is_file() and not path.is_symlink())

    def seal(self, run: Path, step: int) -> str:
        """See ``RunFiles``."""
        from elastune.train.checkpoints.checkpoint import of_step, seal_of

        return seal_of(of_step(run / "checkpoints", step))

    def predictions(self, run: Path) -> dict[str, str]:
        """See ``RunFiles``."""
        from elastune.train.predictions import kept_in

        return kept_in(run)

    def remove(self, run: Path) -> None:
        """See ``RunFiles``."""
        # Renamed first: if this process is killed meanwhile, the next controller must not take the rest for a trial.
        with suppress(OSError):
            (run / "checkpoints").rename(run / "checkpoints.gone")
        shutil.rmtree(run, ignore_errors=True)


NOBODY = -1
"""The rank of a message that no worker has sent."""


@dataclass(frozen=True)
class Message:
    """A record from a worker or, where ``rank`` is ``NOBODY``, about the run as a whole."""

    rank: int
    record: Record


@dataclass(frozen=True)
class Exited:
    """A worker process ended.

    Attributes:
        code: Its exit code; negative: the signal that ended it.
        log: The end of its output. If the cluster ended it, or could not start it, the last line says why.
    """

    rank: int
    code: int
    log: str


Event = Message | Exited
_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "out of memory?",
    signal.SIGSEGV: "a segmentation fault",
    signal.SIGBUS: "a bus error",
    signal.SIGABRT: "an abort",
    signal.SIGILL: "an illegal instruction",
    signal.SIGFPE: "an arithmetic error",
}
# What faulthandler writes into a worker's log.
_CRASHED = re.compile(r"^(?:Current thread|Stack) .*\(most recent call first\):\n((?:  File .*\n?)+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "([^"]+)", line ([0-9]+) in ', re.MULTILINE)
_LIBRARIES = re.compile(r"/lib(?:64)?/python[0-9.]+/|/site-packages/|^<frozen ")


def how_it_ended(code: int | None, log: str = "") -> str:
    """Return a process's exit code in words, to follow "worker 3".

    Args:
        code: The exit code; negative: the signal that ended it; None: unknown.
        log: The end of its log. If the process has crashed, the log has the line of the program.
    """
    if code is None:
        return "ended for an unknown reason"
    if code >= 0:
        return f"exited with code {code}"
    cause = _SIGNALS.get(-code)
    line = place_of_crash(log) if -code != signal.SIGKILL else ""
    shown = f" ({cause}{f' at {line}' if line else ''})" if cause else ""
    return f"was ended by signal {-code}{shown}"


def place_of_crash(log: str) -> str:
    """Return the line outside of libraries at which a process has crashed, as "train.py:13"; "": unknown."""
    crashes = _CRASHED.findall(log)
    for path, line in _FRAME.findall(crashes[-1]) if crashes else ():
        if not _LIBRARIES.search(path):
            return f"{os.path.basename(path)}:{line}"
    return ""


class NoRoomError(UserError):
    """The cluster has no room for so many workers now."""


class Handle(ABC):
    """The running workers of a run, for the code that started them: poll their events, stop them, kill them."""

    spec: RunSpec

    @abstractmethod
    def poll(self) -> list[Event]:
        """Return the events since the last call, each worker's messages before its exit. Never blocks."""

    @property
    @abstractmethod
    def alive(self) -> int:
        """The number of workers whose ``Exited`` was not returned so far.

        It is at least 1 while the run may still start some.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ask the run to checkpoint and end at its next step boundary. Returns at once."""

    @abstractmethod
    def kill(self) -> None:
        """End every worker now. Their ``Exited`` events still come."""


@dataclass(frozen=True)
class SurvivingRun:
    """A run whose workers may have outlived its controller.

    Attributes:
        kept: The records in the controller's journal, in order.
        last_start_at: When the run was started or resumed last, in seconds since 1970; 0: unknown.
        stop_at: When the controller asked it to pause, in seconds since 1970; None: it did not.
    """

    spec: RunSpec
    kept: Sequence[Record]
    last_start_at: float = 0.0
    stop_at: float | None = None


class ElasticHandle(Handle):
    """The running workers of a run whose number may change.

    ``rank`` in its events is a worker's number, which is never used twice.

    A worker whose end the run survives (it left, or was replaced) gives a ``WorkerGone`` record. ``Exited`` comes only
    from workers that end with the run.
    """

    @property
    @abstractmethod
    def pids(self) -> dict[int, int]:
        """The process of each running worker, by the worker's number."""

    @property
    @abstractmethod
    def members(self) -> list[int]:
        """The workers that train together now, by rank; empty before the first step and after the last."""

    @property
    @abstractmethod
    def step(self) -> int:
        """The number of completed steps, according to the last message."""

    @abstractmethod
    def resize(self, workers: int, why: str = "") -> None:
        """Ask for so many workers, within the bounds of ``spec.elastic``. Returns at once."""

    @abstractmethod
    def reshape(self, mesh: Mesh, why: str = "") -> None:
        """Ask for another mesh; a mesh that the run cannot have changes nothing. Returns at once."""

    @abstractmethod
    def kill_worker(self, worker: int) -> None:
        """Send SIGKILL to one worker: a fault, for tests of what a run survives."""

    @abstractmethod
    def corrupt(self, worker: int, what: str, *, once: bool, seed: int) -> None:
        """Ask one worker for a silent error (``train.proof.corruption``): a fault, for tests of what a run survives."""


class Cluster(ABC):
    """Starts the workers of runs, as far as it has room. Each kind of cluster has a subclass.

    Example:
        >>> with LocalCluster(capacity=2) as cluster:
        ...     handle = cluster.start(spec)
    """

    files: RunFiles = LocalFiles()
    """How a controller reaches the files of workers."""
    varies: bool = False
    """Whether its capacity changes by itself, as hosts come and go: a caller without room may wait."""
    patience_s: float = 0.5
    """The longest ``wait``, so that the caller sees a signal in time."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The number of workers that it has room for in all; it may change by itself."""

    @property
    @abstractmethod
    def free(self) -> int:
        """The number of workers that it could start now. A worker takes its room until its process has ended."""

    @property
    def host_rooms(self) -> tuple[int, ...]:
        """The number of workers that each host has room for, the largest first; empty if all are on one machine."""
        return ()

    @property
    def rooms(self) -> Mapping[str, int]:
        """The number of workers that it has room for, by the kind of host.

        It counts used and free room, because both are paid for (``core.cost``).
        """
        return {UNKNOWN: self.capacity}

    def held(self, handle: Handle) -> Mapping[str, int]:
        """Return the worker processes of a run by the kind of host, including processes that still start."""
        return {UNKNOWN: len(handle.pids) if isinstance(handle, ElasticHandle) else handle.alive}

    @abstractmethod
    def start(self, spec: RunSpec) -> Handle:
        """Start the workers of ``spec.execution``.

        Raises:
            UserError: If that is not possible; ``NoRoomError`` if there is no room.
        """

    def adopt(self, left: Sequence[SurvivingRun]) -> list[Handle | None]:
        """Take over the runs whose workers have outlived the earlier controller. Call it before any start.

        Returns:
            A handle for each run; None if no worker has outlived it, or the workers hold no state to go on with. No
            worker of such a run is left.
        """
        return [None for _ in left]

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Sleep until a handle has an event to poll, at most ``timeout_s`` seconds."""

    def news(self) -> Collection[Handle] | None:
        """Return the handles with events to poll; None if only polling shows that."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End everything that this cluster has started. Idempotent."""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
