"""A study whose controller is a thread of the test: the study's own loop of requests, without training."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastune.core.journal.files import JournalWriter
from elastune.core.journal.folds import TrialTable
from elastune.core.journal.records import (
    ActDone,
    Record,
    Reported,
    StudyStarted,
    TrialFinished,
    TrialReported,
    TrialStarted,
)
from elastune.tuning.study.control.acts import Situation, why_refused
from elastune.tuning.study.control.requests import Inbox

STUDY = StudyStarted(
    {
        "kind": "tune",
        "program": "train.py",
        "objectives": {"accuracy": "max", "seconds": "min"},
        "trials": 100,
        "budget_s": 600.0,
        "workers": 4,
    }
)


def begun(number: int, **params: Any) -> TrialStarted:
    """A trial of the search on one worker."""
    return TrialStarted(number, params, {"workers": 1}, 0, params=params)


def reported(number: int, epoch: int, **metrics: float) -> TrialReported:
    """A report of a trial after ``epoch`` of 10."""
    return TrialReported(number, Reported(epoch, 10 * epoch, 320 * epoch, 1.0 * epoch, metrics, epochs=10), 1.0)


def complete(number: int, accuracy: float, seconds: float) -> TrialFinished:
    """The end of a trial."""
    values = {"accuracy": accuracy, "seconds": seconds}
    return TrialFinished(number, "complete", values, values, seconds=seconds, worker_seconds=seconds)


class LiveStudy:
    """A study that a thread controls: ``write`` adds records, requests are journaled and done."""

    def __init__(self, journal: JournalWriter, out: Path) -> None:
        self._journal, self._inbox = journal, Inbox(out)
        self._table = TrialTable()
        self._lock = threading.Lock()

    def write(self, *records: Record) -> None:
        with self._lock:
            for record in records:
                self._table.observe(self._journal.write(record))

    def look(self) -> None:
        for act in self._inbox.take():
            refused = why_refused(act, Situation(self._table.trials, room=4, tried=len(self._table.trials)))
            self.write(replace(act, refused=refused))
            self._inbox.remove(act)
            if not refused and act.act == "stop" and act.trial is not None:
                self.write(TrialFinished(act.trial, "infeasible", reason=f"stopped by {act.by}"))
            if not refused:
                self.write(ActDone(act.ask, "done"))


@contextmanager
def live_study(out: Path, *records: Record) -> Iterator[LiveStudy]:
    """A study that begins with ``records``."""
    ended = threading.Event()
    with JournalWriter(out / "journal.jsonl") as journal:
        study = LiveStudy(journal, out)
        study.write(STUDY, *records)

        def control() -> None:
            while not ended.is_set():
                study.look()
                time.sleep(0.05)

        thread = threading.Thread(target=control)
        thread.start()
        try:
            yield study
        finally:
            ended.set()
            thread.join()
