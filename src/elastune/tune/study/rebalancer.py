"""Moves workers among the running trials of a study: every event becomes a demand, every decision a resize.

``Broker`` is pure: it starts nothing and has no clock, because every time is an argument. A resumed or simulated study
therefore decides like the original one. ``Rebalancer`` connects it with the pool.
A step of a trial is worth the trial's ``worth`` over its speed on one worker (the speed-up of Qiao et al., "Pollux",
OSDI 2021), so slow models compete fairly with fast ones, and over the trial's length on one worker against the median
(weight over length: Smith, "Various optimizers for single-stage production", Naval Research Logistics Quarterly 1956).
A trial longer than the median is not worth less, or its rung would wait for it. A new trial is worth 1. Where more new
trials may begin, a running trial gets one more worker only if that worker brings ``opportunity_cost`` of what a new
trial would bring on it.
Limits: it cannot know how a trial scales before trials ran on several numbers of workers. It cannot tell a slow host
from a slow trial. It does not see which trials early stopping will pause.
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
from elastune.tune.search.front import nondominated
from elastune.tune.search.schedule import levels
from elastune.tune.study.allocate import Demand, Rules, allocate
from elastune.tune.study.throughput import (
    BatchTable,
    Prior,
    ThroughputTable,
    bounded,
    samples_per_s,
    scaling_prior,
)
from elastune.tune.study.trial_progress import TrialProgress

# [allocator] Workers are handed on to the trials that deserve them: what a study knows of its trials, made into claims.
#
# Told of everything that happens to trials, and asked who is to have how many workers, it answers with ``Allocation``s by
# ``allocate``. It starts nothing and has no clock: every time is an argument, so a study that resumes from its journal
# decides as before, and a simulated one like a real one.
#
# A step of a trial is worth the trial's ``worth`` over its speed on one worker (the speed-up of Qiao et al., "Pollux",
# OSDI 2021), so slow models compete fairly with fast ones, and over the trial's length on one worker against the median
# (weight over length: Smith, "Various optimizers for single-stage production", Naval Research Logistics Quarterly 1956):
# what is short shows soonest what it is worth. What is longer than the median is worth no less for it, or its rung would
# wait for it. A new trial is worth 1: where more of them may begin, a running trial is widened only as far as its next
# worker brings ``opportunity_cost`` of what a new trial would on it, since of trials that go equally well on many workers
# a few wide ones end sooner than many narrow ones.
#
# What it cannot do: know how a trial scales before it, or others, ran on several numbers of workers; tell a slow host
# from a slow trial; see the rungs of early stopping (a trial that will be paused soon is widened like any other).

NEW = 1.0  # worth of a trial that nobody knows


@dataclass(frozen=True)
class WaitingTrial:
    """A trial that asks for ``low`` to ``high`` workers since ``since_s``; ``fresh``: it never ran.

    ``slots``: the equal parts that its work is dealt out in (None: any share can be had). ``last``: it is held back
    (see ``hold``), and gets only what is idle once all others have what they can use.
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
    """``trial`` is to go on with ``after`` workers: from 0 it is started or resumed, to 0 it is paused."""

    trial: int
    before: int
    after: int
    reason: str


@dataclass
class _Running:
    """A trial that runs: ``workers`` it has, ``wish`` it was last told to have, when that changed."""

    low: int
    high: int
    slots: int | None
    workers: int
    wish: int
    changed_s: float

    @property
    def taken(self) -> int:
        """Workers that nobody else can have now."""
        return max(self.workers, self.wish)


class Broker:
    """Shares ``workers`` among a study's trials. Calls come in the order of time.

    ``rules``: as ``allocate`` takes them, but ``deadline_s`` counts from ``began_s`` and ``budget_s`` is that of the
    whole study. ``pause_s``: what a resize is taken to cost until some were measured. ``opportunity_cost``: see the
    module. ``courses``: what is known of trials; ``feeds``: by what the broker is told, else somebody else sees to it.
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
        self._usual_whole = 1.0
        self._usual_length_s: float | None = None
        self._since = ""
        self.room = 0  # workers that nobody was to have by the last ``grants``, while more new trials would follow

    @property
    def free(self) -> int:
        """Workers that no trial has or was promised; below 0 after a loss, until trials have shrunk."""
        return self.workers - sum(held.taken for held in self._held.values())

    def started(self, trial: int, workers: int, low: int, high: int, now_s: float, slots: int | None = None) -> None:
        """A trial began, or goes on after a pause, on ``workers``; while it runs it may have ``low`` to ``high``."""
        self._spend(now_s)
        self._held[trial] = _Running(low, high, slots, workers, workers, now_s)
        if self._feeds:
            self.courses.began(trial, workers, now_s)

    def granted(self, grant: Allocation, now_s: float) -> None:
        """A running trial was told to take the workers of ``grant``."""
        self._spend(now_s)
        held = self._held[grant.trial]
        held.wish, held.changed_s = grant.after, now_s
        if self._feeds:
            self.courses.told(grant.trial, grant.after)

    def paused(self, trial: int, now_s: float) -> None:
        """A trial gave its workers back, to go on later or not at all."""
        self._gone(trial, now_s, "paused")

    def ended(self, trial: int, now_s: float) -> None:
        """A trial is over."""
        self._gone(trial, now_s, "ended")
        self._worth.pop(trial, None)

    def reported(self, trial: int, report: Reported, workers: int, now_s: float) -> None:
        """A trial reported, on ``workers``: how far it is; how fast it goes, if it was not looked at since a change."""
        self._spend(now_s)
        self._has(trial, workers)
        if self._feeds:
            self.courses.reported(trial, report, workers)

    def stepped(self, trial: int, step: int, workers: int, now_s: float) -> None:
        """A look at a trial that runs: the steps it has completed, on ``workers``. Two of them tell its speed."""
        self._spend(now_s)
        if step:
            self._has(trial, workers)
        if self._feeds:
            self.courses.stepped(trial, step, workers, now_s)

    def _has(self, trial: int, workers: int) -> None:
        """A trial has the workers that it was told to have."""
        held = self._held.get(trial)
        if held is not None and workers == held.wish:
            held.workers = workers

    def regrouped(self, trial: int, workers: int, pause_s: float, now_s: float) -> None:
        """A trial goes on with ``workers`` after a pause of ``pause_s``: as it was told, or since it lost some."""
        self._spend(now_s)
        if held := self._held.get(trial):
            held.workers = workers
        if self._feeds:
            self.courses.regrouped(trial, workers, pause_s)

    def ranked(self, worth: Mapping[int, float]) -> None:
        """What trials are worth against a new one (1): see ``priority.trial_priority``."""
        self._worth = dict(worth)

    def grants(self, now_s: float, waiting: Sequence[WaitingTrial] = (), supply: bool = False) -> list[Allocation]:
        """Who is to change: shrinks first, then those that grow or begin on workers that are free now.

        Who must wait for another's workers to be given back is left out: ask again once they are. Of ``waiting``, the
        first fresh ones are taken as long as nobody needs the workers more. ``supply``: more of them would follow.
        """
        self._usual_whole = self._usual()
        self._usual_length_s = self._usual_s()
        given = self._given(now_s, waiting, supply)
        free = self.free
        bounded = self._rules.budget_s < math.inf  # each of them must be asked for: the budget may hold fewer
        self.room = self.workers - sum(given.values()) if supply and not bounded else 0
        found, starved = [], []
        for trial, after in given.items():
            held = self._held.get(trial)
            before = held.wish if held else 0
            if after > before:
                starved.append((trial, before, after, after - (held.taken if held else 0)))
            elif after < before:
                found.append(Allocation(trial, before, after, ""))
        late = {one.trial: one.since_s for one in waiting if self._starves(one, now_s)}
        starved.sort(key=lambda change: (late.get(change[0], math.inf), -self._value(change[0]), change[0]))
        why = f"makes room for trial {starved[0][0]}" if starved else "its workers bring more elsewhere"
        found = [replace(grant, reason=why) for grant in found]
        for trial, before, after, need in starved:
            if need <= max(free, 0):
                found.append(Allocation(trial, before, after, self._standing(trial, given)))
            free -= max(need, 0)  # where it does not fit yet: no later one takes what it waits for
        return found

    def _given(self, now_s: float, waiting: Sequence[WaitingTrial], supply: bool) -> dict[int, int]:
        """Workers of everybody who has some or is to have some."""
        fresh = [one for one in waiting if (one.fresh or one.last) and not self._starves(one, now_s)]
        demands = [self._running(trial, held, now_s) for trial, held in self._held.items()]
        demands += [self._asking(one, now_s) for one in waiting if one not in fresh]
        new = any(not one.last for one in fresh)
        rules = self._left(now_s, self._opportunity_cost if new or supply else 0.0)
        given = allocate(demands, self.workers, rules)
        left, taken = self.workers - sum(given.values()), []
        for one in fresh:
            if one.low <= left:
                left -= one.low
                taken.append(self._asking(one, now_s))
        if taken:
            more = supply or len(taken) < len(fresh)
            given = allocate(
                [*demands, *taken], self.workers, self._left(now_s, self._opportunity_cost if more else 0.0)
            )
        return given

    def _left(self, now_s: float, outside_value: float) -> Rules:
        """The rules, with what time and budget are left."""
        rules, spent_s = self._rules, self._spent_s + self._using() * (now_s - self._last_s)
        if not self.courses.speeds.known:  # nobody can say how long anything takes
            return replace(rules, outside_value=outside_value, deadline_s=math.inf, budget_s=math.inf)
        return replace(
            rules,
            outside_value=outside_value,
            deadline_s=max(rules.deadline_s - (now_s - self._began_s), 0.0),
            budget_s=max(rules.budget_s - spent_s, 0.0),
        )

    def _starves(self, one: WaitingTrial, now_s: float) -> bool:
        return now_s - one.since_s > self._rules.max_wait_s

    def _running(self, trial: int, held: _Running, now_s: float) -> Demand:
        return self._demand(trial, held.wish, held.low, held.high, held.slots, now_s - held.changed_s)

    def _asking(self, one: WaitingTrial, now_s: float) -> Demand:
        return self._demand(one.trial, 0, one.low, one.high, one.slots, max(now_s - one.since_s, 0.0))

    def _demand(self, trial: int, current: int, low: int, high: int, slots: int | None, since_s: float) -> Demand:
        throughput = self.courses.speeds.of(trial, slots)
        per_worker = float(samples_per_s(throughput, low)[low]) / low
        length_s = self._whole(trial) / per_worker
        shortness = max((self._usual_length_s or length_s) / length_s, 1.0)
        return Demand(
            trial,
            current,
            low,
            high,
            remaining=self._remaining(trial),
            throughput=throughput,
            worth=self._value(trial) * shortness / per_worker,
            pause_s=median(self.courses.pauses_s) if self.courses.pauses_s else self._pause_s,
            since_s=since_s,
        )

    def _remaining(self, trial: int) -> float:
        """Steps to the trial's end."""
        return self.courses.progress[trial].remaining if trial in self.courses.progress else self._whole(trial)

    def _whole(self, trial: int) -> float:
        """Steps of all its training; of a trial nobody knows as many as the others', or few if there are none."""
        if trial in self.courses.progress:
            return self.courses.progress[trial].whole
        return self._usual_whole

    def _usual(self) -> float:
        """Steps of all the training of the median of the trials."""
        known = self.courses.progress.values()
        return median(one.whole for one in known) if known else 1.0

    def _usual_s(self) -> float | None:
        """Seconds on one worker of the median of the trials that run."""
        known = [trial for trial in self._held if trial in self.courses.progress]
        return median(self._whole(trial) / self.courses.speeds.per_worker(trial) for trial in known) if known else None

    def _value(self, trial: int) -> float:
        return self._worth.get(trial, NEW)

    def _standing(self, trial: int, given: Mapping[int, int]) -> str:
        """Why a trial grows or begins, in one clause."""
        rank = 1 + sum(self._value(other) > self._value(trial) for other, count in given.items() if count)
        told = f"rank {rank} of {sum(count > 0 for count in given.values())}"
        if trial in self.courses.progress:
            told += f" at epoch {self.courses.progress[trial].epoch}"
        return f"{told}, {self._since}" if self._since else told

    def _gone(self, trial: int, now_s: float, how: str) -> None:
        self._spend(now_s)
        if self._feeds:
            self.courses.gone(trial)
        if self._held.pop(trial, None) is not None:
            self._since = f"trial {trial} {how}"

    def _using(self) -> int:
        return sum(held.taken for held in self._held.values())

    def _spend(self, now_s: float) -> None:
        """Count the worker-seconds up to now."""
        if now_s != self._last_s:
            self._spent_s += self._using() * (now_s - self._last_s)
            self._last_s = now_s


# [priority] What trials are worth against a new one, by how far they were let and by their place on the front.

ETA = 3
LAYERS = 8  # fronts after the first that are told apart


def rungs_passed(epoch: int, epochs: int) -> int:
    """The rungs of default halving that a trial has passed after ``epoch`` of ``epochs``."""
    return sum(rung <= epoch for rung in levels(max(1, round(epochs / ETA**2)), ETA, epochs))


def trial_priority(points: Mapping[int, Sequence[float]], rungs: Mapping[int, int]) -> dict[int, float]:
    """Trial -> worth, a new one's being 1: 1 + eta^(rungs passed) over the number of its front, once it has passed one.

    Who is past k rungs of successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning",
    MLSys 2020) is the best of some eta^k others, which is what its samples are worth more than a new one's; before
    the first nobody was chosen for anything. Of equals, who would end on the first of the non-dominated fronts (Deb et
    al., NSGA-II, 2002) deserves more than who would on the second. ``points``: what each trial ends with or is expected
    to, smaller is better; those of ``rungs`` (rungs passed) are told, others (the finished) only compete.
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
    """Of how many a trial is the best, having passed so many rungs; 0 before anybody was compared."""
    return ETA**passed if passed else 0


# [choice] How workers are shared out, as on a command line: "steepest", "short_first", "short_first:held=0.2".

LOOKS = 2  # at a trial whose workers have changed: each is recorded, so they are few


@dataclass(frozen=True)
class AllocationChoice:
    """How a study's workers are shared out among its trials.

    Attributes:
        held: The part of the trials, the longest ones, that waits after its first epoch; see ``hold``.
        least_gain: What a further worker must bring, as a part of what a first one brings; less would waste workers.
        by_batch: Whether the gain of trials by more workers is learnt by the size of their batches, see ``scaling``;
            else all trials are taken to gain alike.
    """

    held: Annotated[float, Range(0.0, 0.9)] = 0.0
    least_gain: Annotated[float, Range(0.0, 1.0)] = 0.5
    by_batch: bool = False

    @property
    def from_journal(self) -> bool:
        """Whether what is known of trials comes from the journal alone, which then records looks at them, too."""
        return self.held > 0 or self.by_batch

    def courses(self, replica: int = 1, prior: Prior | None = None) -> TrialProgress:
        """What is known of the trials of a study whose replicas take so many workers: nothing but ``prior`` yet."""
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
    usual = vars(ALLOCATIONS[name])
    known = {option: replace(one, default=usual[option]) for option, one in options_of(AllocationChoice).items()}
    return AllocationChoice(**{**usual, **read(name, options, known)})


# [rebalancer] The broker of a study at work: what happens to trials is told to it, what it grants is done on the pool.

FEW = 100  # trials: so many are decided about in milliseconds
PER_TRIAL_S = 1e-3  # at least so long, for every trial that runs, between decisions: thousands take a second to make
MIN_RESIDENCE_S = 2.0  # a trial keeps its workers so long: several times a pause, so nothing transient is measured
MAX_WAIT_S = 300.0  # a trial that waited longer is let in before those that run


@dataclass(frozen=True)
class RebalanceResult:
    """What was done: running trials that were told to change, and the workers that who asks may begin with, or 0.

    ``more``: further new trials that may begin at once with as many.
    """

    moved: tuple[TrialReallocated, ...] = ()
    begins: int = 0
    more: int = 0


class Rebalancer:
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
        known = courses or TrialProgress(ThroughputTable(prior))
        self._broker = Broker(
            pool.capacity // replica, rules, began_s=began_s, courses=known, feeds=not self._from_journal
        )
        self._waiting: WaitingTrial | None = None
        self._rest_s = (rules or Rules()).min_residence_s  # between decisions that only a report gives reason for
        self._settled_s = -self._rest_s
        self.changed = True

    def request_workers(self, trial: int, fresh: bool, last: bool = False, waited_s: float = 0.0) -> None:
        """``trial`` waits, and has waited for so long; ``fresh``: it never ran; ``last``: see ``WaitingTrial``."""
        since_s = self._clock.now() - waited_s
        self._waiting = WaitingTrial(trial, *self._bounds, since_s, fresh, self._slots, last)
        self.changed = True

    def withdraw_request(self) -> None:
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

    def looks(self) -> list[TrialProgressed]:
        """How far trials are whose workers have changed, where the journal is to know: to be told before ``rebalance``."""
        if not self._from_journal:
            return []
        courses, now_s, found = self._broker.courses, self._clock.wall(), []
        for trial in courses.unmeasured:
            seen_s, job = courses.looked_s(trial), self._pool.jobs.get(trial)
            handle = None if job is None else job.watch.handle
            early = seen_s is not None and now_s < seen_s + self._rest_s
            if isinstance(handle, ElasticHandle) and job is not None and job.workers == job.wished and not early:
                found += [TrialProgressed(trial, handle.step)] if handle.step else []
        return found

    def _look(self) -> None:
        """See how far trials are whose workers have changed: two looks tell a speed, before a second report does."""
        for trial in [] if self._from_journal else self._broker.courses.unmeasured:
            job = self._pool.jobs[trial]
            handle = job.watch.handle
            if isinstance(handle, ElasticHandle):
                self._broker.stepped(trial, handle.step, job.workers // self._replica, self._clock.now())

    def rebalance(
        self, expected_values: Mapping[int, Sequence[float]], rungs: Mapping[int, int], supply: bool
    ) -> RebalanceResult:
        """Deal out the workers. ``expected_values``: what trials end with, smaller is better; ``rungs``: those
        that the running ones have passed; ``supply``: more would begin.

        Who grows on workers that another one gives back has to wait until they have gone; it is granted then.
        """
        self._look()
        self._broker.workers = self._pool.capacity // self._replica
        self._broker.ranked(trial_priority(expected_values, rungs))
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
        return RebalanceResult(tuple(moved), begins * self._replica, more)


MakeRebalancer = Callable[[Pool, Clock, float, float], Rebalancer]
"""The pool, the clock, and the seconds and worker-seconds that are left -> what shares out the pool's workers."""


def sharing(
    bounds: tuple[int, int] | None,
    execution: ExecutionSettings,
    choice: AllocationChoice | None = None,
    courses: TrialProgress | None = None,
    told: ScalingPredicted | None = None,
) -> MakeRebalancer | None:
    """How trials of ``execution`` share workers, each within ``bounds``; None where they do not.

    ``courses``: as of ``Rebalancer``. ``told``: what was predicted of the trials: none has more workers than it says.
    """
    chosen = choice or AllocationChoice()
    if bounds is None:
        return None
    mesh = Mesh() if execution.mesh is None else execution.mesh
    slots = (
        max(execution.num_slots, bounds[1]) // mesh.shard if execution.mode == "exact" else None
    )  # of each replica's

    def make(pool: Pool, clock: Clock, left_s: float, left_worker_s: float) -> Rebalancer:
        rules = Rules(
            min_residence_s=MIN_RESIDENCE_S,
            max_wait_s=MAX_WAIT_S,
            least_gain=chosen.least_gain,
            deadline_s=left_s,
            budget_s=left_worker_s / mesh.replica,
        )
        prior = scaling_prior(told, mesh.replica)
        return Rebalancer(pool, clock, bounded(told, bounds), slots, rules, mesh.replica, courses, prior)

    return make
