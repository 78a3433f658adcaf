"""The trainings of a frontier by configuration and seed: each pair is trained once, whichever phase asks first."""

from __future__ import annotations

import json
from dataclasses import dataclass

from elastune.core.run import Config
from elastune.journal.records import Reported, RunFinished, TrialFinished
from elastune.journal.trials import TrialLife, TrialTable

NOISE_SCALE = "noise_scale"
"""The monitor of a training whose quality counts, and its signal."""


@dataclass(frozen=True)
class Training:
    """One training from start to end, and what it reported on the way. ``result.state`` tells whether it counts."""

    trial: int
    config: Config
    seed: int
    phase: str
    reports: tuple[Reported, ...]
    result: TrialFinished

    @property
    def run(self) -> RunFinished | None:
        """How it ended, if it ended well."""
        return self.result.run


def key(config: Config, seed: int) -> str:
    """What makes two trainings the same."""
    return json.dumps([config, seed], sort_keys=True)


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
                    self._done.setdefault(key(life.started.config, life.started.seed), training_of(life))
        return self._done

    def open(self, phase: str) -> set[str]:
        """The keys of those of ``phase`` that run, or will go on."""
        lives = [life.started for life in self._table.trials.values() if life.state != "over"]
        return {key(started.config, started.seed) for started in lives if started.phase == phase}


def training_of(life: TrialLife) -> Training:
    """A trial that is over."""
    started, finished = life.started, life.finished
    assert finished is not None
    reports = tuple(report for report, _ in life.reports)
    return Training(life.number, started.config, started.seed, started.phase, reports, finished)
