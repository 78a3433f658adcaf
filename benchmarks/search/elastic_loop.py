"""A small event loop over simulated trials: search and early stopping are elastune's own, who gets GPUs differs.

``elastune.tuning.study`` has no rule that doubles, nor should it, so the loop is here; the ``Broker`` and the
``Schedule`` are the classes that a study uses.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from benchmarks.search.elastic_model import SLOTS, Floats, Model

from elastune.core.journal.records import Reported
from elastune.core.run import Config
from elastune.tuning.search.schedule import IntermediateResult, NewTrial, Resume, Schedule
from elastune.tuning.study.rebalancer import Allocation, Broker, WaitingTrial, rungs_passed, trial_priority
from elastune.tuning.study.trial_progress import HeldTrials

STEPS = 1000  # of an epoch
LOOKS_S = (5.0, 20.0)  # after a trial's GPUs have changed: how many steps has it done?


class Sharer(Protocol):
    """What of a ``Broker`` the loop needs."""

    def started(
        self, trial: int, workers: int, low: int, high: int, now_s: float, slots: int | None = None
    ) -> None: ...

    def granted(self, grant: Allocation, now_s: float) -> None: ...

    def paused(self, trial: int, now_s: float) -> None: ...

    def ended(self, trial: int, now_s: float) -> None: ...

    def reported(self, trial: int, report: Reported, workers: int, now_s: float) -> None: ...

    def stepped(self, trial: int, step: int, workers: int, now_s: float) -> None: ...

    def regrouped(self, trial: int, workers: int, pause_s: float, now_s: float) -> None: ...

    def ranked(self, worth: Mapping[int, float]) -> None: ...

    def grants(self, now_s: float, waiting: Sequence[WaitingTrial] = (), supply: bool = False) -> list[Allocation]: ...


@dataclass
class Rule:
    """Every trial has ``base`` GPUs; twice as many for each of ``rungs`` (epochs) that it has passed.

    With rungs it is RASDA's rule, "double the survivors"; trials that have passed more go first. Where fewer are free,
    a trial goes on with those, at least ``base``, and grows live as soon as it can. GPUs are never taken back.
    """

    gpus: int
    base: int
    rungs: tuple[int, ...] = ()
    _has: dict[int, int] = field(default_factory=dict)
    _epoch: dict[int, int] = field(default_factory=dict)

    def started(self, trial: int, workers: int, low: int, high: int, now_s: float, slots: int | None = None) -> None:
        self._has[trial] = workers

    def granted(self, grant: Allocation, now_s: float) -> None:
        self._has[grant.trial] = grant.after

    def paused(self, trial: int, now_s: float) -> None:
        self._has.pop(trial, None)

    def ended(self, trial: int, now_s: float) -> None:
        self._has.pop(trial, None)

    def reported(self, trial: int, report: Reported, workers: int, now_s: float) -> None:
        self._epoch[trial] = report.epoch

    def stepped(self, trial: int, step: int, workers: int, now_s: float) -> None:
        pass

    def regrouped(self, trial: int, workers: int, pause_s: float, now_s: float) -> None:
        pass

    def ranked(self, worth: Mapping[int, float]) -> None:
        pass

    def grants(self, now_s: float, waiting: Sequence[WaitingTrial] = (), supply: bool = False) -> list[Allocation]:
        free = self.gpus - sum(self._has.values())
        results = []
        asking = [(one.trial, 0) for one in waiting if not one.fresh]
        asking += sorted(self._has.items(), key=lambda has: -self._epoch.get(has[0], 0)) if self.rungs else []
        asking += [(one.trial, 0) for one in waiting if one.fresh]
        for trial, has in asking:
            wanted = self.base * 2 ** sum(self._epoch.get(trial, 0) >= rung for rung in self.rungs)
            after = min(wanted, self.gpus, has + free)
            if after > has and after >= self.base:
                free -= after - has
                results.append(Allocation(trial, has, after, ""))
        return results


@dataclass
class _Trial:
    """``done``: epochs, parts counted. ``at_s``: from when on it trains, or when that was last counted.

    ``plan``: number of the newest plan for the end of its epoch; ``begun``: how often its GPUs changed.
    """

    config: Config
    gpus: int = 0
    done: float = 0.0
    trained_s: float = 0.0
    at_s: float = 0.0
    plan: int = 0
    begun: int = 0

    @property
    def steps(self) -> int:
        return math.floor(self.done * STEPS + 1e-6)

    @property
    def epoch(self) -> int:
        """The one it is in, from 1."""
        return math.floor(self.done + 1e-9) + 1


@dataclass(frozen=True)
class End:
    """A trial was fully trained, at second ``at_s`` of the study, which had used ``gpu_s`` by then."""

    at_s: float
    gpu_s: float
    point: tuple[float, float]


class Study:
    """One simulated study of the configurations ``pool``, each of which is begun at some time, in their order.

    ``holding``: which trials wait for idle GPUs; None: nobody.
    """

    def __init__(
        self,
        model: Model,
        pool: Sequence[Config],
        schedule: Schedule,
        sharer: Sharer,
        high: int,
        holding: HeldTrials | None = None,
    ) -> None:
        self.model, self.pool, self.schedule, self.sharer = model, pool, schedule, sharer
        self.high = high
        self.holding = holding
        self.now_s = self.gpu_s = 0.0
        self.resizes = self.held = 0
        self.ends: list[End] = []
        self._trials: list[_Trial] = []
        self._running: dict[int, None] = {}
        self._events: list[tuple[float, int, int, bool]] = []  # when, of which trial, of which plan, only a look?
        self._ended: dict[int, tuple[float, float]] = {}
        self._waiting: WaitingTrial | None = None

    @property
    def epochs(self) -> float:
        """Epochs that all trials have trained."""
        return sum(trial.done for trial in self._trials)

    @property
    def unended(self) -> int:
        """Trials that early stopping has not paused and that have not ended, once the study is over: there are none."""
        return len(self._running) + (len(self.holding.waiting) if self.holding is not None else 0)

    def run(self) -> None:
        """To its end."""
        self._share()
        while self._events:
            at_s, number, plan, look = heapq.heappop(self._events)
            trial = self._trials[number]
            if number not in self._running or plan != (trial.begun if look else trial.plan):
                continue
            self.gpu_s += (at_s - self.now_s) * sum(self._trials[running].gpus for running in self._running)
            self.now_s = at_s
            if look:
                self._settle(trial)
                self.sharer.stepped(number, trial.steps, trial.gpus, self.now_s)
                self._share()
            else:
                self._epoch(number)

    def _epoch(self, number: int) -> None:
        """A running trial has completed an epoch."""
        trial = self._trials[number]
        self._settle(trial)
        trial.done = epoch = round(trial.done)
        planned = self.model.epochs(trial.config, None)
        metrics = self.model.metrics(trial.config, 0, epoch)
        point = metrics["error"], metrics["time"]
        samples = epoch * STEPS * int(trial.config["batch_size"])  # type: ignore[arg-type]
        report = Reported(epoch, epoch * STEPS, samples, trial.trained_s, metrics, epochs=planned)
        self.sharer.stepped(number, report.step, trial.gpus, self.now_s)
        self.sharer.reported(number, report, trial.gpus, self.now_s)
        why = self.schedule.reported(IntermediateResult(number, epoch, planned, point))
        if epoch >= planned:
            del self._running[number]
            self.ends.append(End(self.now_s, self.gpu_s, point))
            self._ended[number] = point
            self.schedule.ended(number, point)
            self.sharer.ended(number, self.now_s)
        elif why:
            del self._running[number]
            self.schedule.paused(number, epoch)
            self.sharer.paused(number, self.now_s)
        elif self.holding is not None and self.holding.why(number, report, self.now_s):
            del self._running[number]
            self.held += 1
            self.holding.holds(number, self.now_s)
            self.sharer.paused(number, self.now_s)
        else:
            self._plan(number)
        self._share()

    def _share(self) -> None:
        """Hand out GPUs until nobody is to change any more."""
        points = {**self.schedule.estimates(), **self._ended} if isinstance(self.sharer, Broker) else {}
        while True:
            if self._waiting is None or self._waiting.last:
                self._waiting = self._next()
            asking = [self._waiting] if self._waiting else []
            known = [*self._running, *(one.trial for one in asking if not one.fresh)]
            self.sharer.ranked(trial_priority(points, {number: self._rungs(self._trials[number]) for number in known}))
            grants = self.sharer.grants(self.now_s, asking, len(self._trials) + 1 < len(self.pool))
            for grant in grants:
                self._apply(grant)
            if not grants:
                return

    def _rungs(self, trial: _Trial) -> int:
        """The rungs that a trial has passed."""
        return rungs_passed(trial.epoch - 1, self.model.epochs(trial.config, None))

    def _next(self) -> WaitingTrial | None:
        match self.schedule.next(len(self._trials) < len(self.pool)):
            case Resume(trial=number):
                return WaitingTrial(number, 1, self.high, self.now_s, fresh=False, slots=SLOTS)
            case NewTrial():
                return WaitingTrial(len(self._trials), 1, self.high, self.now_s, slots=SLOTS)
        for number in self.holding.waiting if self.holding is not None else ():
            return WaitingTrial(number, 1, self.high, self.now_s, fresh=False, slots=SLOTS, last=True)
        return None

    def _apply(self, grant: Allocation) -> None:
        number = grant.trial
        if grant.before == 0:
            if number == len(self._trials):
                self._trials.append(_Trial(self.pool[number]))
                self.schedule.started(number, {})
            elif self.holding is not None and number in self.holding.waiting:
                self.holding.released(number)
            else:
                self.schedule.resumed(number)
            self._waiting = None
            self._running[number] = None
            self._trials[number].at_s = self.now_s + self.model.start_s
            self.sharer.started(number, grant.after, 1, self.high, self.now_s, SLOTS)
        else:
            trial = self._trials[number]
            self._settle(trial)
            trial.at_s = max(trial.at_s, self.now_s) + self.model.resize_pause_s
            self.resizes += 1
            self.sharer.granted(grant, self.now_s)
            self.sharer.regrouped(number, grant.after, self.model.resize_pause_s, self.now_s)
        trial = self._trials[number]
        trial.gpus = grant.after
        trial.begun += 1
        self._plan(number)
        for look_s in LOOKS_S if isinstance(self.sharer, Broker) else ():
            heapq.heappush(self._events, (max(trial.at_s, self.now_s) + look_s, number, trial.begun, True))

    def _settle(self, trial: _Trial) -> None:
        """Count what it has trained up to now."""
        passed_s = self.now_s - trial.at_s
        if passed_s > 0:
            trial.done += passed_s / self.model.epoch_s(trial.config, trial.gpus, trial.epoch)
            trial.trained_s += passed_s
            trial.at_s = self.now_s

    def _plan(self, number: int) -> None:
        """When it completes its epoch."""
        trial = self._trials[number]
        trial.plan += 1
        left_s = (trial.epoch - trial.done) * self.model.epoch_s(trial.config, trial.gpus, trial.epoch)
        heapq.heappush(self._events, (max(trial.at_s, self.now_s) + left_s, number, trial.plan, False))


def points(ends: Sequence[End]) -> Floats:
    """What was found, shape (n, 2)."""
    return np.array([end.point for end in ends], dtype=float).reshape(-1, 2)
