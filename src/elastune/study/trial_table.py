"""Every trial of a study, as its journal tells of it: folded from records, while it runs and when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from elastune.journal.entry import Entry
from elastune.journal.records import (
    Record,
    TrialFinished,
    TrialPaused,
    TrialReported,
    TrialResumed,
    TrialStarted,
)
from elastune.study.trial_results import SYSTEM_PARAMETERS


@dataclass(frozen=True)
class TrialStatus:
    """A trial and how far it is. ``metrics``: what it reported after ``epoch``, all reports together.

    ``seconds`` and ``worker_seconds``: of the times that it ran before, to their ends; ``average``: workers, so far.
    """

    started: TrialStarted
    state: Literal["running", "paused", "over"] = "running"
    epoch: int = 0
    epochs: int = 0
    seconds: float = 0.0
    worker_seconds: float = 0.0
    until_epoch: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    average: float | None = None

    @property
    def workers(self) -> int:
        """Those that it began with."""
        return int(self.started.means.get("workers", 1))

    @property
    def known(self) -> Mapping[str, Any]:
        """Configuration and system parameters by name, for constraints."""
        return {**self.started.config, **{name: self.started.means.get(name) for name in SYSTEM_PARAMETERS}}


class TrialTable:
    """The trials that a search decides, by number. ``launched``: how many were ever started."""

    def __init__(self) -> None:
        self.trials: dict[int, TrialStatus] = {}
        self.complete: list[tuple[float, float]] = []  # seconds and worker-seconds of the complete ones

    @property
    def launched(self) -> int:
        return len(self.trials)

    @property
    def works(self) -> bool:
        """Whether some trial has shown that the program can be trained."""
        return bool(self.complete or self.of("paused"))

    @property
    def worker_seconds(self) -> float:
        """What all trials have used, but for what runs now."""
        return sum(entrant.worker_seconds for entrant in self.trials.values())

    def of(self, state: Literal["running", "paused", "over"]) -> list[int]:
        """The numbers of the trials in that state, in the order they were started."""
        return [number for number, entrant in self.trials.items() if entrant.state == state]

    def hear(self, record: Record) -> None:
        """Take in what happened."""
        if isinstance(record, TrialStarted):
            if record.phase == "search":
                self.trials[record.trial] = TrialStatus(record, until_epoch=record.until_epoch)
            return
        if not isinstance(record, (TrialReported, TrialPaused, TrialResumed, TrialFinished)):
            return
        entrant = self.trials.get(record.trial)
        if entrant is not None:
            self.trials[record.trial] = self._next(entrant, record)

    def _next(
        self, entrant: TrialStatus, record: TrialReported | TrialPaused | TrialResumed | TrialFinished
    ) -> TrialStatus:
        match record:
            case TrialReported(report=report):
                metrics = {**(entrant.metrics if report.epoch == entrant.epoch else {}), **report.metrics}
                return replace(
                    entrant, epoch=report.epoch, epochs=report.epochs, metrics=metrics, average=record.workers
                )
            case TrialPaused():
                return replace(
                    entrant,
                    state="paused",
                    epoch=record.epoch,
                    seconds=entrant.seconds + record.seconds,
                    worker_seconds=entrant.worker_seconds + record.worker_seconds,
                )
            case TrialResumed():
                return replace(entrant, state="running", until_epoch=record.until_epoch)
            case TrialFinished():
                worker_seconds = record.worker_seconds or record.seconds * entrant.workers
                if record.state == "complete":
                    self.complete.append((record.seconds, worker_seconds))
                return replace(entrant, state="over", seconds=record.seconds, worker_seconds=worker_seconds)

    def cut_off(self, entries: Sequence[Entry]) -> list[TrialPaused]:
        """The ends, that nobody recorded, of the trials that ran when the last controller of ``entries`` ended."""
        begun = {e.record.trial: e.at for e in entries if isinstance(e.record, (TrialStarted, TrialResumed))}
        found = []
        for number in self.of("running"):
            entrant = self.trials[number]
            seconds = max(entries[-1].at - begun[number], 0.0)
            whole = (entrant.average or entrant.workers) * (entrant.seconds + seconds)
            worker_seconds = max(whole - entrant.worker_seconds, 0.0)
            reason = "its controller ended"
            found.append(TrialPaused(number, entrant.epoch, seconds, worker_seconds, reason, cut_off=True))
        return found
