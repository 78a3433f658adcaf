"""The processes of a run's workers, by number."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from elastune.cluster.launcher import Bootstrap, Launcher, Needs, ProcessEnded
from elastune.cluster.starting import Starting
from elastune.elastic.coordinator.liveness import Vitals
from elastune.elastic.coordinator.membership import Membership


class RunProcesses:
    """Those that ``launcher`` was told to start, for what a run ``needs``, and those that it has said to run.

    ``pids``: worker -> process, of those that run. The coordinator's thread may ask for ``last_line`` and ``vitals``.
    """

    def __init__(self, launcher: Launcher, needs: Needs) -> None:
        self._launcher = launcher
        self._needs = needs
        self._known: dict[int, Bootstrap] = {}
        self._starting = Starting(launcher)
        self.pids: dict[int, int] = {}

    @property
    def known(self) -> Mapping[int, Bootstrap]:
        """All there ever were."""
        return self._known

    def start(self, workers: Sequence[Bootstrap]) -> None:
        """Start these. Raises ``OSError`` and ``UserError``, as ``Launcher.start``."""
        self._known |= {worker.worker: worker for worker in workers}
        self._starting.begun(workers, time.monotonic())
        self._launcher.start(workers, self._needs)

    def meet(self, worker: Bootstrap) -> None:
        """``worker`` was started for a controller before this one."""
        self._known[worker.worker] = worker

    def end(self, workers: Collection[int], why: str = "") -> None:
        """Kill these; who is not known has no process."""
        self._launcher.end([self._known[worker] for worker in workers if worker in self._known], why)

    def late(self, state: Membership) -> list[ProcessEnded]:
        """Those that should be connected by now and are not, each once, as if they had ended."""
        return self._starting.late(state, time.monotonic())

    def last_line(self, worker: int) -> str:
        """The last line that ``worker`` printed, where that is known."""
        return self._launcher.last_line(self._known[worker]) if worker in self._known else ""

    def vitals(self, worker: int) -> Vitals | None:
        """What the system says of ``worker``'s process, where that is known."""
        return self._launcher.vitals(self._known[worker]) if worker in self._known else None
