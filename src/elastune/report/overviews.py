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
from elastune.core.journal.trials import TrialSummary, fold
from elastune.tune.search.front import nondominated
from elastune.tune.search.objective import Floats
from elastune.tune.study.trials import Trial, outcomes


@dataclass(frozen=True)
class RunOverview:
    """One run: how it (last) started, its reports in order, and its end if it has one. ``divided``: what the tensor
    axis divides of its model, where there is such an axis."""

    started: RunStarted
    reports: tuple[Reported, ...] = ()
    finished: RunFinished | None = None
    failed: RunFailed | None = None
    divided: LayersDivided | None = None


NEARLY = 0.05  # so far from a whole number a trial's workers have changed


@dataclass(frozen=True)
class TrialOverview:
    """One trial: how it went, and (``outcome``) what became of it, if it is over or paused."""

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
        """Its configuration, how its workers agreed where the study chose that, and the policy that adapted it."""
        return config_and_sync(self.started.config, self.started.execution)

    @property
    def workers(self) -> str:
        """Those that it began with or, where they have changed, how many it had on average; "1 for 4" emulates four."""
        own, told = self._own_workers, self.started.tags.get("for_workers")
        return own if told in (None, self.started.execution.get("workers")) else f"{own} for {told}"

    @property
    def _own_workers(self) -> str:
        begun, told = self.started.execution.get("workers", ""), self.outcome
        if isinstance(begun, int) and told is not None and told.seconds > 0 and told.worker_seconds > 0:
            average = told.worker_seconds / told.seconds
            return str(begun) if abs(average - begun) < NEARLY * begun else f"{average:.1f}"
        return str(begun)

    @property
    def mechanism(self) -> str:
        """How a replica of its model lay on workers, and on which mesh."""
        return mechanism_text(self.started.execution)

    @property
    def complete(self) -> bool:
        return self.finished is not None and self.finished.state == "complete"

    @property
    def paused(self) -> Trial | None:
        """How far it came, where it is paused."""
        return self.outcome if self.outcome is not None and self.outcome.state == "paused" else None

    def value(self, name: str) -> float | None:
        """Its objective or, failing that, its metric ``name``; None unless it is complete and has one."""
        if self.finished is None or not self.complete:
            return None
        return self.finished.values.get(name, self.finished.metrics.get(name))


def config_and_sync(config: Mapping[str, Any], execution: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` and, where ``execution`` tell of them, how workers agreed and the policy."""
    unsaid = {"sync_schedule": "", "policy": "none"}
    told = {
        name: execution[name] for name in ("sync", *unsaid) if name in execution and execution[name] != unsaid.get(name)
    }
    return {**config, **told}


def mechanism_text(execution: Mapping[str, Any]) -> str:
    """The mechanism that ``execution`` name, with what they choose of it: "tensor+zero, data=2,tensor=2"."""
    stage = execution.get("zero_stage")
    told = [execution.get("mechanism", "–"), f"stage {stage}" if stage is not None else "", execution.get("mesh") or ""]
    told += [execution["schedule"]] if "schedule" in execution else []
    told += ["offload"] if execution.get("offload") else []
    told += [execution["compress"]] if execution.get("compress") else []
    return plain(", ".join(str(word) for word in told if word), 80)


@dataclass(frozen=True)
class StudyOverview:
    """One study or frontier: its request, its trials in the order they started, and what it found."""

    started: StudyStarted
    trials: tuple[TrialOverview, ...] = ()
    times: TimesFitted | None = None
    phases: PhasesPlanned | None = None
    found: FrontierFound | None = None
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
        return self.found is not None or self.settings.get("kind") == "frontier"

    @property
    def objectives(self) -> dict[str, str]:
        """Name -> "max" or "min", as requested or, for a frontier, as found."""
        asked = self.settings.get("objectives")
        if isinstance(asked, dict) and asked:
            return {str(name): "min" if str(way).startswith("min") else "max" for name, way in asked.items()}
        return {self.found.quality: self.found.direction} if self.found else {}

    @property
    def ended(self) -> tuple[TrialOverview, ...]:
        """Trials that ended, in the order they did."""
        by_number = {story.trial: story for story in self.trials}
        return tuple(by_number[trial] for trial in self.order)


def gather_run(entries: Iterable[Entry]) -> RunOverview | None:
    """The run in ``entries``, or None. A resumed run takes back what it reported beyond the step it resumed from."""
    story: RunOverview | None = None
    reports: list[Reported] = []
    for entry in entries:
        match entry.record:
            case RunStarted() as started:
                kept = started.resumed_step if started.resumed_step is not None else -1
                reports = [report for report in reports if report.step <= kept]
                story = RunOverview(started)
            case Reported() as report:
                reports.append(report)
            case RunFinished() as finished if story:
                story = replace(story, finished=finished)
            case RunFailed() as failed if story:
                story = replace(story, failed=failed)
            case LayersDivided() as divided if story:
                story = replace(story, divided=divided)
            case _:
                pass
    return replace(story, reports=tuple(reports)) if story else None


def gather_study(entries: Sequence[Entry]) -> StudyOverview | None:
    """The study in ``entries``, or None. Where it was resumed, its newest request counts and it goes on."""
    story: StudyOverview | None = None
    for entry in entries:
        match entry.record:
            case StudyStarted() as request:
                story = replace(story, started=request, finished=None) if story else StudyOverview(request)
            case TimesFitted() as times if story:
                story = replace(story, times=times)
            case PhasesPlanned() as phases if story:
                story = replace(story, phases=phases)
            case FrontierFound() as found if story:
                story = replace(story, found=found)
            case StudyFinished() as end if story:
                story = replace(story, finished=end)
            case _:
                pass
    if story is None:
        return None
    table = fold(entries)
    ended = {trial.number: trial for trial in outcomes(table, list(story.objectives), story.price)}
    stories = (TrialOverview(life, ended.get(number)) for number, life in table.trials.items())
    accepted = tuple(entry for entry in entries if isinstance(entry.record, ChangesAccepted))
    return replace(story, trials=tuple(stories), order=tuple(table.ended), since=table.since, accepted=accepted)


def oriented_values(
    trials: Iterable[TrialOverview], objectives: Mapping[str, str]
) -> tuple[list[TrialOverview], Floats]:
    """The trials with a finite value of every objective, and these values where smaller is better, shape (n, k)."""
    valued: list[TrialOverview] = []
    rows: list[list[float]] = []
    for trial in trials:
        row = [
            (-1.0 if way == "max" else 1.0) * value
            for name, way in objectives.items()
            if (value := trial.value(name)) is not None and math.isfinite(value)
        ]
        if len(row) == len(objectives):
            valued.append(trial)
            rows.append(row)
    return valued, np.array(rows, dtype=float).reshape(len(rows), len(objectives))


def front_trials(study: StudyOverview) -> tuple[int, ...]:
    """Numbers of the complete trials that no other one dominates, as ``Study.front``; empty without objectives.

    Those whose settings were given, too ("member"): whoever picks has them. Of a frontier those of the search alone.
    """
    if not study.objectives:
        return ()
    found = (t for t in study.trials if t.trial >= study.since and t.phase in ("search", "member"))
    trials, points = oriented_values(found, study.objectives)
    return tuple(trial.trial for trial, on in zip(trials, nondominated(points), strict=True) if on)
