"""What became of each trial of a study: folded from its journal, and as flat rows for tables of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from elastune.core.cost import Cost
from elastune.journal.entry import Entry
from elastune.journal.records import TrialFinished, TrialPaused, TrialReported, TrialResumed, TrialStarted
from elastune.study.results.timeline import study_times


@dataclass(frozen=True)
class Trial:
    """A trial that is over, or paused.

    ``values``: one number per objective if ``state`` is "complete"; of a "paused" trial, as far as its last report
    tells them. ``epochs``: training passes that it completed. ``seconds``: what it ran, pauses left out;
    ``worker_seconds``: of all its workers together. ``started_at``, ``ended_at``: seconds since the epoch; ``ended_s``:
    seconds of the study's own time. ``params`` is what the search chose, out of ``distributions`` (Optuna's JSON).
    """

    number: int
    state: str
    config: dict[str, Any]
    means: dict[str, Any]
    values: dict[str, float]
    metrics: dict[str, float]
    seconds: float
    reason: str
    phase: str
    tags: dict[str, Any]
    seed: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    distributions: dict[str, str] = field(default_factory=dict)
    worker_seconds: float = 0.0
    epochs: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    ended_s: float = 0.0
    parent: int | None = None
    cut_off: bool = False
    """Paused by no decision of the search: the study ended first."""


@dataclass
class _Course:
    """A trial while its records are read."""

    started: TrialStarted
    started_at: float
    report: TrialReported | None = None
    pauses: list[TrialPaused] = field(default_factory=list)
    paused: bool = False
    last_at: float = 0.0
    last_s: float = 0.0


def trials(
    entries: Sequence[Entry], objectives: Sequence[str] = (), price_per_worker_hour: float = 1.0
) -> tuple[Trial, ...]:
    """The trials in a journal that have ended, in the order they did; after them those that are paused.

    A trial that was started again forgets what it had done before. ``objectives``: whose values paused ones show.
    """
    courses: dict[int, _Course] = {}
    ended: dict[int, TrialFinished] = {}
    for entry, now_s in zip(entries, study_times(entries), strict=True):
        record = entry.record
        if isinstance(record, TrialStarted):
            courses[record.trial] = _Course(record, entry.at)
            ended.pop(record.trial, None)
        elif isinstance(record, (TrialReported, TrialPaused, TrialResumed, TrialFinished)) and record.trial in courses:
            course = courses[record.trial]
            course.last_at, course.last_s = entry.at, now_s
            match record:
                case TrialReported():
                    course.report = record
                case TrialPaused():
                    course.pauses.append(record)
                    course.paused = True
                case TrialResumed():
                    course.paused = False
                case TrialFinished():
                    ended.pop(record.trial, None)
                    ended[record.trial] = record
    over = [_over(courses[number], finished) for number, finished in ended.items()]
    resting = [
        _resting(course, objectives, price_per_worker_hour)
        for number, course in courses.items()
        if course.paused and number not in ended
    ]
    return (*over, *resting)


def _over(course: _Course, finished: TrialFinished) -> Trial:
    told, workers = finished.worker_seconds, course.started.means.get("workers", 1)
    return Trial(
        state=finished.state,
        values=finished.values,
        metrics=finished.metrics,
        seconds=finished.seconds,
        worker_seconds=finished.seconds * workers if told is None else told,
        reason=finished.reason,
        **_common(course),
    )


def _resting(course: _Course, names: Sequence[str], price_per_worker_hour: float) -> Trial:
    last = course.pauses[-1]
    known: dict[str, float] = {}
    if course.report is not None:
        report = course.report.report
        workers = course.report.workers or float(course.started.means.get("workers", 1))
        cost = Cost(workers * report.seconds, price_per_worker_hour).total
        known = {**report.metrics, "seconds": report.seconds, "cost": cost}
    return Trial(
        state="paused",
        values={name: known[name] for name in names if name in known},
        metrics=known,
        seconds=sum(pause.seconds for pause in course.pauses),
        worker_seconds=sum(pause.worker_seconds for pause in course.pauses),
        reason=last.reason,
        cut_off=last.cut_off,
        **_common(course),
    )


def _common(course: _Course) -> dict[str, Any]:
    started = course.started
    epochs = [pause.epoch for pause in course.pauses[-1:]]
    if course.report is not None:
        epochs.append(course.report.report.epoch)
    return {
        "number": started.trial,
        "config": started.config,
        "means": started.means,
        "phase": started.phase,
        "tags": started.tags,
        "seed": started.seed,
        "params": started.params,
        "distributions": started.distributions,
        "epochs": max(epochs, default=0),
        "started_at": course.started_at,
        "ended_at": course.last_at,
        "ended_s": course.last_s,
        "parent": started.parent,
    }


GROUPS = ("params", "config", "means", "values", "metrics")
"""Of a trial's fields, those that are mappings: a column each key, "params.lr"."""

PLAIN = ("number", "state", "phase", "seed", "parent", "epochs", "seconds", "worker_seconds", "started_at", "ended_at")


def flat_row(trial: Trial) -> dict[str, Any]:
    """A trial as one row: "number", "state", ..., "params.lr", ..., "values.accuracy", ..., "reason".

    ``params`` is what the search chose, ``config`` all settings. Times are seconds, those ending in ``_at`` since the
    epoch.
    """
    row: dict[str, Any] = {name: getattr(trial, name) for name in PLAIN}
    for group in GROUPS:
        row |= {f"{group}.{name}": value for name, value in getattr(trial, group).items()}
    return {**row, "reason": trial.reason}
