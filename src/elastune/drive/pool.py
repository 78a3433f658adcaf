"""Several jobs at once on one cluster: start what fits, hear from all, tell what ended."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from elastune.cluster.base import Cluster
from elastune.core.clock import Clock, SystemClock
from elastune.core.run import RunSpec
from elastune.drive.watch import Watch
from elastune.journal.records import Record, RunFailed, RunFinished


@dataclass(frozen=True)
class Ended:
    """A job that is over, and how."""

    key: int
    spec: RunSpec
    outcome: RunFinished | RunFailed
    seconds: float


class Pool:
    """Jobs by a key of the caller's, on ``capacity`` workers of ``cluster`` (None: all of them).

    A job's folder is removed once it ended well: what matters went to the journal.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        capacity: int | None = None,
        timeout_s: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._cluster = cluster
        self._capacity = cluster.capacity if capacity is None else capacity
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._running: dict[int, tuple[Watch, RunSpec, float]] = {}

    @property
    def free(self) -> int:
        """Workers that no job uses."""
        return self._capacity - sum(spec.means.workers for _, spec, _ in self._running.values())

    @property
    def running(self) -> int:
        """Jobs that are not over."""
        return len(self._running)

    def start(self, key: int, spec: RunSpec) -> None:
        """Start a job; its workers must be free."""
        watch = Watch(self._cluster.start(spec), timeout_s=self._timeout_s, clock=self._clock)
        self._running[key] = (watch, spec, self._clock.now())

    def pump(self, wait_s: float) -> tuple[list[tuple[int, Record]], list[Ended]]:
        """Wait for news, at most ``wait_s``: (key, record) pairs, and the jobs that ended."""
        if self._running:
            self._cluster.wait(wait_s)
        records: list[tuple[int, Record]] = []
        ended: list[Ended] = []
        for key, (watch, spec, started) in list(self._running.items()):
            records.extend((key, record) for record in watch.pump())
            if watch.outcome is not None:
                ended.append(Ended(key, spec, watch.outcome, self._clock.now() - started))
                del self._running[key]
                if isinstance(watch.outcome, RunFinished):
                    shutil.rmtree(spec.out, ignore_errors=True)
        return records, ended

    def abandon(self) -> None:
        """End every job now; what they had done is not told."""
        for watch, _, _ in self._running.values():
            watch.handle.kill()
        while any(watch.outcome is None for watch, _, _ in self._running.values()):
            self._cluster.wait(0.5)
            for watch, _, _ in self._running.values():
                watch.pump()
        self._running.clear()
