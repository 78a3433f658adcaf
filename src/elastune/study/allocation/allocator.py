"""Workers are handed on to the trials that deserve them: what a study knows of its trials, made into claims.

Told of everything that happens to trials, and asked who is to have how many workers, it answers with ``Allocation``s by
``allocate``. It starts nothing and has no clock: every time is an argument, so a study that resumes from its journal
decides as before, and a simulated one like a real one.

A step of a trial is worth the trial's ``worth`` over its speed on one worker (the speed-up of Qiao et al., "Pollux",
OSDI 2021), so slow models compete fairly with fast ones, and over the trial's length on one worker against the median
(weight over length: Smith, "Various optimizers for single-stage production", Naval Research Logistics Quarterly 1956):
what is short shows soonest what it is worth. What is longer than the median is worth no less for it, or its rung would
wait for it. A new trial is worth 1: where more of them may begin, a running trial is widened only as far as its next
worker brings ``opportunity_cost`` of what a new trial would on it, since of trials that go equally well on many workers
a few wide ones end sooner than many narrow ones.

What it cannot do: know how a trial scales before it, or others, ran on several numbers of workers; tell a slow host
from a slow trial; see the rungs of early stopping (a trial that will be paused soon is widened like any other).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from elastune.journal.records import Reported
from elastune.study.allocation.allocate import Demand, Rules, allocate
from elastune.study.allocation.courses import Courses
from elastune.study.allocation.throughput import samples_per_s

NEW = 1.0  # worth of a trial that nobody knows


@dataclass(frozen=True)
class Pending:
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
        courses: Courses | None = None,
        feeds: bool = True,
    ) -> None:
        self.workers = workers
        self._rules = rules or Rules()
        self._began_s = self._last_s = began_s
        self._spent_s = 0.0
        self._held: dict[int, _Running] = {}
        self._worth: dict[int, float] = {}
        self.courses = courses or Courses()
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

    def grants(self, now_s: float, waiting: Sequence[Pending] = (), supply: bool = False) -> list[Allocation]:
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

    def _given(self, now_s: float, waiting: Sequence[Pending], supply: bool) -> dict[int, int]:
        """Workers of everybody who has some or is to have some."""
        fresh = [one for one in waiting if (one.fresh or one.last) and not self._starves(one, now_s)]
        claims = [self._running(trial, held, now_s) for trial, held in self._held.items()]
        claims += [self._asking(one, now_s) for one in waiting if one not in fresh]
        new = any(not one.last for one in fresh)
        rules = self._left(now_s, self._opportunity_cost if new or supply else 0.0)
        given = allocate(claims, self.workers, rules)
        left, taken = self.workers - sum(given.values()), []
        for one in fresh:
            if one.low <= left:
                left -= one.low
                taken.append(self._asking(one, now_s))
        if taken:
            more = supply or len(taken) < len(fresh)
            given = allocate(
                [*claims, *taken], self.workers, self._left(now_s, self._opportunity_cost if more else 0.0)
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

    def _starves(self, one: Pending, now_s: float) -> bool:
        return now_s - one.since_s > self._rules.max_wait_s

    def _running(self, trial: int, held: _Running, now_s: float) -> Demand:
        return self._claim(trial, held.wish, held.low, held.high, held.slots, now_s - held.changed_s)

    def _asking(self, one: Pending, now_s: float) -> Demand:
        return self._claim(one.trial, 0, one.low, one.high, one.slots, max(now_s - one.since_s, 0.0))

    def _claim(self, trial: int, current: int, low: int, high: int, slots: int | None, since_s: float) -> Demand:
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
