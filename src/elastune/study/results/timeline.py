"""When which trial of a study had how many workers, on the study's own clock. Reads the journal, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastune.journal.entry import Entry
from elastune.journal.records import (
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialPaused,
    TrialReallocated,
    TrialRegrouped,
    TrialResumed,
    TrialStarted,
)


@dataclass(frozen=True)
class AllocationSpan:
    """From ``begin_s`` to ``end_s`` of the study's time, ``trial`` had ``workers`` workers.

    ``begun``: started, resumed, or regrouped (its workers changed while it ran). ``ended``: complete, infeasible,
    rejected, paused, regrouped, lost (its controller ended first), or running where the journal has no more.
    ``reason``: why it ended so, or, of a regrouping, why other workers were wanted; empty where nothing was said.
    """

    trial: int
    begin_s: float
    end_s: float
    workers: int
    begun: str
    ended: str
    reason: str = ""

    @property
    def worker_seconds(self) -> float:
        return self.workers * (self.end_s - self.begin_s)


def study_times(entries: Sequence[Entry]) -> list[float]:
    """Seconds that controllers had worked on the study by each entry: time between two controllers does not count."""
    times: list[float] = []
    begin = before = entries[0].at if entries else 0.0
    for entry in entries:
        if isinstance(entry.record, StudyStarted):
            begin += entry.at - before
        before = entry.at
        times.append(entry.at - begin)
    return times


def spells(entries: Sequence[Entry]) -> tuple[AllocationSpan, ...]:
    """Every stretch of time that a trial ran with unchanged workers, in the order they ended."""
    fold = _Fold()
    for entry, now_s in zip(entries, study_times(entries), strict=True):
        fold.hear(entry, now_s)
    fold.end_all("running")
    return tuple(fold.done)


class _Fold:
    """What runs, by trial: since when, on how many workers, how it came to; and why other workers were asked for."""

    def __init__(self) -> None:
        self.done: list[AllocationSpan] = []
        self._open: dict[int, tuple[float, int, str]] = {}
        self._wanted: dict[int, str] = {}
        self._now_s = 0.0

    def hear(self, entry: Entry, now_s: float) -> None:
        match entry.record:
            case StudyStarted() | StudyFinished():
                self.end_all("lost")
        self._now_s = now_s
        match entry.record:
            case TrialStarted(trial=trial, means=means):
                self._end(trial, "lost")
                self._open[trial] = now_s, int(means.get("workers", 1)), "started"
            case TrialResumed(trial=trial, workers=workers):
                self._end(trial, "lost")
                self._open[trial] = now_s, workers, "resumed"
            case TrialReallocated(trial=trial, reason=reason):
                self._wanted[trial] = reason
            case TrialRegrouped(trial=trial, change=change) if trial in self._open:
                if self._open[trial][1] != len(change.members):
                    self._end(trial, "regrouped", self._wanted.pop(trial, ""))
                    self._open[trial] = now_s, len(change.members), "regrouped"
            case TrialPaused(trial=trial, reason=reason):
                self._end(trial, "paused", reason)
            case TrialFinished(trial=trial, state=state, reason=reason):
                self._end(trial, state, reason)

    def end_all(self, ended: str) -> None:
        """As of the entry before: nobody knows how long they went on."""
        for trial in list(self._open):
            self._end(trial, ended)

    def _end(self, trial: int, ended: str, reason: str = "") -> None:
        if trial in self._open:
            begin_s, workers, begun = self._open.pop(trial)
            self.done.append(AllocationSpan(trial, begin_s, self._now_s, workers, begun, ended, reason))
