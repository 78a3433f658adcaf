"""Several jobs at once on one cluster: start them, read their events, resize and pause them, meter their cost.

Hosts are paid for whether they are used or not, at the current price of their kind. A job pays for each of its workers
from the start of the process to its end. Unused room is shared among the jobs that have workers at that time, in
proportion to their workers. While no job has workers, the cost is ``idle``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elastune.core.clock import Clock, SystemClock
from elastune.core.cost import Paid, Prices
from elastune.core.journal.records import Record, RunFailed, RunFinished
from elastune.core.run import RunSpec
from elastune.runtime.clusters.base import Cluster, ElasticHandle, Handle, SurvivingRun
from elastune.runtime.job.run import JobSupervisor

Workers = Mapping[str, int]
"""Numbers of workers, by the kind of host."""


class MoneyMeter:
    """Counts the cost of each job of a pool.

    Args:
        prices: The prices of workers, by kind of host and over time.
        offset_s: The difference between the times of the prices and those of the caller's clock.

    Attributes:
        costs: The cost of each job so far, in units of the prices.
        idle: The cost of the time in which no job had a worker.
    """

    def __init__(self, prices: Prices, offset_s: float = 0.0) -> None:
        self.costs: defaultdict[int, float] = defaultdict(float)
        self.idle = 0.0
        self._prices, self._offset_s = prices, offset_s
        self._at: float | None = None
        self._room: Workers = {}
        self._held: Mapping[int, Workers] = {}

    def look(self, now_s: float, room: Workers, held: Mapping[int, Workers]) -> None:
        """Count the time since the last call, in which room and workers were those of that call.

        Args:
            now_s: The time.
            room: The room of all hosts from now on.
            held: The workers of each job from now on.

        Raises:
            UserError: For a kind of host without a price.
        """
        if self._at is not None and now_s > self._at:
            self._count(self._at + self._offset_s, now_s + self._offset_s)
        self._at, self._room, self._held = now_s, dict(room), dict(held)

    def _count(self, begin_s: float, end_s: float) -> None:
        used: Counter[str] = Counter()
        for workers in self._held.values():
            used.update(workers)
        kinds = {*self._room, *used}
        each = {kind: self._prices.cost(Paid(kind, 1, begin_s, end_s)) for kind in kinds}
        unused = sum(each[kind] * max(0, self._room.get(kind, 0) - used[kind]) for kind in kinds)
        whole = used.total()
        if not whole:
            self.idle += unused
            return
        for job, workers in self._held.items():
            price = sum(each[kind] * n for kind, n in workers.items())
            self.costs[job] += price + unused * sum(workers.values()) / whole


PAUSED = ("requested", "until_epoch", "notice")  # ends with a checkpoint, from which the job can go on


@dataclass(frozen=True)
class JobEvent:
    """A record of a job, or how the job ended (``outcome``).

    Attributes:
        job: The key of the job.
        spec: Its run.
        record: The record.
        seconds: How long the job had run by then.
        worker_seconds: The time of all its workers together by then.
        lost: The job had no workers left, could not start, or was asked to end. It can go on from its newest
            checkpoint.
        cost: The cost of all jobs of this key so far, in a pool with a meter.
    """

    job: int
    spec: RunSpec
    record: Record
    seconds: float
    worker_seconds: float
    lost: bool = False
    cost: float | None = None

    @property
    def outcome(self) -> RunFinished | RunFailed | None:
        """How the job ended; None while it runs."""
        return self.record if isinstance(self.record, RunFinished | RunFailed) else None

    @property
    def paused_by(self) -> str | None:
        """Why the job paused, with a checkpoint to go on from; None if it still runs or is over."""
        if self.lost:
            return "lost"
        stopped = self.record.stopped if isinstance(self.record, RunFinished) else None
        return stopped if stopped in PAUSED else None


@dataclass(frozen=True)
class SurvivingJob:
    """A job that an earlier controller started.

    Attributes:
        run: Its run.
        worker_seconds: The time of all its workers together by now; None: it still has the workers that it began with.
    """

    run: SurvivingRun
    worker_seconds: float | None = None


class Job:
    """A running job: how many workers it should have, how many it has, and the time of its workers so far.

    Args:
        watch: Supervises it.
        spec: Its run.
        started_s: When it started.
        since_s: Up to when its workers' time is counted.
        worker_seconds: The time of all its workers together until ``since_s``.
    """

    def __init__(
        self, watch: JobSupervisor, spec: RunSpec, started_s: float, since_s: float, worker_seconds: float = 0.0
    ) -> None:
        self.watch = watch
        self.spec = spec
        self.requested = self.held = spec.execution.workers
        self.started_s = started_s
        self.pausing = False
        self.given_up = False
        self._had_members = False
        self._counted, self._idle_s = worker_seconds, 0.0
        self._had, self._since_s = self.requested, since_s

    @property
    def workers(self) -> int:
        """The number of workers that train together now; before the first step, the requested number."""
        handle = self.watch.handle
        if not isinstance(handle, ElasticHandle):
            return self.requested
        return len(handle.members) or (len(handle.pids) if self._had_members else self.requested)

    @property
    def stranded(self) -> bool:
        """Whether the job has lost all workers and waits for room."""
        handle = self.watch.handle
        return self.workers == 0 and isinstance(handle, ElasticHandle) and not handle.pids

    def hold(self) -> int:
        """Count the workers that no other job can have: requested, or not ended yet. Return the increase."""
        handle, before = self.watch.handle, self.held
        self.held = self.requested
        if isinstance(handle, ElasticHandle):
            self._had_members = self._had_members or bool(handle.members)
            self.held = max(self.requested, len(handle.pids), len(handle.members))
        return self.held - before

    def seconds(self, now_s: float) -> float:
        """How long the job has run by now, without the time in which it had no worker."""
        return now_s - self.started_s - self._idle_s

    def worker_seconds(self, now_s: float) -> float:
        """The time of all its workers together, up to now. Call it whenever their number may have changed.

        More calls while their number stays the same do not change a bit of the result.
        """
        spent_s = (now_s - self._since_s) * self._had
        if self.workers != self._had or self._had == 0:
            self._counted += spent_s
            self._idle_s += (now_s - self._since_s) * (self._had == 0)
            self._had, self._since_s = self.workers, now_s
            return self._counted
        return self._counted + spent_s


class Pool:
    """Runs several jobs at once on one cluster. The caller gives each job a key.

    Args:
        cluster: The cluster.
        most: The most workers that all jobs may have together; None: all workers of the cluster.
        timeout_s: The longest time of a job.
        clock: The clock.
        meter: Counts the cost of the jobs.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        most: int | None = None,
        timeout_s: float | None = None,
        clock: Clock | None = None,
        meter: MoneyMeter | None = None,
    ) -> None:
        self._most = self._begun_with = most
        self._meter = meter
        self.files = cluster.files
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self.jobs: dict[int, Job] = {}
        self._keys: dict[Handle, int] = {}
        self._held = 0

    @property
    def capacity(self) -> int:
        """The number of workers that its jobs may have together. It changes if the cluster varies."""
        return self._cluster.capacity if self._most is None else min(self._most, self._cluster.capacity)

    @property
    def room(self) -> int:
        """The number of workers that the cluster has, whatever the limit of the jobs is."""
        return self._cluster.capacity

    def limit(self, most: int | None) -> None:
        """Let the jobs have ``most`` workers together from now on; None: as many as at the beginning.

        Jobs keep the workers that they have beyond it.
        """
        self._most = self._begun_with if most is None else most

    @property
    def varies(self) -> bool:
        """Whether the room may grow by itself."""
        return self._cluster.varies

    def takes(self, workers: int) -> bool:
        """Whether to start a job of so many workers, more than are ``free``, once no other job runs."""
        return not self.varies or self._cluster.free >= workers

    @property
    def free(self) -> int:
        """The number of workers that no job uses and that the cluster could start now."""
        return min(self.capacity - self._held, self._cluster.free)

    @property
    def running(self) -> int:
        """The number of jobs that are not over."""
        return len(self.jobs)

    def start(self, key: int, spec: RunSpec) -> None:
        """Start a job. Raises ``UserError``; ``NoRoomError`` if the room for its workers is gone."""
        now_s = self._clock.now()
        self._follow(key, self._cluster.start(spec), spec, now_s, now_s)

    def adopt(self, left: Mapping[int, SurvivingJob]) -> Collection[int]:
        """Take over the jobs whose workers have outlived the earlier controller. Call it before ``start``.

        Returns:
            The keys of these jobs.
        """
        handles = self._cluster.adopt([job.run for job in left.values()])
        for (key, survivor), handle in zip(left.items(), handles, strict=True):
            if handle is not None:
                now_s = self._clock.now()
                started_s = survivor.run.last_start_at - (self._clock.wall() - now_s)
                since_s = started_s if survivor.worker_seconds is None else now_s
                self._follow(key, handle, survivor.run.spec, started_s, since_s, survivor.worker_seconds or 0.0)
                job = self.jobs[key]
                if isinstance(handle, ElasticHandle) and survivor.run.spec.elastic.high is not None:
                    job.requested = len(handle.members) or job.requested  # an earlier request is forgotten
                self._held += job.hold()
        return list(self.jobs)

    def _follow(
        self, key: int, handle: Handle, spec: RunSpec, started_s: float, since_s: float, worker_seconds: float = 0.0
    ) -> None:
        ran_s = self._clock.now() - started_s
        watch = JobSupervisor(handle, timeout_s=self._timeout_s, clock=self._clock, ran_s=ran_s)
        job = self.jobs[key] = Job(watch, spec, started_s, since_s, worker_seconds)
        self._keys[watch.handle] = key
        self._held += job.held
        self._count()

    def resize(self, key: int, workers: int, why: str = "") -> None:
        """Let a job go on with so many workers, as soon as they are ready."""
        job = self.jobs[key]
        if not isinstance(job.watch.handle, ElasticHandle):
            raise TypeError(f"the workers of {type(job.watch.handle).__name__} cannot change")
        job.worker_seconds(self._clock.now())
        job.requested = workers
        job.watch.handle.resize(workers, why)
        self._held += job.hold()

    def pause(self, key: int) -> None:
        """Ask a job to write a checkpoint and end at its next step; ``pump`` then returns that end.

        A job without workers ends at once.
        """
        job = self.jobs[key]
        if not job.given_up and job.stranded:
            job.given_up = True
            job.watch.end("it had lost all its workers, and there was no room")
        if not job.pausing:
            job.pausing = True
            job.watch.stop()

    def pump(self, wait_s: float) -> list[JobEvent]:
        """Wait for events, at most ``wait_s`` and the cluster's patience. Return the records of jobs, then the ends."""
        if self.jobs or self.varies:
            late_s = self._late_s()
            self._cluster.wait(min(wait_s, self._cluster.patience_s, late_s if late_s > 0 else wait_s))
        self._count()
        events: list[JobEvent] = []
        ends: list[JobEvent] = []
        for key in self._jobs_to_read():
            job, now_s = self.jobs[key], self._clock.now()
            worker_s = job.worker_seconds(now_s)
            ran_s = job.seconds(now_s)
            cost = None if self._meter is None else self._meter.costs[key]
            events.extend(JobEvent(key, job.spec, record, ran_s, worker_s, cost=cost) for record in job.watch.pump())
            self._held += job.hold()
            if job.watch.outcome is not None:
                ends.append(JobEvent(key, job.spec, job.watch.outcome, ran_s, worker_s, job.given_up, cost))
                self._held -= job.held
                del self.jobs[key], self._keys[job.watch.handle]
        if ends:
            self._count()
        return [*events, *ends]

    def _count(self) -> None:
        if self._meter is not None:
            held = {key: self._cluster.held(job.watch.handle) for key, job in self.jobs.items()}
            self._meter.look(self._clock.now(), self._cluster.rooms, held)

    def _jobs_to_read(self) -> list[int]:
        """The jobs that may have events; all jobs if one may be past its time limit."""
        news = self._cluster.news()
        if news is None or self._late_s() <= 0:
            return list(self.jobs)
        return [self._keys[handle] for handle in news if handle in self._keys]

    def _late_s(self) -> float:
        """Seconds until the oldest running job reaches the time limit."""
        if self._timeout_s is None or not self.jobs:
            return float("inf")
        return next(iter(self.jobs.values())).started_s + self._timeout_s - self._clock.now()

    def abandon(self) -> None:
        """End all jobs now, without a record of their results."""
        for job in self.jobs.values():
            job.watch.handle.kill()
        while any(job.watch.outcome is None for job in self.jobs.values()):
            self._cluster.wait(0.5)
            for job in self.jobs.values():
                job.watch.pump()
        self.jobs.clear()
        self._keys.clear()
        self._held = 0
