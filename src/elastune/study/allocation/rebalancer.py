"""The broker of a study at work: what happens to trials is told to it, what it grants is done on the pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastune.cluster.base import ElasticHandle
from elastune.core.clock import Clock
from elastune.core.mesh import Mesh
from elastune.core.run import Means
from elastune.job.pool import Pool
from elastune.journal.records import Record, Regrouped, Reported, ScalingPredicted, TrialReallocated, TrialSeen
from elastune.study.allocation.allocate import Rules
from elastune.study.allocation.allocator import Broker, Pending
from elastune.study.allocation.choice import AllocationChoice
from elastune.study.allocation.courses import Courses
from elastune.study.allocation.predicted import bounded, prior_of
from elastune.study.allocation.priority import trial_priority
from elastune.study.allocation.throughput import Prior, ThroughputTable

FEW = 100  # trials: so many are decided about in milliseconds
PER_TRIAL_S = 1e-3  # at least so long, for every trial that runs, between decisions: thousands take a second to make


MIN_RESIDENCE_S = 2.0  # a trial keeps its workers so long: several times a pause, so nothing transient is measured
MAX_WAIT_S = 300.0  # a trial that waited longer is let in before those that run


@dataclass(frozen=True)
class Settled:
    """What was done: running trials that were told to change, and the workers that who asks may begin with, or 0.

    ``more``: further new trials that may begin at once with as many.
    """

    moved: tuple[TrialReallocated, ...] = ()
    begins: int = 0
    more: int = 0


class Sharing:
    """Shares a study's workers among its trials, each within ``bounds`` (low, high).

    ``slots``: the equal parts that a trial's work is dealt out in (None: any share can be had). ``changed``: whether
    something has happened since workers were last dealt out. ``replica``: workers that carry one replica together;
    the broker deals out replicas, so nobody ever has a part of one. ``courses``: what is known of the trials, where
    that comes from the study's journal; None: it is measured here, and ``prior`` is taken until then.
    """

    def __init__(
        self,
        pool: Pool,
        clock: Clock,
        bounds: tuple[int, int],
        slots: int | None,
        rules: Rules | None = None,
        replica: int = 1,
        courses: Courses | None = None,
        prior: Prior | None = None,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._bounds = bounds[0] // replica, bounds[1] // replica
        self._slots = slots
        self._replica = replica
        self._from_journal = courses is not None
        began_s = clock.now()
        known = courses or Courses(ThroughputTable(prior))
        self._broker = Broker(
            pool.capacity // replica, rules, began_s=began_s, courses=known, feeds=not self._from_journal
        )
        self._waiting: Pending | None = None
        self._rest_s = (rules or Rules()).min_residence_s  # between decisions that only a report gives reason for
        self._settled_s = -self._rest_s
        self.changed = True

    def asks(self, trial: int, fresh: bool, last: bool = False, waited_s: float = 0.0) -> None:
        """``trial`` waits, and has waited for so long; ``fresh``: it never ran; ``last``: see ``Pending``."""
        since_s = self._clock.now() - waited_s
        self._waiting = Pending(trial, *self._bounds, since_s, fresh, self._slots, last)
        self.changed = True

    def asks_no_more(self) -> None:
        """Who was held back waits on: others may come before it."""
        self._waiting = None

    def begun(self, trial: int, workers: int) -> None:
        """``trial`` was started, or goes on."""
        self._broker.started(trial, workers // self._replica, *self._bounds, self._clock.now(), self._slots)
        self._waiting = None
        self.changed = True

    def heard(self, trial: int, record: Record) -> None:
        """A running trial said something."""
        now_s, job = self._clock.now(), self._pool.jobs.get(trial)
        if isinstance(record, Reported) and job is not None:
            self._broker.reported(trial, record, job.workers // self._replica, now_s)
            self.changed = self.changed or now_s >= self._settled_s + self._rest_s
        elif isinstance(record, Regrouped):
            self._broker.regrouped(trial, len(record.members) // self._replica, record.pause_s, now_s)
            self.changed = True

    def gone(self, trial: int, paused: bool) -> None:
        """A trial gave its workers back."""
        (self._broker.paused if paused else self._broker.ended)(trial, self._clock.now())
        self.changed = True

    @property
    def due_s(self) -> float:
        """Seconds until workers may be dealt out again; infinite where nothing has happened."""
        if not self.changed and self._pool.capacity // self._replica == self._broker.workers:
            return math.inf
        left_s = self._settled_s + PER_TRIAL_S * self._pool.running - self._clock.now()
        return left_s if self._pool.running > FEW and left_s > 1e-6 else 0.0

    def looks(self) -> list[TrialSeen]:
        """How far trials are whose workers have changed, where the journal is to know: to be told before ``settle``."""
        if not self._from_journal:
            return []
        courses, now_s, found = self._broker.courses, self._clock.wall(), []
        for trial in courses.unmeasured:
            seen_s, job = courses.looked_s(trial), self._pool.jobs.get(trial)
            handle = None if job is None else job.watch.handle
            early = seen_s is not None and now_s < seen_s + self._rest_s
            if isinstance(handle, ElasticHandle) and job is not None and job.workers == job.wished and not early:
                found += [TrialSeen(trial, handle.step)] if handle.step else []
        return found

    def _look(self) -> None:
        """See how far trials are whose workers have changed: two looks tell a speed, before a second report does."""
        for trial in [] if self._from_journal else self._broker.courses.unmeasured:
            job = self._pool.jobs[trial]
            handle = job.watch.handle
            if isinstance(handle, ElasticHandle):
                self._broker.stepped(trial, handle.step, job.workers // self._replica, self._clock.now())

    def settle(self, promises: Mapping[int, Sequence[float]], rungs: Mapping[int, int], supply: bool) -> Settled:
        """Deal out the workers. ``promises``: what trials end with, smaller is better; ``rungs``: those
        that the running ones have passed; ``supply``: more would begin.

        Who grows on workers that another one gives back has to wait until they have gone; it is granted then.
        """
        self._look()
        self._broker.workers = self._pool.capacity // self._replica
        self._broker.ranked(trial_priority(promises, rungs))
        waiting = [] if self._waiting is None else [self._waiting]
        now_s, moved, begins, free = self._clock.now(), [], 0, self._pool.free // self._replica
        self.changed, self._settled_s = False, now_s
        for grant in self._broker.grants(now_s, waiting, supply):
            if self._waiting is not None and grant.trial == self._waiting.trial:
                begins = grant.after if grant.after <= free else 0
                self.changed = self.changed or begins == 0
            elif grant.after > 0 and (grant.after < grant.before or grant.after - grant.before <= free):
                before, after = grant.before * self._replica, grant.after * self._replica
                self._pool.resize(grant.trial, after, grant.reason)
                free = self._pool.free // self._replica
                self._broker.granted(grant, now_s)
                moved.append(TrialReallocated(grant.trial, before, after, grant.reason))
            elif grant.after == 0:
                self._pool.pause(grant.trial)
            else:
                self.changed = True
        more = 0
        if begins and self._waiting is not None and self._waiting.fresh:
            more = max(min(self._broker.room, free - begins), 0) // begins
        return Settled(tuple(moved), begins * self._replica, more)


MakeSharing = Callable[[Pool, Clock, float, float], Sharing]
"""The pool, the clock, and the seconds and worker-seconds that are left -> what shares out the pool's workers."""


def sharing(
    bounds: tuple[int, int] | None,
    means: Means,
    choice: AllocationChoice | None = None,
    courses: Courses | None = None,
    told: ScalingPredicted | None = None,
) -> MakeSharing | None:
    """How trials of ``means`` share workers, each within ``bounds``; None where they do not.

    ``courses``: as of ``Sharing``. ``told``: what was predicted of the trials: none has more workers than it says.
    """
    chosen = choice or AllocationChoice()
    if bounds is None:
        return None
    mesh = Mesh() if means.mesh is None else means.mesh
    slots = max(means.num_slots, bounds[1]) // mesh.shard if means.mode == "exact" else None  # of each replica's

    def make(pool: Pool, clock: Clock, left_s: float, left_worker_s: float) -> Sharing:
        rules = Rules(
            min_residence_s=MIN_RESIDENCE_S,
            max_wait_s=MAX_WAIT_S,
            least_gain=chosen.least_gain,
            deadline_s=left_s,
            budget_s=left_worker_s / mesh.replica,
        )
        prior = prior_of(told, mesh.replica)
        return Sharing(pool, clock, bounded(told, bounds), slots, rules, mesh.replica, courses, prior)

    return make
