"""The state of each trial of a study: the one fold of its journal, entry by entry.

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

    Attributes:
        began_as: "started", "resumed", "adopted" (by another controller), or "regrouped" (its workers changed while it
            ran).
        ended: "complete", "infeasible", "rejected", "paused", "regrouped", "lost" (its controller ended first), or
            "running" where the journal has no more.
        reason: Why it ended so, or why other workers were wanted; "" where no record says it.
        pause_s: How long training stood still while these workers formed groups.
    """

    trial: int
    begin_s: float
    end_s: float
    workers: int
    began_as: str
    ended: str
    reason: str = ""
    pause_s: float = 0.0

    @property
    def worker_seconds(self) -> float:
        return self.workers * (self.end_s - self.begin_s)


@dataclass(frozen=True)
class TrialSummary:
    """One trial, as far as the journal records it. A trial that was started again forgets what it had done before.

    Attributes:
        started_at: The time of its start, in seconds since the epoch.
        last_start_at: The time when it was started or resumed last, in seconds since the epoch.
        last_at: The time of its newest record, in seconds since the epoch.
        last_s: The study's own time at its newest record.
        workers: The workers that it has, or had last.
        epoch: The epochs that it has completed, of ``epochs``.
        metrics: All metrics that it reported after ``epoch``.
        until_epoch: The epoch at which it pauses.
        average: The mean number of its workers over its running time, by its last report.
        seconds: The seconds that it ran before the present start; ``worker_seconds`` likewise.
        cost: What was paid for all of it, by its newest record; None without prices.
        reports: Each report with the workers that the trial had then.
        initial_weights: The models that it began with.
    """

    started: TrialStarted
    started_at: float
    last_start_at: float
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
    initial_weights: tuple[StartedFrom, ...] = ()
    pause: TrialPaused | None = None
    finished: TrialFinished | None = None

    @property
    def number(self) -> int:
        return self.started.trial

    @property
    def first_workers(self) -> int:
        """The number of workers at its start."""
        return int(self.started.execution.get("workers", 1))

    @property
    def epochs_done(self) -> int:
        """The epochs that it completed, including those that it repeated after a pause."""
        paused = [self.pause.epoch] if self.pause is not None else []
        return max((*paused, *(report.epoch for report, _ in self.reports[-1:])), default=0)

    def after(self, entry: Entry, now_s: float) -> TrialSummary:
        """Return the summary after ``entry``, a record of this trial."""
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
            case TrialAdopted(adopted=adopted):
                return replace(self, workers=len(adopted.workers))
            case TrialStartedFrom(start=start) if (
                start not in self.initial_weights
            ):  # else: it has lost all workers, and began again
                return replace(self, initial_weights=(*self.initial_weights, start))
            case TrialPaused() as pause:
                changes |= {"state": "paused", "epoch": pause.epoch, "pause": pause}
                changes |= {"seconds": self.seconds + pause.seconds}
                changes |= {"worker_seconds": self.worker_seconds + pause.worker_seconds}
            case TrialResumed(workers=workers, until_epoch=until_epoch):
                changes |= {
                    "state": "running",
                    "last_start_at": entry.at,
                    "workers": workers,
                    "until_epoch": until_epoch,
                }
            case TrialFinished(seconds=seconds, worker_seconds=measured_s) as finished:
                used_s = seconds * self.first_workers if measured_s is None else measured_s
                changes |= {"state": "over", "finished": finished, "seconds": seconds, "worker_seconds": used_s}
            case _:
                return self
        return replace(self, **changes)


class TrialTable:
    """The trials of a study by number, in the order they were first started; ``observe`` adds one entry
    after another.

    Attributes:
        ended: The numbers of the trials that are over, in the order they ended.
        cut_off: Trials that wait since a pause without a decision of the search, the longest waiting first.
        artifacts: The kept files of trials that are over.
        seconds: The time that controllers have worked on the study. Time between two controllers does not count.
        since: Trials with lower numbers began before an accepted change: they are not compared with others.
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

    def observe(self, entry: Entry) -> None:
        """Add the next entry of the journal."""
        record = entry.record
        if isinstance(record, PredictionsAdded) and (kept := self.artifacts.get(record.trial)) is not None:
            digests = {**kept.predictions, record.name: record.sha256}
            self.artifacts[record.trial] = replace(kept, predictions=digests, size=record.size)
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
            self.trials[number] = _started(record, entry.at, self.seconds)
        elif number not in self.trials:
            return
        else:
            self.trials[number] = self.trials[number].after(entry, self.seconds)
        self._spans.observe(record, self.seconds)
        self._sort(record)

    @property
    def spans(self) -> tuple[AllocationSpan, ...]:
        """Every span of time in which a trial ran with unchanged workers, in the order they ended."""
        return (*self._spans.done, *self._spans.open_until(self.seconds))

    def of(self, state: State) -> list[int]:
        """Return the numbers of the trials in that state, in the order they were started."""
        return [number for number, life in self.trials.items() if life.state == state]

    @property
    def paused(self) -> set[int]:
        """The trials that the search has paused; not those that were cut off, which go on first."""
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
    """Return the trials in a journal.

    Example:
        >>> fold(read(out / "journal.jsonl")).of("over")
        [0, 2, 3]
    """
    table = TrialTable()
    for entry in entries:
        table.observe(entry)
    return table


def compared_all(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries as if no accepted change separated trials: all trials are compared with each other."""
    return [
        replace(entry, record=replace(entry.record, first_trial=0))
        if isinstance(entry.record, ChangesAccepted)
        else entry
        for entry in entries
    ]


def _started(record: TrialStarted, at: float, now_s: float) -> TrialSummary:
    workers = int(record.execution.get("workers", 1))
    return TrialSummary(record, at, at, at, now_s, workers, until_epoch=record.until_epoch)


class _Spans:
    """The workers of each trial over time, and the reasons of their changes."""

    def __init__(self) -> None:
        self.done: list[AllocationSpan] = []
        self._open: dict[int, AllocationSpan] = {}
        self._wanted: dict[int, str] = {}

    def observe(self, record: TrialRecord, now_s: float) -> None:
        match record:
            case TrialStarted(trial=trial, execution=execution):
                self._begin(trial, int(execution.get("workers", 1)), "started", now_s)
            case TrialResumed(trial=trial, workers=workers):
                self._begin(trial, workers, "resumed", now_s)
            case TrialAdopted(trial=trial, adopted=adopted):
                self._begin(trial, len(adopted.workers), "adopted", now_s)
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
        """End all spans at the entry before: their true ends are not known."""
        for trial in list(self._open):
            self._end(trial, ended, now_s)

    def open_until(self, now_s: float) -> list[AllocationSpan]:
        return [replace(span, end_s=now_s) for span in self._open.values()]

    def _begin(self, trial: int, workers: int, began_as: str, now_s: float) -> None:
        self._end(trial, "lost", now_s)
        self._open[trial] = AllocationSpan(trial, now_s, now_s, workers, began_as, "running")

    def _end(self, trial: int, ended: str, now_s: float, reason: str = "") -> None:
        if trial in self._open:
            self.done.append(replace(self._open.pop(trial), end_s=now_s, ended=ended, reason=reason))
