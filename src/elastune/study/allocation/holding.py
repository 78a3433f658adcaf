"""The trials of a study that are held back, as its journal tells: who is to wait, who does, and until when."""

from __future__ import annotations

from elastune.journal.entry import Entry
from elastune.journal.records import Reported, TrialFinished, TrialPaused, TrialResumed, TrialStarted
from elastune.study.allocation.courses import Courses
from elastune.study.allocation.hold import is_held


class Holding:
    """Holds back the longest ``share`` of trials, by ``courses``, each after its first epoch and once only.

    A trial that is held goes on as soon as workers are idle, and in turn with others once it has waited as long as it
    would train on one worker, or ``patience_s`` if that is longer.
    """

    def __init__(self, courses: Courses, share: float, patience_s: float) -> None:
        self._courses = courses
        self._share = share
        self._patience_s = patience_s
        self._since_s: dict[int, float] = {}
        self._judged: set[int] = set()

    def hear(self, entry: Entry) -> None:
        """Something has happened, now or before."""
        self._courses.hear(entry)
        match entry.record:
            case TrialPaused(trial=trial, held=True):
                self.holds(trial, entry.at)
            case TrialStarted(trial=trial) | TrialResumed(trial=trial) | TrialFinished(trial=trial):
                self.released(trial)

    def holds(self, trial: int, now_s: float) -> None:
        """A trial waits from now on."""
        self._since_s[trial] = now_s

    def released(self, trial: int) -> None:
        """A trial no longer waits."""
        self._since_s.pop(trial, None)

    def why(self, trial: int, report: Reported, now_s: float) -> str:
        """Why a trial that has just reported is to be held back; empty: it is not."""
        if self._share <= 0 or trial in self._judged or not 1 <= report.epoch < report.epochs:
            return ""
        self._judged.add(trial)
        if not is_held(trial, self._courses.lengths(report.epochs, now_s), self._share):
            return ""
        return f"held back after epoch {report.epoch}: among the longest {self._share:.0%}"

    def since_s(self, trial: int) -> float | None:
        """Since when it is held; None: it is not."""
        return self._since_s.get(trial)

    def waits(self, trial: int, now_s: float) -> bool:
        """Whether it is held, and must leave workers to all others still."""
        since_s = self._since_s.get(trial)
        return since_s is not None and now_s - since_s <= max(self._patience_s, self._length_s(trial))

    @property
    def waiting(self) -> list[int]:
        """Those that are held, the shortest first."""
        return sorted(self._since_s, key=lambda trial: (self._length_s(trial), trial))

    def _length_s(self, trial: int) -> float:
        return self._courses.length_s(trial) or 0.0
