"""The trainings of a frontier by settings, seed, slots and way: each is made once, whichever phase asks first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastune.core.run import Config, Means
from elastune.frontier.ways import Recipe, Way, read_way, shown
from elastune.journal.records import Reported, RunFinished, TrialFinished, TrialStarted
from elastune.journal.trials import TrialLife, TrialTable

NOISE_SCALE = "noise_scale"
"""The monitor of a training whose quality counts, and its signal."""

TIMED = ("calibrate", "throughput")
"""The phases that measure step times, and no quality."""

CREW = "crew"
"""The tag of a trial of the search whose space chose for whom it is: that crew's means."""

FOR_WORKERS = "for_workers"
"""The tag of a trial that speaks for others than its workers or slots: for how many parts of a batch."""

REFUSED = "refused: "


@dataclass(frozen=True)
class Training:
    """One training from start to end, and what it reported on the way. ``result.state`` tells whether it counts.

    ``slots``: one for each of the workers that it speaks for, however many trained it, or more for learners. ``crew``:
    that which the space chose; None: it chose none. ``told_parts``: for how many parts of a batch, where not ``slots``.
    """

    trial: int
    config: Config
    seed: int
    slots: int
    phase: str
    reports: tuple[Reported, ...]
    result: TrialFinished
    way: Way = field(default_factory=Way)
    crew: Means | None = None
    told_parts: int | None = None

    @property
    def parts(self) -> int:
        """Into how many parts those cut a batch for whom it was trained."""
        return self.slots if self.told_parts is None else self.told_parts

    @property
    def recipe(self) -> Recipe:
        """What was trained, whoever it speaks for."""
        return Recipe(self.config, self.way)

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
    """Worker-seconds that a trial took here, and its training; None where it paused and rests."""

    worker_seconds: float
    started: TrialStarted
    training: Training | None


def name_of(config: Config) -> str:
    """What makes two configurations the same."""
    return json.dumps(config, sort_keys=True)


def key(config: Config, seed: int, told: Mapping[str, Any]) -> str:
    """What makes two trainings the same: all that decides their result. ``told``: as ``Way.told``, of who trains."""
    return json.dumps([config, seed, shown(told)], sort_keys=True)


class Trainings:
    """A view of the trials in ``table`` whose quality counts: not of those that measure step times, nor of those that
    began before an accepted change of the program."""

    def __init__(self, table: TrialTable) -> None:
        self._table = table
        self._done: dict[str, Training] = {}
        self._counted = -1

    @property
    def done(self) -> dict[str, Training]:
        """Those that ended, by ``key``, in the order they did."""
        if self._counted != len(self._table.ended):
            self._counted, self._done = len(self._table.ended), {}
            for life in (self._table.trials[n] for n in self._table.ended if n >= self._table.since):
                if life.started.phase not in TIMED and not _refused(life):
                    self._done.setdefault(_key_of(life.started), training_of(life))
        return self._done

    @property
    def searched(self) -> list[Spent]:
        """All that the search began and does not run just now, in the order in which it ended or paused."""
        lives = [life for life in self._lives if life.started.phase == "search"]
        resting = sorted((life for life in lives if life.state != "running"), key=lambda life: life.last_s)
        return [
            Spent(life.worker_seconds, life.started, training_of(life) if life.state == "over" else None)
            for life in resting
        ]

    def open(self, phase: str) -> set[str]:
        """The keys of those of ``phase`` that run, or will go on."""
        lives = [life.started for life in self._lives if life.state != "over"]
        return {_key_of(started) for started in lives if started.phase == phase}

    @property
    def _lives(self) -> list[TrialLife]:
        return [life for life in self._table.trials.values() if life.number >= self._table.since]


def training_of(life: TrialLife) -> Training:
    """A trial that is over."""
    started, finished = life.started, life.finished
    assert finished is not None
    reports = tuple(report for report, _ in life.reports)
    means, way = read_way(started.means)
    chosen, parts = started.tags.get(CREW), started.tags.get(FOR_WORKERS)
    return Training(
        life.number,
        started.config,
        started.seed,
        means.num_slots,
        started.phase,
        reports,
        finished,
        way,
        None if chosen is None else Means.from_json(chosen),
        parts,
    )


def _key_of(started: TrialStarted) -> str:
    return key(started.config, started.seed, started.means)


def _refused(life: TrialLife) -> bool:
    """Whether it never ran, since its means cannot be had together: another one may then be like it."""
    return life.finished is not None and life.finished.reason.startswith(REFUSED)
