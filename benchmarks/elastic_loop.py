"""A small event loop over simulated trials: the search and its early stopping are elastune's, who gets GPUs differs."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from elastic_model import SAMPLES, SLOTS, Model

from elastune.core.run import Config
from elastune.drive.broker import Broker, Grant, Waiting
from elastune.drive.worth import standing
from elastune.journal.records import Reported, TrialFinished
from elastune.search.schedule import Child, Fresh, Glimpse, Resume, Schedule
from elastune.search.suggest import Suggester


class Sharer(Protocol):
    """What of a ``Broker`` the loop needs."""

    def started(self, trial: int, workers: int, low: int, high: int, now_s: float, slots: int | None = None) -> None: ...

    def granted(self, grant: Grant, now_s: float) -> None: ...

    def paused(self, trial: int, now_s: float) -> None: ...

    def ended(self, trial: int, now_s: float) -> None: ...

    def reported(self, trial: int, report: Reported, workers: int, now_s: float) -> None: ...

    def regrouped(self, trial: int, workers: int, pause_s: float, now_s: float) -> None: ...

    def ranked(self, worth: dict[int, float]) -> None: ...

    def grants(self, now_s: float, waiting: Sequence[Waiting] = (), supply: bool = False) -> list[Grant]: ...


@dataclass
class Fixed:
    """Every trial has ``base`` workers; with ``doubling`` (RASDA's rule) twice as many for every rung it has passed.

    Where fewer are free a trial goes on with what is free, at least ``base``, and grows as soon as it can.
    """

    workers: int
    base: int
    rungs: tuple[int, ...] = ()
    _has: dict[int, int] = field(default_factory=dict)
    _epoch: dict[int, int] = field(default_factory=dict)

    def started(self, trial: int, workers: int, low: int, high: int, now_s: float, slots: int | None = None) -> None:
        self._has[trial] = workers

    def granted(self, grant: Grant, now_s: float) -> None:
        self._has[grant.trial] = grant.after

    def paused(self, trial: int, now_s: float) -> None:
        self._has.pop(trial, None)

    ended = paused

    def reported(self, trial: int, report: Reported, workers: int, now_s: float) -> None:
        self._epoch[trial] = report.epoch

    def regrouped(self, trial: int, workers: int, pause_s: float, now_s: float) -> None:
        pass

    def ranked(self, worth: dict[int, float]) -> None:
        pass

    def grants(self, now_s: float, waiting: Sequence[Waiting] = (), supply: bool = False) -> list[Grant]:
        free = self.workers - sum(self._has.values())
        found = []
        asking = [(one.trial, 0) for one in waiting if not one.fresh]
        asking += sorted(self._has.items(), key=lambda has: -self._epoch.get(has[0], 0)) if self.rungs else []
        asking += [(one.trial, 0) for one in waiting if one.fresh]
        for trial, has in asking:
            wanted = self.base * 2 ** sum(self._epoch.get(trial, 0) >= rung for rung in self.rungs)
            after = min(wanted, self.workers, has + free)
            if after > has and after >= self.base:
                free -= after - has
                found.append(Grant(trial, has, after, ""))
        return found


@dataclass
class _Trial:
    config: Config
    workers: int = 0
    done: float = 0.0  # epochs, parts counted
    trained_s: float = 0.0
    at_s: float = 0.0  # from when on it trains, or trained last
    plan: int = 0
    stop: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a study came to: (seconds, GPU-seconds by then, error, time) of each trial that ended, in order."""

    ends: list[tuple[float, float, float, float]]
    seconds: float
    gpu_seconds: float
    resizes: int
    trials: int
    epochs: float

    def until(self, reached: int) -> tuple[float, float]:
        return self.ends[reached][:2]


class Study:
    """One simulated study. ``trials``: how many new ones may begin."""

    def __init__(
        self, model: Model, suggester: Suggester, schedule: Schedule, sharer: Sharer, trials: int, high: int
    ) -> None:
        self.model, self.suggester, self.schedule, self.sharer = model, suggester, schedule, sharer
        self.most, self.high = trials, high
        self.now_s = 0.0
        self.gpu_s = 0.0
        self.resizes = 0
        self.trials: dict[int, _Trial] = {}
        self.running: dict[int, None] = {}
        self.events: list[tuple[float, int, int, int]] = []
        self.order = 0
        self.ends: list[tuple[float, float, float, float]] = []
        self.finished: dict[int, tuple[float, float]] = {}
        self.waiting: Waiting | None = None
        self.pool = []
        self.worth = standing

    def run(self, enough: float = math.inf) -> Outcome:
        """To its end, or until ``enough`` seconds."""
        self.share()
        while self.events and self.now_s < enough:
            at, _, number, plan = heapq.heappop(self.events)
            if self.trials[number].plan == plan and number in self.running:
                self.advance(at)
                self.epoch(number)
        epochs = sum(trial.done for trial in self.trials.values())
        return Outcome(self.ends, self.now_s, self.gpu_s, self.resizes, len(self.trials), epochs)

    def advance(self, at: float) -> None:
        self.gpu_s += (at - self.now_s) * sum(self.trials[number].workers for number in self.running)
        self.now_s = at

    def epoch(self, number: int) -> None:
        """A running trial has completed an epoch."""
        trial = self.trials[number]
        self.settle(trial)
        trial.done = epoch = round(trial.done)
        whole = self.model.epochs(trial.config, None)
        error, clock = self.model.metrics(trial.config, 0, epoch).values()
        report = Reported(epoch, epoch * 16, epoch * SAMPLES, trial.trained_s, {"error": error}, epochs=whole)
        self.sharer.reported(number, report, trial.workers, self.now_s)
        why = self.schedule.reported(Glimpse(number, epoch, whole, (error, clock)))
        if epoch >= whole:
            del self.running[number]
            self.ends.append((self.now_s, self.gpu_s, error, clock))
            self.finished[number] = (error, clock)
            self.schedule.ended(number, (error, clock))
            values = {"error": error, "time": clock}
            if self.suggester is not None:
                self.suggester.tell(number, TrialFinished(number, "complete", values=values))
            self.sharer.ended(number, self.now_s)
        elif why:
            del self.running[number]
            self.schedule.paused(number, epoch)
            self.sharer.paused(number, self.now_s)
        else:
            self.plan(number)
        if why or epoch >= whole or epoch in (2, 6, 18):
            self.share()

    def share(self) -> None:
        """Hand out workers until nobody is to change any more."""
        points = {**self.schedule.estimates(), **self.finished} if isinstance(self.sharer, Broker) else {}
        while True:
            fresh = len(self.trials) < self.most
            if self.waiting is None:
                self.waiting = self.next(fresh)
            done = {n: round(trial.done) for n, trial in self.trials.items() if n in self.running}
            if self.waiting and not self.waiting.fresh:
                done[self.waiting.trial] = round(self.trials[self.waiting.trial].done)
            self.sharer.ranked(self.worth(points, done))
            more = len(self.trials) + 1 < self.most
            grants = self.sharer.grants(self.now_s, [self.waiting] if self.waiting else [], more)
            for grant in grants:
                self.apply(grant)
            if not grants:
                return

    def next(self, fresh: bool) -> Waiting | None:
        match self.schedule.next(fresh):
            case Resume(trial=number):
                return Waiting(number, 1, self.high, self.now_s, fresh=False, slots=SLOTS)
            case Fresh():
                return Waiting(len(self.trials), 1, self.high, self.now_s, slots=SLOTS)
            case Child():
                raise AssertionError("this benchmark has no children")
        return None

    def apply(self, grant: Grant) -> None:
        number = grant.trial
        if grant.before == 0:
            assert self.waiting is not None
            if self.waiting.fresh:
                number = self.begin()
            else:
                self.schedule.resumed(number)
            self.waiting = None
            trial = self.trials[number]
            trial.workers, trial.at_s = grant.after, self.now_s + self.model.start_s
            self.running[number] = None
            self.sharer.started(number, grant.after, 1, self.high, self.now_s, SLOTS)
        else:
            trial = self.trials[number]
            self.settle(trial)
            trial.workers = grant.after
            trial.at_s = max(trial.at_s, self.now_s) + self.model.resize_pause_s
            self.resizes += 1
            self.sharer.granted(grant, self.now_s)
            self.sharer.regrouped(number, grant.after, self.model.resize_pause_s, self.now_s)
        self.plan(number)

    def begin(self) -> int:
        if self.suggester is None:
            config = self.pool[len(self.trials)]
        else:
            for known, values in self.schedule.estimates().items():
                self.suggester.estimate(known, values, 0.0)
            asked = self.suggester.ask()
            assert asked is not None
            config = asked.values
        number = len(self.trials)
        self.trials[number] = _Trial(config)
        self.schedule.started(number, {})
        return number

    def settle(self, trial: _Trial) -> None:
        """Count what it has trained up to now."""
        passed = self.now_s - trial.at_s
        if passed > 0:
            epoch = math.floor(trial.done + 1e-9) + 1
            trial.done += passed / self.model.epoch_s(trial.config, trial.workers, epoch)
            trial.trained_s += passed
            trial.at_s = self.now_s

    def plan(self, number: int) -> None:
        """When it completes its next epoch."""
        trial = self.trials[number]
        epoch = math.floor(trial.done + 1e-9) + 1
        left = epoch - trial.done
        trial.plan += 1
        self.order += 1
        at = max(trial.at_s, self.now_s) + left * self.model.epoch_s(trial.config, trial.workers, epoch)
        heapq.heappush(self.events, (at, self.order, number, trial.plan))


def brokered(workers: int, **more: float) -> Broker:
    return Broker(workers, **more)  # type: ignore[arg-type]


def points(outcome: Outcome) -> np.ndarray:
    return np.array([end[2:] for end in outcome.ends]).reshape(-1, 2)
