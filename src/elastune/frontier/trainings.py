"""Trainings a frontier needs: each (configuration, seed) is run once, whichever phase asks for it first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from elastune.cluster.base import Cluster
from elastune.core.run import Adapt, Config, Means, RunSpec
from elastune.job.pool import Ended, Pool
from elastune.journal.entry import Entry
from elastune.journal.records import (
    LinkMeasured,
    Record,
    Reported,
    RunFinished,
    TrialFinished,
    TrialReported,
    TrialStarted,
)
from elastune.study.request import FrontierRequest
from elastune.study.trial_results import SYSTEM_PARAMETERS, Pricing, judge

NOISE_SCALE = "noise_scale"
"""The monitor of a training whose quality counts, and its signal."""

Phase = Literal["search", "calibrate", "naive", "confirm"]


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
    """Runs trainings, several at once, and remembers them. A resumed frontier finds the earlier ones in its journal."""

    def __init__(
        self,
        request: FrontierRequest,
        pricing: Pricing,
        cluster: Cluster,
        keep: Callable[[Record], None],
        reserve: Callable[[], int],
    ) -> None:
        self._request = request
        self._pricing = pricing
        self._keep = keep
        self._reserve = reserve
        self._pool = Pool(cluster)
        self._reports: dict[int, list[Reported]] = {}
        self._begun: dict[int, TrialStarted] = {}
        self.links: dict[int, list[LinkMeasured]] = {}
        self.done: dict[str, Training] = {}

    def replay(self, entries: Iterable[Entry]) -> None:
        """Take over what an earlier controller finished."""
        for record in (entry.record for entry in entries):
            if isinstance(record, TrialStarted):
                self._begun[record.trial] = record
            elif isinstance(record, TrialReported):
                self._reports.setdefault(record.trial, []).append(record.report)
            elif isinstance(record, TrialFinished) and record.trial in self._begun:
                self._remember(record)

    @property
    def room(self) -> bool:
        """Whether one more training could start now."""
        return self._pool.free > 0

    @property
    def running(self) -> int:
        """Trainings under way."""
        return self._pool.running

    def start(self, started: TrialStarted, means: Means, **spec: Any) -> None:
        """Start a training; there must be room."""
        self._begun[started.trial] = started
        self._keep(started)
        out = self._request.out / "trials" / f"{started.trial:05d}"
        run = RunSpec(
            self._request.program,
            out,
            started.config,
            started.seed,
            means,
            adapt=Adapt() if started.phase == "calibrate" else Adapt(monitors=(NOISE_SCALE,)),
            **{"epochs": self._request.epochs, "checkpoint_every_steps": 0, **spec},
        )
        self._pool.start(started.trial, run)

    def begin(self, config: Config, seed: int, phase: Phase, tags: dict[str, Any]) -> TrialStarted:
        """A training that no search decides, under a number of its own."""
        means = self._request.means
        return TrialStarted(self._reserve(), config, asdict(means), seed, phase, tags=tags)

    def pump(self) -> list[Training]:
        """Wait a moment; the trainings that ended."""
        heard, ended = self._pool.pump(0.5)
        for number, record in ((news.key, news.record) for news in heard):
            if isinstance(record, Reported):
                self._reports.setdefault(number, []).append(record)
                self._keep(TrialReported(number, record))
            elif isinstance(record, LinkMeasured):
                self.links.setdefault(record.workers, []).append(record)
                self._keep(record)
        return [self._finish(job) for job in ended]

    def _finish(self, job: Ended) -> Training:
        started = self._begun[job.key]
        known = {**started.config, **{name: started.means.get(name) for name in SYSTEM_PARAMETERS}}
        pricing = replace(self._pricing, constraints=()) if started.phase == "calibrate" else self._pricing
        result = judge(job.key, job, known, pricing)
        self._keep(result)
        if isinstance(job.outcome, RunFinished):
            self._pool.files.remove(job.spec.out)  # what matters is in the journal
        return self._remember(result)

    def _remember(self, result: TrialFinished) -> Training:
        started = self._begun[result.trial]
        reports = tuple(self._reports.get(result.trial, ()))
        training = Training(result.trial, started.config, started.seed, started.phase, reports, result)
        if started.phase != "calibrate":
            self.done.setdefault(key(started.config, started.seed), training)
        return training

    def all_of(
        self, wanted: Sequence[tuple[Config, int]], phase: Phase, tags: dict[str, Any], go_on: Callable[[], bool]
    ) -> None:
        """Run those of ``wanted`` that were not run yet, as many at once as there is room for, while ``go_on()``."""
        waiting = {key(config, seed): (config, seed) for config, seed in wanted if key(config, seed) not in self.done}
        todo = list(waiting.values())
        while (todo and go_on()) or self.running:
            while todo and self.room and go_on():
                config, seed = todo.pop(0)
                self.start(self.begin(config, seed, phase, tags), self._request.means)
            if self.running:
                self.pump()
            if not go_on() and self.running:
                self.abandon()
                return

    def abandon(self) -> None:
        """End what runs."""
        self._pool.abandon()
