"""The trainings of a frontier by settings, seed and slots: each is made once, whichever phase asks first."""

from __future__ import annotations

import json
from dataclasses import dataclass

from elastune.core.run import Config
from elastune.journal.records import Reported, RunFinished, TrialFinished, TrialStarted
from elastune.journal.trials import TrialLife, TrialTable

NOISE_SCALE = "noise_scale"
"""The monitor of a training whose quality counts, and its signal."""


@dataclass(frozen=True)
class Training:
    """One training from start to end, and what it reported on the way. ``result.state`` tells whether it counts.

    ``slots``: one for each of the workers that it speaks for, however many trained it.
    """

    trial: int
    config: Config
    seed: int
    slots: int
    phase: str
    reports: tuple[Reported, ...]
    result: TrialFinished

    @property
    def run(self) -> RunFinished | None:
        """How it ended, if it ended well."""
        return self.result.run

    @property
    def worker_seconds(self) -> float:
        """What it took here, of all workers together."""
        told = self.result.worker_seconds
        return self.result.seconds if told is None else told


@dataclass(frozen=True)
class Spent:
    """Worker-seconds that a trial of the search took here, and its training; None where it paused and rests."""

    worker_seconds: float
    training: Training | None


def name_of(config: Config) -> str:
    """What makes two configurations the same."""
    return json.dumps(config, sort_keys=True)


def key(config: Config, seed: int, slots: int) -> str:
    """What makes two trainings the same: all that decides their result."""
    return json.dumps([config, seed, slots], sort_keys=True)


class Trainings:
    """A view of the trials in ``table`` whose quality counts: not of those that measure step times."""

    def __init__(self, table: TrialTable) -> None:
        self._table = table
        self._done: dict[str, Training] = {}
        self._counted = -1

    @property
    def done(self) -> dict[str, Training]:
        """Those that ended, by ``key``, in the order they did."""
        if self._counted != len(self._table.ended):
            self._counted, self._done = len(self._table.ended), {}
            for life in (self._table.trials[number] for number in self._table.ended):
                if life.started.phase != "calibrate":
                    self._done.setdefault(_key_of(life.started), training_of(life))
        return self._done

    @property
    def searched(self) -> list[Spent]:
        """All that the search began and does not run just now, in the order in which it ended or paused."""
        lives = [life for life in self._table.trials.values() if life.started.phase == "search"]
        resting = sorted((life for life in lives if life.state != "running"), key=lambda life: life.last_s)
        return [Spent(life.worker_seconds, training_of(life) if life.state == "over" else None) for life in resting]

    def open(self, phase: str) -> set[str]:
        """The keys of those of ``phase`` that run, or will go on."""
        lives = [life.started for life in self._table.trials.values() if life.state != "over"]
        return {_key_of(started) for started in lives if started.phase == phase}


def training_of(life: TrialLife) -> Training:
    """A trial that is over."""
    started, finished = life.started, life.finished
    assert finished is not None
    reports = tuple(report for report, _ in life.reports)
    slots = started.means["num_slots"]
    return Training(life.number, started.config, started.seed, slots, started.phase, reports, finished)


def _key_of(started: TrialStarted) -> str:
    return key(started.config, started.seed, started.means["num_slots"])
