"""Moves workers among the running trials of a study: every event becomes a demand, every decision a resize.

``Broker`` is pure: it starts nothing and has no clock, because every time is an argument. A resumed or simulated study
therefore decides like the original one. ``Rebalancer`` connects it with the pool.

A step of a trial is worth the trial's ``worth`` over its speed on one worker, so that slow models compete fairly with
fast ones (the speed-up of Qiao et al., "Pollux", OSDI 2021). It is also divided by the trial's length on one worker
against the median (weight over length: Smith, "Various optimizers for single-stage production", Naval Research
Logistics Quarterly 1956). A trial longer than the median is not worth less, or its rung would wait for it. A new trial
is worth 1. While more new trials may begin, a further worker of a running trial must bring ``opportunity_cost``
of the gain of a new trial.

Limits: it cannot know how a trial scales before trials ran on several numbers of workers. It cannot distinguish a slow
host from a slow trial. It does not see which trials early stopping will pause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated

import numpy as np

from elastune.core.clock import Clock
from elastune.core.errors import UserError
from elastune.core.journal.records import (
    Record,
    Regrouped,
    Reported,
    ScalingPredicted,
    TrialProgressed,
    TrialReallocated,
)
from elastune.core.mesh import Mesh
from elastune.core.options import Range, options_of, read, split
from elastune.core.run import ExecutionSettings
from elastune.runtime.clusters.base import ElasticHandle
from elastune.runtime.job.pool import Pool
from elastune.tuning.search.front import nondominated
from elastune.tuning.search.schedule import levels
from elastune.tuning.study.allocate import Demand, Rules, allocate
from elastune.tuning.study.throughput import (
    BatchTable,
    Prior,
    ThroughputTable,
    bounded,
    samples_per_s,
    scaling_prior,
)
from elastune.tuning.study.trial_progress import TrialProgress

NEW = 1.0  # worth of a new trial
ETA = 3  # of the rungs that decide the worth of a trial
LAYERS = 8  # fronts that are distinguished
LOOKS = 2  # progress records of a trial after its workers changed: each is journaled, so they are few
FEW = 100  # a decision about so many trials takes milliseconds
PER_TRIAL_S = 1e-3  # least time between decisions, for every running trial: with thousands, one takes a second
MIN_RESIDENCE_S = 2.0  # a trial keeps its workers so long: several times a pause, so that no transient is measured
MAX_WAIT_S = 300.0  # a trial that waited longer comes before the running ones


@dataclass(frozen=True)
class WaitingTrial:
    """A trial that waits for workers.

    Attributes:
        trial: Its number.
        low: The fewest workers that it takes.
        high: The most workers that it takes.
        since_s: When it began to wait.
        fresh: Whether it never ran.
        slots: The equal parts into which its work is divided; None: any share is possible.
        last: Whether it is held back (see ``trial_progress``): it gets only workers that no other trial can use.
    """

    trial: int
    low: int
    high: int
    since_s: float
    fresh: bool = True
    slots: int | None = None
    last: bool = False


@dataclass(frozen=True)
class Allocation:
    """A decision: ``trial`` goes on with ``after`` workers. From 0 workers it starts or resumes, to 0 it pauses."""

    trial: int
    before: int
    after: int
    reason: str


@dataclass
class _Running:
    """A running trial: its ``workers``, the number that it should have (``wish``), and when that changed."""

    low: int
    high: int
    slots: int | None
    workers: int
    wish: int
    changed_s: float

    @property
    def taken(self) -> int:
        """Workers that no other trial can have now."""
        return max(self.workers, self.wish)


class Broker:
    """Decides how many workers each trial of a study has, by all events of its trials. Pure.

    Callers report events in the order of time, and ask for ``grants``.

    Args:
        workers: The workers of the study.
        rules: As in ``allocate``, but ``deadline_s`` counts from ``began_s``, and ``budget_s`` is the whole study's.
        began_s: When the study began.
        pause_s: The assumed cost of a resize until some are measured.
        opportunity_cost: See the module.
        courses: The progress and the speeds of trials.
        feeds: Whether the broker updates ``courses`` by the events; else the caller does.
    """

    def __init__(
        self,
        workers: int,
        rules: Rules | None = None,
        *,
        began_s: float = 0.0,
        pause_s: float = 1.0,
        opportunity_cost: float = 0.8,
        courses: TrialProgress | None = None,
        feeds: bool = True,
    ) -> None:
        self.workers = workers
        self._rules = rules or Rules()
        self._began_s = self._last_s = began_s
        self._spent_s = 0.0
        self._held: dict[int, _Running] = {}
        self._worth: dict[int, float] = {}
        self.courses = courses or TrialProgress()
        self._feeds = feeds
        self._pause_s = pause_s
        self._opportunity_cost = opportunity_cost
        self._median_steps = 1.0
        self._median_length_s: float | None = None
        self._last_event = ""
        self.room = 0  # workers that the last ``grants`` left over for further new trials

    def limit(self, left_s: float, left_worker_s: float, now_s: float) -> None:
        """Set the seconds and the worker-seconds that are left from now on."""
        self._spend(now_s)
        deadline_s, budget_s = left_s + now_s - self._began_s, left_worker_s + self._spent_s
        self._rules = replace(self._rules, deadline_s=deadline_s, budget_s=budget_s)

    @property
    def free(self) -> int:
        """Workers that no trial has or will get; below 0 after a loss, until trials have shrunk."""
        return self.workers - sum(held.taken for held in self._held.values())

    def started(self, trial: int, workers: int, low: int, high: int, now_s: float, slots: int | None = None) -> None:
        """Record that a trial began or resumed. While it runs it may have ``low`` to ``high`` workers."""
        self._spend(now_s)
        self._held[trial] = _Running(low, high, slots, workers, workers, now_s)
        if self._feeds:
            self.courses.began(trial, workers, now_s)

    def granted(self, grant: Allocation, now_s: float) -> None:
        """Record that a running trial was asked to take the workers of ``grant``."""
        self._spend(now_s)
        held = self._held[grant.trial]
        held.wish, held.changed_s = grant.after, now_s
        if self._feeds:
            self.courses.reallocated(grant.trial, grant.after)

    def paused(self, trial: int, now_s: float) -> None:
        """Record that a trial paused and returned its workers."""
        self._remove(trial, now_s, "paused")

    def ended(self, trial: int, now_s: float) -> None:
        """Record that a trial ended."""
        self._remove(trial, now_s, "ended")
        self._worth.pop(trial, None)

    def reported(self, trial: int, report: Reported, workers: int, now_s: float) -> None:
        """Record a report of a trial on ``workers``: its progress and, without newer ``stepped`` calls, its speed."""
        self._spend(now_s)
        self._confirm_workers(trial, workers)
        if self._feeds:
            self.courses.reported(trial, report, workers)

    def stepped(self, trial: int, step: int, workers: int, now_s: float) -> None:
        """Record the completed steps of a running trial on ``workers``. Two such calls give its speed."""
        self._spend(now_s)
        if step:
            self._confirm_workers(trial, workers)
        if self._feeds:
            self.courses.stepped(trial, step, workers, now_s)

    def _confirm_workers(self, trial: int, workers: int) -> None:
        """Note that a trial has the workers that it should have, if ``workers`` is their number."""
        held = self._held.get(trial)
        if held is not None and workers == held.wish:
            held.workers = workers

    def regrouped(self, trial: int, workers: int, pause_s: float, now_s: float) -> None:
        """Record that a trial goes on with ``workers`` after a pause: after a resize, or after a loss."""
        self._spend(now_s)
        if held := self._held.get(trial):
            held.workers = workers
        if self._feeds:
            self.courses.regrouped(trial, workers, pause_s)

    def ranked(self, worth: Mapping[int, float]) -> None:
        """Set the worth of trials, relative to a new trial (1): see ``trial_priority``."""
        self._worth = dict(worth)

    def grants(self, now_s: float, waiting: Sequence[WaitingTrial] = (), supply: bool = False) -> list[Allocation]:
        """Decide which trials change: first those that shrink, then those that grow or begin on workers free now.

        A trial that must wait until another one returns workers is left out: call again once they are free. The first
        fresh trials of ``waiting`` get workers as long as no other trial needs them more. ``supply``: more fresh trials
        would follow.
        """
        self._median_steps = self._find_median_steps()
        self._median_length_s = self._find_median_length_s()
        shares = self._share_out(now_s, waiting, supply)
        free = self.free
        has_budget = self._rules.budget_s < math.inf  # then each new trial needs a decision: the budget may allow fewer
        self.room = self.workers - sum(shares.values()) if supply and not has_budget else 0
        changes, starved = [], []
        for trial, after in shares.items():
            held = self._held.get(trial)
            before = held.wish if held else 0
            if after > before:
                starved.append((trial, before, after, after - (held.taken if held else 0)))
            elif after < before:
                changes.append(Allocation(trial, before, after, ""))
        late = {waiter.trial: waiter.since_s for waiter in waiting if self._waits_too_long(waiter, now_s)}
        starved.sort(key=lambda change: (late.get(change[0], math.inf), -self._worth_of(change[0]), change[0]))
        reason = f"makes room for trial {starved[0][0]}" if starved else "its workers bring more elsewhere"
        changes = [replace(grant, reason=reason) for grant in changes]
        for trial, before, after, need in starved:
            if need <= max(free, 0):
                changes.append(Allocation(trial, before, after, self._reason_for(trial, shares)))
            free -= max(need, 0)  # also if it does not fit yet: no later trial takes the workers that it waits for
        return changes

    def _share_out(self, now_s: float, waiting: Sequence[WaitingTrial], supply: bool) -> dict[int, int]:
        """Workers of all trials that have some or are to have some."""
        fresh = [
            waiter for waiter in waiting if (waiter.fresh or waiter.last) and not self._waits_too_long(waiter, now_s)
        ]
        demands = [self._running_demand(trial, held, now_s) for trial, held in self._held.items()]
        demands += [self._waiting_demand(waiter, now_s) for waiter in waiting if waiter not in fresh]
        new = any(not waiter.last for waiter in fresh)
        rules = self._remaining_rules(now_s, self._opportunity_cost if new or supply else 0.0)
        shares = allocate(demands, self.workers, rules)
        free, entering = self.workers - sum(shares.values()), []
        for waiter in fresh:
            if waiter.low <= free:
                free -= waiter.low
                entering.append(self._waiting_demand(waiter, now_s))
        if entering:
            more = supply or len(entering) < len(fresh)
            shares = allocate(
                [*demands, *entering],
                self.workers,
                self._remaining_rules(now_s, self._opportunity_cost if more else 0.0),
            )
        return shares

    def _remaining_rules(self, now_s: float, outside_value: float) -> Rules:
        """The rules, with the remaining time and budget."""
        rules, spent_s = self._rules, self._spent_s + self._workers_in_use() * (now_s - self._last_s)
        if not self.courses.speeds.known:  # no trial has shown how long anything takes
            return replace(rules, outside_value=outside_value, deadline_s=math.inf, budget_s=math.inf)
        return replace(
            rules,
            outside_value=outside_value,
            deadline_s=max(rules.deadline_s - (now_s - self._began_s), 0.0),
            budget_s=max(rules.budget_s - spent_s, 0.0),
        )

    def _waits_too_long(self, waiter: WaitingTrial, now_s: float) -> bool:
        return now_s - waiter.since_s > self._rules.max_wait_s

    def _running_demand(self, trial: int, held: _Running, now_s: float) -> Demand:
        return self._demand(trial, held.wish, held.low, held.high, held.slots, now_s - held.changed_s)

    def _waiting_demand(self, waiter: WaitingTrial, now_s: float) -> Demand:
        return self._demand(waiter.trial, 0, waiter.low, waiter.high, waiter.slots, max(now_s - waiter.since_s, 0.0))

    def _demand(self, trial: int, current: int, low: int, high: int, slots: int | None, since_s: float) -> Demand:
        throughput = self.courses.speeds.of(trial, slots)
        per_worker = float(samples_per_s(throughput, low)[low]) / low
        length_s = self._steps_of(trial) / per_worker
        shortness = max((self._median_length_s or length_s) / length_s, 1.0)
        return Demand(
            trial,
            current,
            low,
            high,
            remaining=self._remaining(trial),
            throughput=throughput,
            worth=self._worth_of(trial) * shortness / per_worker,
            pause_s=median(self.courses.pauses_s) if self.courses.pauses_s else self._pause_s,
            since_s=since_s,
        )

    def _remaining(self, trial: int) -> float:
        """The remaining steps of a trial."""
        return self.courses.progress[trial].remaining if trial in self.courses.progress else self._steps_of(trial)

    def _steps_of(self, trial: int) -> float:
        """All steps of a trial; for an unknown trial the median of the others, or 1 if there are no others."""
        if trial in self.courses.progress:
            return self.courses.progress[trial].whole
        return self._median_steps

    def _find_median_steps(self) -> float:
        """The median over all trials of all their steps."""
        trials = self.courses.progress.values()
        return median(progress.whole for progress in trials) if trials else 1.0

    def _find_median_length_s(self) -> float | None:
        """The median over running trials of the seconds of all their steps on one worker."""
        running = [trial for trial in self._held if trial in self.courses.progress]
        return (
            median(self._steps_of(trial) / self.courses.speeds.per_worker(trial) for trial in running)
            if running
            else None
        )

    def _worth_of(self, trial: int) -> float:
        return self._worth.get(trial, NEW)

    def _reason_for(self, trial: int, shares: Mapping[int, int]) -> str:
        """The reason why a trial grows or begins, in one clause."""
        rank = 1 + sum(self._worth_of(other) > self._worth_of(trial) for other, count in shares.items() if count)
        reason = f"rank {rank} of {sum(count > 0 for count in shares.values())}"
        if trial in self.courses.progress:
            reason += f" at epoch {self.courses.progress[trial].epoch}"
        return f"{reason}, {self._last_event}" if self._last_event else reason

    def _remove(self, trial: int, now_s: float, how: str) -> None:
        self._spend(now_s)
        if self._feeds:
            self.courses.gone(trial)
        if self._held.pop(trial, None) is not None:
            self._last_event = f"trial {trial} {how}"

    def _workers_in_use(self) -> int:
        return sum(held.taken for held in self._held.values())

    def _spend(self, now_s: float) -> None:
        """Count the worker-seconds until now."""
        if now_s != self._last_s:
            self._spent_s += self._workers_in_use() * (now_s - self._last_s)
            self._last_s = now_s


# --- priority of trials ---


def rungs_passed(epoch: int, epochs: int) -> int:
    """Return how many rungs of default halving a trial has passed after ``epoch`` of ``epochs``."""
    return sum(rung <= epoch for rung in levels(max(1, round(epochs / ETA**2)), ETA, epochs))


def trial_priority(points: Mapping[int, Sequence[float]], rungs: Mapping[int, int]) -> dict[int, float]:
    """Return the worth of trials; that of a new trial is 1.

    A trial that has passed a rung is worth 1 + eta^(rungs passed) over the number of its front. A trial past k rungs of
    successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020) is the best of
    some eta^k others, so its samples are worth so much more. Of equals, a trial on the first of the non-dominated
    fronts (Deb et al., NSGA-II, 2002) is worth more than one on the second.

    Args:
        points: The final or expected values of each trial, smaller is better. Finished trials compete, too.
        rungs: The rungs that each running trial has passed.

    Returns:
        The worth of each trial of ``rungs``.
    """
    trials = list(points)
    if not trials:
        return {trial: 1.0 + _chosen(passed) for trial, passed in rungs.items()}
    values = np.array([points[trial] for trial in trials], dtype=float)
    layer = np.full(len(trials), LAYERS)
    left = np.arange(len(trials))
    for number in range(1, LAYERS):
        first = nondominated(values[left])
        layer[left[first]] = number
        left = left[~first]
        if not len(left):
            break
    place = dict(zip(trials, layer.tolist(), strict=True))
    return {trial: 1.0 + _chosen(passed) / place.get(trial, 1) for trial, passed in rungs.items()}


def _chosen(passed: int) -> int:
    """The number of trials of which one is the best that has passed so many rungs; 0 before the first rung."""
    return ETA**passed if passed else 0


# --- the choice on a command line ---


@dataclass(frozen=True)
class AllocationChoice:
    """How a study distributes its workers among its trials.

    Attributes:
        held: The share of the trials, the longest ones, that waits after its first epoch; see ``trial_progress``.
        least_gain: The gain that a further worker must bring, relative to that of the first worker.
        by_batch: Whether the gain by more workers is learnt by batch size, see ``BatchTable``; else all trials are
            assumed to gain alike.
    """

    held: Annotated[float, Range(0.0, 0.9)] = 0.0
    least_gain: Annotated[float, Range(0.0, 1.0)] = 0.5
    by_batch: bool = False

    @property
    def from_journal(self) -> bool:
        """Whether speeds come from the journal alone, which then records the progress of trials, too."""
        return self.held > 0 or self.by_batch

    def courses(self, replica: int = 1, prior: Prior | None = None) -> TrialProgress:
        """Return an empty record of trials, with ``prior``, for replicas of ``replica`` workers each."""
        return TrialProgress(
            BatchTable(prior) if self.by_batch else ThroughputTable(prior), replica=replica, looks=LOOKS
        )


ALLOCATIONS = {
    "steepest": AllocationChoice(),
    "short_first": AllocationChoice(held=0.3, least_gain=0.2),
}


def parse_allocation(text: str) -> AllocationChoice:
    """Return the choice that ``text`` names, one of ``ALLOCATIONS`` with other options. Raises ``UserError``."""
    name, options = split(text, "the allocation", "short_first:held=0.3,least_gain=0.2")
    if name not in ALLOCATIONS:
        raise UserError("an allocation must be one that is known", repr(text), f"one of {', '.join(ALLOCATIONS)}")
    defaults = vars(ALLOCATIONS[name])
    known_options = {
        option: replace(each, default=defaults[option]) for option, each in options_of(AllocationChoice).items()
    }
    return AllocationChoice(**{**defaults, **read(name, options, known_options)})


# --- the broker at work ---


@dataclass(frozen=True)
class RebalanceResult:
    """The result of ``Rebalancer.rebalance``.

    Attributes:
        moved: The changes of running trials.
        begins: The workers with which the waiting trial may begin; 0: it still waits.
        more: How many further new trials may begin at once with as many workers.
    """

    moved: tuple[TrialReallocated, ...] = ()
    begins: int = 0
    more: int = 0


class Rebalancer:
    """Distributes a study's workers among its trials: passes events to a ``Broker``, and resizes jobs of the pool.

    ``changed`` is True if an event has happened since the last distribution.

    Args:
        pool: The jobs of the study.
        clock: The clock of the study.
        bounds: The fewest and the most workers of a trial.
        slots: The equal parts into which a trial's work is divided; None: any share is possible.
        rules: The rules of the distribution.
        replica: Workers of one replica. The broker distributes whole replicas.
        courses: Progress and speeds of the trials by the study's journal; None: they are measured here.
        prior: Speeds that are assumed until they are measured.
    """

    def __init__(
        self,
        pool: Pool,
        clock: Clock,
        bounds: tuple[int, int],
        slots: int | None,
        rules: Rules | None = None,
        replica: int = 1,
        courses: TrialProgress | None = None,
        prior: Prior | None = None,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._bounds = bounds[0] // replica, bounds[1] // replica
        self._slots = slots
        self._replica = replica
        self._from_journal = courses is not None
        began_s = clock.now()
        progress = courses or TrialProgress(ThroughputTable(prior))
        self._broker = Broker(
            pool.capacity // replica, rules, began_s=began_s, courses=progress, feeds=not self._from_journal
        )
        self._waiting: WaitingTrial | None = None
        self._least_interval_s = (
            rules or Rules()
        ).min_residence_s  # least time between decisions for which a report is the only reason
        self._decided_s = -self._least_interval_s
        self.changed = True

    def request_workers(self, trial: int, fresh: bool, last: bool = False, waited_s: float = 0.0) -> None:
        """Record that ``trial`` waits, since ``waited_s`` ago. For ``fresh`` and ``last`` see ``WaitingTrial``."""
        since_s = self._clock.now() - waited_s
        self._waiting = WaitingTrial(trial, *self._bounds, since_s, fresh, self._slots, last)
        self.changed = True

    def withdraw_request(self) -> None:
        """Drop the request of a trial that was held back: others may come before it."""
        self._waiting = None

    def trial_started(self, trial: int, workers: int) -> None:
        """Record that ``trial`` started or resumed."""
        self._broker.started(trial, workers // self._replica, *self._bounds, self._clock.now(), self._slots)
        self._waiting = None
        self.changed = True

    def record_event(self, trial: int, record: Record) -> None:
        """Record an event of a running trial."""
        now_s, job = self._clock.now(), self._pool.jobs.get(trial)
        if isinstance(record, Reported) and job is not None:
            self._broker.reported(trial, record, job.workers // self._replica, now_s)
            self.changed = self.changed or now_s >= self._decided_s + self._least_interval_s
        elif isinstance(record, Regrouped):
            self._broker.regrouped(trial, len(record.members) // self._replica, record.pause_s, now_s)
            self.changed = True

    def gone(self, trial: int, paused: bool) -> None:
        """Record that a trial returned its workers."""
        (self._broker.paused if paused else self._broker.ended)(trial, self._clock.now())
        self.changed = True

    def limit(self, left_s: float, left_worker_s: float) -> None:
        """Set the seconds and the worker-seconds that the study has left."""
        self._broker.limit(left_s, left_worker_s / self._replica, self._clock.now())
        self.changed = True

    @property
    def due_s(self) -> float:
        """Seconds until the next distribution may happen; infinite without an event since the last one."""
        if not self.changed and self._pool.capacity // self._replica == self._broker.workers:
            return math.inf
        left_s = self._decided_s + PER_TRIAL_S * self._pool.running - self._clock.now()
        return left_s if self._pool.running > FEW and left_s > 1e-6 else 0.0

    def looks(self) -> list[TrialProgressed]:
        """Return progress records of trials whose workers changed, if the journal needs them before ``rebalance``."""
        if not self._from_journal:
            return []
        courses, now_s, records = self._broker.courses, self._clock.wall(), []
        for trial in courses.unmeasured:
            seen_s, job = courses.looked_s(trial), self._pool.jobs.get(trial)
            handle = None if job is None else job.watch.handle
            early = seen_s is not None and now_s < seen_s + self._least_interval_s
            if isinstance(handle, ElasticHandle) and job is not None and job.workers == job.requested and not early:
                records += [TrialProgressed(trial, handle.step)] if handle.step else []
        return records

    def _measure(self) -> None:
        """Measure trials whose workers changed: two measurements give a speed, earlier than a second report does."""
        for trial in [] if self._from_journal else self._broker.courses.unmeasured:
            job = self._pool.jobs[trial]
            handle = job.watch.handle
            if isinstance(handle, ElasticHandle):
                self._broker.stepped(trial, handle.step, job.workers // self._replica, self._clock.now())

    def rebalance(
        self, expected_values: Mapping[int, Sequence[float]], rungs: Mapping[int, int], supply: bool
    ) -> RebalanceResult:
        """Distribute the workers: resize and pause running trials.

        A trial that grows on workers of another one must wait until these are returned; a later call grants it.

        Args:
            expected_values: The final or expected values of trials, smaller is better.
            rungs: The rungs that each running trial has passed.
            supply: Whether further new trials would begin.
        """
        self._measure()
        self._broker.workers = self._pool.capacity // self._replica
        self._broker.ranked(trial_priority(expected_values, rungs))
        waiting = [] if self._waiting is None else [self._waiting]
        now_s, moved, begins, free = self._clock.now(), [], 0, self._pool.free // self._replica
        self.changed, self._decided_s = False, now_s
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
        return RebalanceResult(tuple(moved), begins * self._replica, more)


MakeRebalancer = Callable[[Pool, Clock, float, float], Rebalancer]
"""The pool, the clock, and the remaining seconds and worker-seconds -> the rebalancer of the pool."""


def sharing(
    bounds: tuple[int, int] | None,
    execution: ExecutionSettings,
    choice: AllocationChoice | None = None,
    courses: TrialProgress | None = None,
    predicted: ScalingPredicted | None = None,
) -> MakeRebalancer | None:
    """Return a factory of rebalancers for trials of ``execution``; None without ``bounds``.

    Args:
        bounds: The fewest and the most workers of a trial.
        execution: The execution settings of the trials.
        choice: How workers are distributed; None: the defaults.
        courses: See ``Rebalancer``.
        predicted: The predicted scaling. No trial gets more workers than are useful by it.
    """
    chosen = choice or AllocationChoice()
    if bounds is None:
        return None
    mesh = Mesh() if execution.mesh is None else execution.mesh
    # slots of each replica
    slots = max(execution.num_slots, bounds[1]) // mesh.shard if execution.mode == "exact" else None

    def make(pool: Pool, clock: Clock, left_s: float, left_worker_s: float) -> Rebalancer:
        rules = Rules(
            min_residence_s=MIN_RESIDENCE_S,
            max_wait_s=MAX_WAIT_S,
            least_gain=chosen.least_gain,
            deadline_s=left_s,
            budget_s=left_worker_s / mesh.replica,
        )
        prior = scaling_prior(predicted, mesh.replica)
        return Rebalancer(pool, clock, bounded(predicted, bounds), slots, rules, mesh.replica, courses, prior)

    return make
