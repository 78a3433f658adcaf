"""Several jobs at once on one cluster: start what fits, hear from all, resize and pause them, tell what ended."""

from __future__ import annotations

from dataclasses import dataclass

from elastune.cluster.base import Cluster, ElasticHandle, Handle
from elastune.core.clock import Clock, SystemClock
from elastune.core.run import RunSpec
from elastune.job.supervisor import JobSupervisor
from elastune.journal.records import Record, RunFailed, RunFinished

PAUSED = ("requested", "until_epoch", "notice")  # endings with a checkpoint, from which the job can go on


@dataclass(frozen=True)
class JobEvent:
    """Something that a job said, or (``outcome``) how it ended.

    ``worker_seconds``: the time of all its workers together in the ``seconds`` that it ran until then.
    """

    job: int
    spec: RunSpec
    record: Record
    seconds: float
    worker_seconds: float

    @property
    def outcome(self) -> RunFinished | RunFailed | None:
        """How the job ended; None while it runs."""
        return self.record if isinstance(self.record, RunFinished | RunFailed) else None

    @property
    def paused_by(self) -> str | None:
        """What it ended by with a checkpoint to go on from; None where it runs or is over."""
        stopped = self.record.stopped if isinstance(self.record, RunFinished) else None
        return stopped if stopped in PAUSED else None


class Job:
    """One job that runs: how many workers it was told to have, and how many it had, for how long."""

    def __init__(self, watch: JobSupervisor, spec: RunSpec, now_s: float) -> None:
        self.watch = watch
        self.spec = spec
        self.wished = self.held = spec.means.workers
        self.started_s = now_s
        self.pausing = False
        self._counted = 0.0
        self._had, self._since_s = self.wished, now_s

    @property
    def workers(self) -> int:
        """Workers that train together now; before they do, those that were asked for."""
        handle = self.watch.handle
        return (len(handle.members) if isinstance(handle, ElasticHandle) else 0) or self.wished

    def hold(self) -> int:
        """Note how many workers nobody else can have: told to come, or not gone yet. By how many more than before."""
        handle, before = self.watch.handle, self.held
        self.held = self.wished
        if isinstance(handle, ElasticHandle):
            self.held = max(self.wished, len(handle.pids), len(handle.members))
        return self.held - before

    def worker_seconds(self, now_s: float) -> float:
        """The time of all its workers together, up to now. To be asked whenever their number may have changed."""
        self._counted += (now_s - self._since_s) * self._had
        self._had, self._since_s = self.workers, now_s
        return self._counted


class Pool:
    """Jobs by a key of the caller's, on ``capacity`` workers of ``cluster`` (None: all of them)."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        capacity: int | None = None,
        timeout_s: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.capacity = cluster.capacity if capacity is None else capacity
        self.files = cluster.files
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self.jobs: dict[int, Job] = {}
        self._keys: dict[Handle, int] = {}
        self._held = 0

    @property
    def free(self) -> int:
        """Workers that no job uses, and that the cluster could start now."""
        return min(self.capacity - self._held, self._cluster.free)

    @property
    def running(self) -> int:
        """Jobs that are not over."""
        return len(self.jobs)

    def start(self, key: int, spec: RunSpec) -> None:
        """Start a job; its workers must be free."""
        watch = JobSupervisor(self._cluster.start(spec), timeout_s=self._timeout_s, clock=self._clock)
        job = self.jobs[key] = Job(watch, spec, self._clock.now())
        self._keys[watch.handle] = key
        self._held += job.held

    def resize(self, key: int, workers: int, why: str = "") -> None:
        """Let a job go on with so many workers, as soon as they are there."""
        job = self.jobs[key]
        if not isinstance(job.watch.handle, ElasticHandle):
            raise TypeError(f"the workers of {type(job.watch.handle).__name__} cannot change")
        job.worker_seconds(self._clock.now())
        job.wished = workers
        job.watch.handle.resize(workers, why)
        self._held += job.hold()

    def pause(self, key: int) -> None:
        """Ask a job for a checkpoint and its end, at its next step. It is told as ended, with that outcome."""
        job = self.jobs[key]
        if not job.pausing:
            job.pausing = True
            job.watch.stop()

    def pump(self, wait_s: float) -> list[JobEvent]:
        """Wait for news, at most ``wait_s`` and the cluster's patience: what the jobs said, then the ends."""
        if self.jobs:
            late_s = self._late_s()
            self._cluster.wait(min(wait_s, self._cluster.patience_s, late_s if late_s > 0 else wait_s))
        said: list[JobEvent] = []
        ends: list[JobEvent] = []
        for key in self._told():
            job, now_s = self.jobs[key], self._clock.now()
            ran_s, worker_s = now_s - job.started_s, job.worker_seconds(now_s)
            said.extend(JobEvent(key, job.spec, record, ran_s, worker_s) for record in job.watch.pump())
            self._held += job.hold()
            if job.watch.outcome is not None:
                ends.append(JobEvent(key, job.spec, job.watch.outcome, ran_s, worker_s))
                self._held -= job.held
                del self.jobs[key], self._keys[job.watch.handle]
        return [*said, *ends]

    def _told(self) -> list[int]:
        """The jobs that may have something to say. Who may be late is always asked."""
        news = self._cluster.news()
        if news is None or self._late_s() <= 0:
            return list(self.jobs)
        return [self._keys[handle] for handle in news if handle in self._keys]

    def _late_s(self) -> float:
        """Seconds until the job that was started first, of those that run, is late."""
        if self._timeout_s is None or not self.jobs:
            return float("inf")
        return next(iter(self.jobs.values())).started_s + self._timeout_s - self._clock.now()

    def abandon(self) -> None:
        """End every job now; what they had done is not told."""
        for job in self.jobs.values():
            job.watch.handle.kill()
        while any(job.watch.outcome is None for job in self.jobs.values()):
            self._cluster.wait(0.5)
            for job in self.jobs.values():
                job.watch.pump()
        self.jobs.clear()
        self._keys.clear()
        self._held = 0
