"""Workers that were started and have not come: whoever starts processes may say that one runs where none does."""

from __future__ import annotations

from collections.abc import Iterable

from elastune.cluster.launcher import Bootstrap, Launcher, ProcessEnded
from elastune.elastic.coordinator.membership import Membership

START_LIMIT_S = 300.0  # the first workers of a host import torch, from whatever disk it has


class Starting:
    """Those that ``launcher`` was told to start, and until when each has to be connected."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._until: dict[Bootstrap, float] = {}

    def begun(self, workers: Iterable[Bootstrap], now: float) -> None:
        """These were started ``now``."""
        self._until.update(dict.fromkeys(workers, now + START_LIMIT_S))

    def late(self, state: Membership, now: float) -> list[ProcessEnded]:
        """Those that should be connected ``now`` and are not, each once, as if they had ended."""
        for worker in list(self._until):
            found = state.find(worker.worker)
            if found is None or found.phase != "starting":
                del self._until[worker]
        late = [worker for worker, until in self._until.items() if now >= until]
        for worker in late:
            del self._until[worker]
        return [ProcessEnded(worker, None, why=self._told(worker)) for worker in late]

    def _told(self, worker: Bootstrap) -> str:
        host = self._launcher.host(worker)
        where = f"host {host}" if host else "this machine"
        return f"{where} says that worker {worker.worker} runs, but it has not come within {START_LIMIT_S:g} s"
