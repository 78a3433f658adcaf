"""A study in small on a virtual clock: ask, train, report, pause, resume. ``multi_fidelity.py`` says what it is for."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from benchmarks.search.rivals import Search, make_search
from benchmarks.search.sampler import EPOCHS, OBJECTIVES, PARAMETERS, Floats, Surrogate, space

from elastune.core.journal.records import TrialFinished
from elastune.tuning.search.front import hypervolume
from elastune.tuning.search.schedule import ForkTrial, IntermediateResult, NewTrial, Resume, Schedule
from elastune.tuning.search.suggester import Suggester

WORKERS = 8


@dataclass
class Training:
    """A trial: what it shows after each epoch, shape (52, 2), and how far it is."""

    curve: Floats
    epoch: int = 0
    reason: str = ""


@dataclass
class Outcome:
    """What a study reached: after how many full trainings' worth each completed one came, and its point."""

    points: list[Floats] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    asked: int = 0
    cpu_s: float = 0.0

    def reached(self, count: float, reference: Floats, whole: float) -> float:
        points = [point for point, spent in zip(self.points, self.spent, strict=True) if spent <= count]
        return hypervolume(np.array(points).reshape(-1, 2), reference) / whole


class Study:
    """The study loop in small: ask, train on a virtual clock, report, pause, resume."""

    def __init__(self, surrogate: Surrogate, sampler: str, schedule: Schedule, seed: int) -> None:
        self._surrogate = surrogate
        self._schedule = schedule
        self._suggester: Suggester | Search = make_search(space, OBJECTIVES, sampler, seed)
        self._trainings: dict[int, Training] = {}
        self._heap: list[tuple[float, int]] = []  # when which trial completes its next epoch
        self._epochs = 0
        self.outcome = Outcome()

    def run(self, trainings: float) -> Outcome:
        start, now = time.process_time(), 0.0
        while self._epochs < trainings * EPOCHS:
            while len(self._heap) < WORKERS:
                self._fill(now)
            now, number = heapq.heappop(self._heap)
            self._epoch(now, number)
        self.outcome.cpu_s = time.process_time() - start
        return self.outcome

    def _fill(self, now: float) -> None:
        match self._schedule.next(fresh=True):
            case Resume(number):
                self._schedule.resumed(number)
                self._trainings[number].reason = ""
            case NewTrial():
                for open_trial, values in self._schedule.estimates().items():
                    self._suggester.estimate(open_trial, values)
                suggestion = self._suggester.ask()
                assert suggestion is not None
                number = suggestion.number
                self._schedule.started(number, suggestion.params)
                self._trainings[number] = Training(self._curve(suggestion.values))
                self.outcome.asked += 1
            case ForkTrial() | None as other:
                raise ValueError(f"no child or pause was expected, but {other}")
        self._go_on(now, number)

    def _curve(self, values: dict[str, Any]) -> Floats:
        rows = np.tile([float(values[p.name]) for p in PARAMETERS], (EPOCHS, 1))
        rows[:, 0] = np.arange(1, EPOCHS + 1)
        return self._surrogate(rows)

    def _go_on(self, now: float, number: int) -> None:
        training = self._trainings[number]
        clock = np.maximum.accumulate(training.curve[:, 1])  # the surrogate's time falls back at some second epochs
        began = clock[training.epoch - 1] if training.epoch else 0.0
        heapq.heappush(self._heap, (now + clock[training.epoch] - began, number))

    def _epoch(self, now: float, number: int) -> None:
        training = self._trainings[number]
        training.epoch += 1
        self._epochs += 1
        point = training.curve[training.epoch - 1]
        values = (float(point[0]), float(point[1]))
        reason = self._schedule.reported(IntermediateResult(number, training.epoch, EPOCHS, values))
        if training.epoch == EPOCHS:
            self._schedule.ended(number, values)
            named = {o.name: v for o, v in zip(OBJECTIVES, values, strict=True)}
            self._suggester.tell(number, TrialFinished(number, "complete", values=named))
            self.outcome.points.append(point)
            self.outcome.spent.append(self._epochs / EPOCHS)
        elif reason:
            self._schedule.paused(number, training.epoch)
        else:
            self._go_on(now, number)
