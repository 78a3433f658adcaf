"""What became of each trial of a study: the one fold of its journal, entry by entry.

Running loops, loaded studies, reports, progress lines and simulations are all views of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from elastune.core.journal.records import (
    AFTERWARDS,
    ArtifactKept,
    ArtifactRemoved,
    ChangesAccepted,
    Entry,
    PredictionsAdded,
    Reported,
    StartedFrom,
    StudyFinished,
    StudyStarted,
    TrialAdopted,
    TrialFinished,
    TrialPaused,
    TrialReallocated,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
    TrialStartedFrom,
)

State = Literal["running", "paused", "over"]
Change = (
    TrialReported
    | TrialPaused
    | TrialResumed
    | TrialAdopted
    | TrialStartedFrom
    | TrialReallocated
    | TrialRegrouped
    | TrialFinished
)
TrialRecord = TrialStarted | Change


@dataclass(frozen=True)
class AllocationSpan:
    """From ``begin_s`` to ``end_s`` of the study's time, ``trial`` had ``workers`` workers.

    ``begun``: started, resumed, adopted (by another controller), or regrouped (its workers changed while it ran).
    ``ended``: complete, infeasible, rejected, paused, regrouped, lost (its controller ended first), or running where
    the journal has no more.
    ``reason``: why it ended so, or, of a regrouping, why other workers were wanted; empty where nothing was said.
    ``pause_s``: how long training stood still while these workers came together.
    """

    trial: int
    begin_s: float
    end_s: float
    workers: int
    begun: str
    ended: str
    reason: str = ""
    pause_s: float = 0.0

    @property
    def worker_seconds(self) -> float:
        return self.workers * (self.end_s - self.begin_s)


@dataclass(frozen=True)
class TrialSummary:
    """One trial, as far as the journal tells. A trial that was started again forgets what it had done before.

    ``started_at``: seconds since the epoch; ``begun_at``: when it was started or resumed last. ``last_at``, ``last_s``:
    of its newest record, since the epoch and by the study's own time. ``epoch`` of ``epochs``: how far it is;
    ``metrics``: what it reported after ``epoch``, all reports together. ``workers``: those that it has, or had last;
    ``average``: over all the time that it ran, by its last report. ``seconds``, ``worker_seconds``: of the times that
    it ran before, to their ends. ``cost``: of all that was paid for it, as told last; None:
    without prices. ``reports``: each with the workers that the trial had then. ``begun``: with whose weights it began.
    """

    started: TrialStarted
    started_at: float
    begun_at: float
    last_at: float
    last_s: float
    workers: int
    state: State = "running"
    epoch: int = 0
    epochs: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    until_epoch: int | None = None
    average: float | None = None
    seconds: float = 0.0
    worker_seconds: float = 0.0
    cost: float | None = None
    reports: tuple[tuple[Reported, int], ...] = ()
    begun: tuple[StartedFrom, ...] = ()
    pause: TrialPaused | None = None
    finished: TrialFinished | None = None

    @property
    def number(self) -> int:
        return self.started.trial

    @property
    def first_workers(self) -> int:
        """Those that it began with."""
        return int(self.started.execution.get("workers", 1))

    @property
    def epochs_done(self) -> int:
        """Training passes that it completed, those that it went back on for a pause included."""
        paused = [self.pause.epoch] if self.pause is not None else []
        return max((*paused, *(report.epoch for report, _ in self.reports[-1:])), default=0)

    def after(self, entry: Entry, now_s: float) -> TrialSummary:
        """The same once ``entry``, a record of this trial's, has happened."""
        changes: dict[str, Any] = {"last_at": entry.at, "last_s": now_s}
        if isinstance(entry.record, TrialReported | TrialPaused | TrialFinished) and entry.record.cost is not None:
            changes["cost"] = entry.record.cost
        match entry.record:
            case TrialReported(report=report, workers=average):
                before = self.metrics if report.epoch == self.epoch else {}
                changes |= {"epoch": report.epoch, "epochs": report.epochs, "metrics": {**before, **report.metrics}}
                changes |= {"average": average, "reports": (*self.reports, (report, self.workers))}
            case TrialRegrouped(change=change):
                return replace(self, workers=len(change.members))
            case TrialAdopted(found=found):
                return replace(self, workers=len(found.workers))
            case TrialStartedFrom(told=told) if (
                told not in self.begun
            ):  # else: it has lost all workers, and began again
                return replace(self, begun=(*self.begun, told))
            case TrialPaused() as pause:
                changes |= {"state": "paused", "epoch": pause.epoch, "pause": pause}
                changes |= {"seconds": self.seconds + pause.seconds}
                changes |= {"worker_seconds": self.worker_seconds + pause.worker_seconds}
            case TrialResumed(workers=workers, until_epoch=until_epoch):
                changes |= {"state": "running", "begun_at": entry.at, "workers": workers, "until_epoch": until_epoch}
            case TrialFinished(seconds=seconds, worker_seconds=told) as finished:
                used_s = seconds * self.first_workers if told is None else told
                changes |= {"state": "over", "finished": finished, "seconds": seconds, "worker_seconds": used_s}
            case _:
                return self
        return replace(self, **changes)


class TrialTable:
    """The trials of a study by number, in the order they were first started; ``hear`` adds one entry after another.

    ``ended``: the numbers of those that are over, in the order they ended. ``cut_off``: of those that wait since they
    were paused by no decision of the search, the longest waiting first. ``artifacts``: what was kept of trials that are
    over. ``seconds``: how long controllers have worked on the study: time between two controllers does not count.
    ``since``: trials with lower numbers began before a change that was accepted: they are not compared with others.
    """

    def __init__(self) -> None:
        self.trials: dict[int, TrialSummary] = {}
        self.ended: dict[int, None] = {}
        self.cut_off: dict[int, None] = {}
        self.artifacts: dict[int, ArtifactKept] = {}
        self.seconds = 0.0
        self.since = 0
        self._begin_at: float | None = None
        self._last_at = 0.0
        self._spans = _Spans()

    def hear(self, entry: Entry) -> None:
        """Take in what happened next."""
        record = entry.record
        if isinstance(record, PredictionsAdded) and (kept := self.artifacts.get(record.trial)) is not None:
            told = {**kept.predictions, record.name: record.sha256}
            self.artifacts[record.trial] = replace(kept, predictions=told, size=record.size)
        if isinstance(record, AFTERWARDS):
            return
        if isinstance(record, StudyStarted | StudyFinished):
            self._spans.end_all("lost", self.seconds)
        self._keep_time(entry)
        if isinstance(record, ChangesAccepted):
            self.since = max(self.since, record.first_trial)
            self.cut_off = {number: None for number in self.cut_off if number >= self.since}
        if isinstance(record, ArtifactKept):
            self.artifacts[record.trial] = record
        elif isinstance(record, ArtifactRemoved):
            self.artifacts.pop(record.trial, None)
        if not isinstance(record, TrialRecord):
            return
        number = record.trial
        if isinstance(record, TrialStarted):
            self.trials[number] = _begun(record, entry.at, self.seconds)
        elif number not in self.trials:
            return
        else:
            self.trials[number] = self.trials[number].after(entry, self.seconds)
        self._spans.hear(record, self.seconds)
        self._sort(record)

    @property
    def spans(self) -> tuple[AllocationSpan, ...]:
        """Every stretch of time that a trial ran with unchanged workers, in the order they ended."""
        return (*self._spans.done, *self._spans.open_until(self.seconds))

    def of(self, state: State) -> list[int]:
        """The numbers of the trials in that state, in the order they were started."""
        return [number for number, life in self.trials.items() if life.state == state]

    @property
    def paused(self) -> set[int]:
        """The numbers of the trials that the search has paused; not those that were cut off, which go on first."""
        return set(self.of("paused")) - self.cut_off.keys()

    def _keep_time(self, entry: Entry) -> None:
        if self._begin_at is None:
            self._begin_at = self._last_at = entry.at
        if isinstance(entry.record, StudyStarted):
            self._begin_at += entry.at - self._last_at
        self._last_at = entry.at
        self.seconds = entry.at - self._begin_at

    def _sort(self, record: TrialRecord) -> None:
        number = record.trial
        if isinstance(record, TrialPaused):
            if record.cut_off:
                self.cut_off[number] = None
            return
        if isinstance(record, TrialStarted | TrialResumed | TrialFinished):
            self.cut_off.pop(number, None)
        if isinstance(record, TrialStarted | TrialFinished):
            self.ended.pop(number, None)
        if isinstance(record, TrialFinished):
            self.ended[number] = None


def fold(entries: Iterable[Entry]) -> TrialTable:
    """The trials in a journal."""
    table = TrialTable()
    for entry in entries:
        table.hear(entry)
    return table


def compared_all(entries: Iterable[Entry]) -> list[Entry]:
    """The journal as if no change had set trials apart: all of them are compared with each other."""
    return [
        replace(entry, record=replace(entry.record, first_trial=0))
        if isinstance(entry.record, ChangesAccepted)
        else entry
        for entry in entries
    ]


def _begun(record: TrialStarted, at: float, now_s: float) -> TrialSummary:
    workers = int(record.execution.get("workers", 1))
    return TrialSummary(record, at, at, at, now_s, workers, until_epoch=record.until_epoch)


class _Spans:
    """Who has how many workers since when, and why; and why other workers were asked for."""

    def __init__(self) -> None:
        self.done: list[AllocationSpan] = []
        self._open: dict[int, AllocationSpan] = {}
        self._wanted: dict[int, str] = {}

    def hear(self, record: TrialRecord, now_s: float) -> None:
        match record:
            case TrialStarted(trial=trial, execution=execution):
                self._begin(trial, int(execution.get("workers", 1)), "started", now_s)
            case TrialResumed(trial=trial, workers=workers):
                self._begin(trial, workers, "resumed", now_s)
            case TrialAdopted(trial=trial, found=found):
                self._begin(trial, len(found.workers), "adopted", now_s)
            case TrialReallocated(trial=trial, reason=reason):
                self._wanted[trial] = reason
            case TrialRegrouped(trial=trial, change=change) if trial in self._open:
                if self._open[trial].workers != len(change.members):
                    self._end(trial, "regrouped", now_s, self._wanted.pop(trial, ""))
                    self._begin(trial, len(change.members), "regrouped", now_s)
                span = self._open[trial]
                self._open[trial] = replace(span, pause_s=span.pause_s + change.pause_s)
            case TrialPaused(trial=trial, reason=reason):
                self._end(trial, "paused", now_s, reason)
            case TrialFinished(trial=trial, state=state, reason=reason):
                self._end(trial, state, now_s, reason)

    def end_all(self, ended: str, now_s: float) -> None:
        """As of the entry before: nobody knows how long they went on."""
        for trial in list(self._open):
            self._end(trial, ended, now_s)

    def open_until(self, now_s: float) -> list[AllocationSpan]:
        return [replace(span, end_s=now_s) for span in self._open.values()]

    def _begin(self, trial: int, workers: int, begun: str, now_s: float) -> None:
        self._end(trial, "lost", now_s)
        self._open[trial] = AllocationSpan(trial, now_s, now_s, workers, begun, "running")

    def _end(self, trial: int, ended: str, now_s: float, reason: str = "") -> None:
        if trial in self._open:
            self.done.append(replace(self._open.pop(trial), end_s=now_s, ended=ended, reason=reason))
