"""What a journal records of one run, or of one study with its trials. It adds nothing of its own.

Every table, figure and explanation starts from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from elastune.core.formatting import plain
from elastune.core.journal.folds import TrialSummary, fold
from elastune.core.journal.records import (
    ChangesAccepted,
    Entry,
    FrontierFound,
    LayersDivided,
    PhasesPlanned,
    Reported,
    RunFailed,
    RunFinished,
    RunStarted,
    StudyFinished,
    StudyStarted,
    TimesFitted,
    TrialFinished,
    TrialStarted,
)
from elastune.tuning.search.front import nondominated
from elastune.tuning.search.objective import Floats
from elastune.tuning.study.trials import Trial, outcomes

NEARLY = 0.05  # a trial whose average is nearer to its first worker count shows that count


@dataclass(frozen=True)
class RunOverview:
    """One run: its newest start, its reports in order, and its end if it has one.

    ``divided``: which part of its model the tensor axis divides, if the mesh has that axis.
    """

    started: RunStarted
    reports: tuple[Reported, ...] = ()
    finished: RunFinished | None = None
    failed: RunFailed | None = None
    divided: LayersDivided | None = None


@dataclass(frozen=True)
class TrialOverview:
    """One trial: its records (``life``), and its ``outcome`` if it is over or paused."""

    life: TrialSummary
    outcome: Trial | None = None

    @property
    def trial(self) -> int:
        return self.life.number

    @property
    def started(self) -> TrialStarted:
        return self.life.started

    @property
    def finished(self) -> TrialFinished | None:
        return self.life.finished

    @property
    def reports(self) -> tuple[Reported, ...]:
        return tuple(report for report, _ in self.life.reports)

    @property
    def phase(self) -> str:
        return self.started.phase

    @property
    def settings(self) -> dict[str, Any]:
        """Its configuration, with the sync strategy and the policy if the study chose them."""
        return config_and_sync(self.started.config, self.started.execution)

    @property
    def workers(self) -> str:
        """Its worker count, or the average if the count changed. "1 for 4": one worker emulates four."""
        workers, emulated = self._own_workers, self.started.tags.get("for_workers")
        return workers if emulated in (None, self.started.execution.get("workers")) else f"{workers} for {emulated}"

    @property
    def _own_workers(self) -> str:
        start_workers, outcome = self.started.execution.get("workers", ""), self.outcome
        if (
            isinstance(start_workers, int)
            and outcome is not None
            and outcome.seconds > 0
            and outcome.worker_seconds > 0
        ):
            average = outcome.worker_seconds / outcome.seconds
            return str(start_workers) if abs(average - start_workers) < NEARLY * start_workers else f"{average:.1f}"
        return str(start_workers)

    @property
    def mechanism(self) -> str:
        """The mechanism that placed its model on workers, with the mesh."""
        return mechanism_text(self.started.execution)

    @property
    def complete(self) -> bool:
        return self.finished is not None and self.finished.state == "complete"

    @property
    def paused(self) -> Trial | None:
        """Its outcome so far, if it is paused."""
        return self.outcome if self.outcome is not None and self.outcome.state == "paused" else None

    def value(self, name: str) -> float | None:
        """Its objective ``name``, or else its metric of that name; None unless the trial is complete and has one."""
        if self.finished is None or not self.complete:
            return None
        return self.finished.values.get(name, self.finished.metrics.get(name))


def config_and_sync(config: Mapping[str, Any], execution: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the sync strategy, its schedule and the policy of ``execution``, unless these are defaults."""
    defaults = {"sync_schedule": "", "policy": "none"}
    chosen = {
        name: execution[name]
        for name in ("sync", *defaults)
        if name in execution and execution[name] != defaults.get(name)
    }
    return {**config, **chosen}


def mechanism_text(execution: Mapping[str, Any]) -> str:
    """The mechanism in ``execution`` with its options: "tensor+zero, data=2,tensor=2"."""
    stage = execution.get("zero_stage")
    words = [
        execution.get("mechanism", "–"),
        f"stage {stage}" if stage is not None else "",
        execution.get("mesh") or "",
    ]
    words += [execution["schedule"]] if "schedule" in execution else []
    words += ["offload"] if execution.get("offload") else []
    words += [execution["compress"]] if execution.get("compress") else []
    return plain(", ".join(str(word) for word in words if word), 80)


@dataclass(frozen=True)
class StudyOverview:
    """One study or frontier: its request, its trials in the order they started, and its answer (``frontier``)."""

    started: StudyStarted
    trials: tuple[TrialOverview, ...] = ()
    times: TimesFitted | None = None
    phases: PhasesPlanned | None = None
    frontier: FrontierFound | None = None
    finished: StudyFinished | None = None
    order: tuple[int, ...] = field(default=())
    """Trials in the order they ended."""
    since: int = 0
    """Trials with lower numbers began before an accepted change."""
    accepted: tuple[Entry, ...] = ()
    """The changes that were accepted."""

    @property
    def settings(self) -> dict[str, Any]:
        return self.started.settings

    @property
    def price(self) -> float:
        """Of a worker-hour."""
        return float(self.settings.get("price_per_worker_hour", 1.0))

    @property
    def is_frontier(self) -> bool:
        return self.frontier is not None or self.settings.get("kind") == "frontier"

    @property
    def objectives(self) -> dict[str, str]:
        """Name -> "max" or "min", as requested or, for a frontier, as found."""
        requested = self.settings.get("objectives")
        if isinstance(requested, dict) and requested:
            return {
                str(name): "min" if str(direction).startswith("min") else "max" for name, direction in requested.items()
            }
        return {self.frontier.quality: self.frontier.direction} if self.frontier else {}

    @property
    def ended(self) -> tuple[TrialOverview, ...]:
        """Trials that ended, in the order they did."""
        by_number = {trial.trial: trial for trial in self.trials}
        return tuple(by_number[trial] for trial in self.order)


def gather_run(entries: Iterable[Entry]) -> RunOverview | None:
    """The run in ``entries``, or None. Reports beyond the step that a later attempt resumed from are left out."""
    run: RunOverview | None = None
    reports: list[Reported] = []
    for entry in entries:
        match entry.record:
            case RunStarted() as started:
                kept = started.resumed_step if started.resumed_step is not None else -1
                reports = [report for report in reports if report.step <= kept]
                run = RunOverview(started)
            case Reported() as report:
                reports.append(report)
            case RunFinished() as finished if run:
                run = replace(run, finished=finished)
            case RunFailed() as failed if run:
                run = replace(run, failed=failed)
            case LayersDivided() as divided if run:
                run = replace(run, divided=divided)
            case _:
                pass
    return replace(run, reports=tuple(reports)) if run else None


def gather_study(entries: Sequence[Entry]) -> StudyOverview | None:
    """The study in ``entries``, or None. After a resumption its newest request counts, and it has not finished."""
    study: StudyOverview | None = None
    for entry in entries:
        match entry.record:
            case StudyStarted() as request:
                study = replace(study, started=request, finished=None) if study else StudyOverview(request)
            case TimesFitted() as times if study:
                study = replace(study, times=times)
            case PhasesPlanned() as phases if study:
                study = replace(study, phases=phases)
            case FrontierFound() as frontier if study:
                study = replace(study, frontier=frontier)
            case StudyFinished() as end if study:
                study = replace(study, finished=end)
            case _:
                pass
    if study is None:
        return None
    table = fold(entries)
    ended = {trial.number: trial for trial in outcomes(table, list(study.objectives), study.price)}
    trials = (TrialOverview(life, ended.get(number)) for number, life in table.trials.items())
    accepted = tuple(entry for entry in entries if isinstance(entry.record, ChangesAccepted))
    return replace(study, trials=tuple(trials), order=tuple(table.ended), since=table.since, accepted=accepted)


def oriented_values(
    trials: Iterable[TrialOverview], objectives: Mapping[str, str]
) -> tuple[list[TrialOverview], Floats]:
    """The trials with a finite value of every objective, and these values, shape (n, k), smaller is better."""
    valued: list[TrialOverview] = []
    rows: list[list[float]] = []
    for trial in trials:
        row = [
            (-1.0 if direction == "max" else 1.0) * value
            for name, direction in objectives.items()
            if (value := trial.value(name)) is not None and math.isfinite(value)
        ]
        if len(row) == len(objectives):
            valued.append(trial)
            rows.append(row)
    return valued, np.array(rows, dtype=float).reshape(len(rows), len(objectives))


def front_trials(study: StudyOverview) -> tuple[int, ...]:
    """Numbers of the complete trials that no other trial dominates, as ``Study.front``; empty without objectives.

    Trials with given settings (phase "member") count, too. Of a frontier's phases only the search counts.
    """
    if not study.objectives:
        return ()
    candidates = (t for t in study.trials if t.trial >= study.since and t.phase in ("search", "member"))
    trials, points = oriented_values(candidates, study.objectives)
    return tuple(trial.trial for trial, on in zip(trials, nondominated(points), strict=True) if on)
