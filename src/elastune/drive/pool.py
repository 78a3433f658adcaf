"""Several jobs at once on one cluster: start what fits, hear from all, resize and pause them, tell what ended."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastune.cluster.base import Cluster, ElasticHandle
from elastune.core.clock import Clock, SystemClock
from elastune.core.run import RunSpec
from elastune.drive.watch import Watch
from elastune.journal.records import Record, RunFailed, RunFinished

PAUSED = ("requested", "until_epoch", "notice")  # endings with a checkpoint, from which the job can go on


@dataclass(frozen=True)
class Ended:
    """A job that is over, and how. ``worker_seconds``: the time of all its workers together."""

    key: int
    spec: RunSpec
    outcome: RunFinished | RunFailed
    seconds: float
    worker_seconds: float

    @property
    def paused_by(self) -> str | None:
        """What it ended by with a checkpoint to go on from; None where it is over."""
        stopped = self.outcome.stopped if isinstance(self.outcome, RunFinished) else None
        return stopped if stopped in PAUSED else None


@dataclass(frozen=True)
class Heard:
    """What a job said, and the time of all its workers together in the ``seconds`` that it ran until then."""

    key: int
    record: Record
    seconds: float
    worker_seconds: float


class Job:
    """One job that runs: how many workers it was told to have, and how many it had, for how long."""

    def __init__(self, watch: Watch, spec: RunSpec, now_s: float) -> None:
        self.watch = watch
        self.spec = spec
        self.wished = spec.means.workers
        self.started_s = now_s
        self.pausing = False
        self._counted = 0.0
        self._since_s = now_s

    @property
    def workers(self) -> int:
        """Workers that train together now; before they do, those that were asked for."""
        handle = self.watch.handle
        return (len(handle.members) if isinstance(handle, ElasticHandle) else 0) or self.wished

    @property
    def held(self) -> int:
        """Workers that nobody else can have: told to come, or not gone yet."""
        handle = self.watch.handle
        if not isinstance(handle, ElasticHandle):
            return self.wished
        return max(self.wished, len(handle.pids), len(handle.members))

    def worker_seconds(self, now_s: float) -> float:
        """The time of all its workers together, up to now. To be asked whenever their number may have changed."""
        self._counted += (now_s - self._since_s) * self.workers
        self._since_s = now_s
        return self._counted


class Pool:
    """Jobs by a key of the caller's, on ``capacity`` workers of ``cluster`` (None: all of them).

    A job's folder is removed once it ended well and ``spare`` does not spare it: what matters went to the journal.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        capacity: int | None = None,
        timeout_s: float | None = None,
        clock: Clock | None = None,
        spare: Callable[[int], bool] = lambda key: False,
    ) -> None:
        self.capacity = cluster.capacity if capacity is None else capacity
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._spare = spare
        self.jobs: dict[int, Job] = {}

    @property
    def free(self) -> int:
        """Workers that no job uses."""
        return self.capacity - sum(job.held for job in self.jobs.values())

    @property
    def running(self) -> int:
        """Jobs that are not over."""
        return len(self.jobs)

    def start(self, key: int, spec: RunSpec) -> None:
        """Start a job; its workers must be free."""
        watch = Watch(self._cluster.start(spec), timeout_s=self._timeout_s, clock=self._clock)
        self.jobs[key] = Job(watch, spec, self._clock.now())

    def resize(self, key: int, workers: int, why: str = "") -> None:
        """Let a job go on with so many workers, as soon as they are there."""
        job = self.jobs[key]
        if not isinstance(job.watch.handle, ElasticHandle):
            raise TypeError(f"the workers of {type(job.watch.handle).__name__} cannot change")
        job.worker_seconds(self._clock.now())
        job.wished = workers
        job.watch.handle.resize(workers, why)

    def pause(self, key: int) -> None:
        """Ask a job for a checkpoint and its end, at its next step. It is told as ended, with that outcome."""
        job = self.jobs[key]
        if not job.pausing:
            job.pausing = True
            job.watch.stop()

    def pump(self, wait_s: float) -> tuple[list[Heard], list[Ended]]:
        """Wait for news, at most ``wait_s`` and the cluster's patience: what the jobs said, and those that ended."""
        if self.jobs:
            self._cluster.wait(min(wait_s, self._cluster.patience_s))
        heard: list[Heard] = []
        ended: list[Ended] = []
        news = self._cluster.news()
        told = None if news is None else frozenset(news)
        for key, job in list(self.jobs.items()):
            if told is not None and job.watch.handle not in told:
                continue
            now_s = self._clock.now()
            ran_s, worker_s = now_s - job.started_s, job.worker_seconds(now_s)
            heard.extend(Heard(key, record, ran_s, worker_s) for record in job.watch.pump())
            if job.watch.outcome is not None:
                over = Ended(key, job.spec, job.watch.outcome, ran_s, worker_s)
                ended.append(over)
                del self.jobs[key]
                if isinstance(over.outcome, RunFinished) and over.paused_by is None and not self._spare(key):
                    remove(job.spec.out)
        return heard, ended

    def abandon(self) -> None:
        """End every job now; what they had done is not told."""
        for job in self.jobs.values():
            job.watch.handle.kill()
        while any(job.watch.outcome is None for job in self.jobs.values()):
            self._cluster.wait(0.5)
            for job in self.jobs.values():
                job.watch.pump()
        self.jobs.clear()


def remove(folder: Path) -> None:
    """Remove a job's folder, or what can be removed of it."""
    shutil.rmtree(folder, ignore_errors=True)
