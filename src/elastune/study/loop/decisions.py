"""What the search makes of what happens: which trials are to pause and why, and what they promise."""

from __future__ import annotations

import math

from elastune.journal.records import (
    Record,
    Reported,
    TrialFinished,
    TrialPaused,
    TrialReported,
    TrialResumed,
    TrialStarted,
)
from elastune.journal.trials import TrialLife
from elastune.search.stopping.schedule import Schedule
from elastune.study.allocation.holding import Holding
from elastune.study.loop.experiment import Experiment


class Decisions:
    """Tells ``schedule``, and others that take its place for a while, what happens to the trials of their phases.

    ``verdicts``: trial -> why it is to pause. ``held``: those of them that ``holding`` holds back, of which no schedule
    is told. ``results``: the values of the complete trials of the search, and of members that were trained like them.
    """

    def __init__(self, experiment: Experiment, schedule: Schedule, holding: Holding | None = None) -> None:
        self.schedule = schedule
        self.verdicts: dict[int, str] = {}
        self.held: set[int] = set()
        self.results: dict[int, tuple[float, ...]] = {}
        self._holding = holding
        self._experiment = experiment
        self._search = schedule
        self._by_phase = {schedule.phase: schedule}
        self._judged = {schedule.phase, "member"}
        self._violations: dict[int, float] = {}

    def switch(self, schedule: Schedule) -> None:
        """Ask ``schedule`` from now on, and tell it of the trials of its phase."""
        self.schedule = self._by_phase[schedule.phase] = schedule

    def hear(self, record: Record, life: TrialLife) -> None:
        """Take in what happened to the trial of ``life``, now or before."""
        number, phase = life.number, life.started.phase
        if isinstance(record, TrialFinished) and phase in self._judged and record.state == "complete":
            self.results[number] = self._values(self._experiment.for_search(life))
        if isinstance(record, TrialFinished):
            self.held.discard(number)
        if isinstance(record, TrialPaused) and (record.held or not record.cut_off):
            self.verdicts.pop(number, None)
            self.held.discard(number)
        schedule = self._by_phase.get(phase)
        if schedule is None:
            return
        match record:
            case TrialStarted():
                schedule.started(number, record.params, record.parent)
            case TrialReported(report=report):
                self._reported(schedule, life)
                self._hold(number, report, life.last_at)
            case TrialPaused(cut_off=False, epoch=epoch):
                schedule.paused(number, epoch)
            case TrialResumed(cut_off=False):
                schedule.resumed(number)
            case TrialFinished():
                found = self._experiment.for_search(life)
                values = self._values(found)
                valid = found.values and all(abs(value) < math.inf for value in values)
                schedule.ended(number, values if valid else None, max(found.violations.values(), default=0.0))

    def _reported(self, schedule: Schedule, life: TrialLife) -> None:
        shown = self._experiment.intermediate(life) if schedule.proposes else None
        if shown is not None:
            self._violations[life.number] = shown.violation
            if verdict := schedule.reported(shown):
                self.verdicts.setdefault(life.number, verdict)

    def _hold(self, number: int, report: Reported, at: float) -> None:
        """See whether a trial that nobody stops is to leave its workers to shorter ones."""
        if self._holding is None or number in self.verdicts:
            return
        if why := self._holding.why(number, report, at):
            self.verdicts[number] = why
            self.held.add(number)

    def _values(self, found: TrialFinished) -> tuple[float, ...]:
        return tuple(found.values.get(o.name, math.nan) for o in self._experiment.objectives)

    def estimates(self) -> dict[int, tuple[tuple[float, ...], float]]:
        """What open trials are expected to end with, and by how much they break constraints."""
        return {n: (values, self._violations.get(n, 0.0)) for n, values in self._search.estimates().items()}

    def promises(self) -> dict[int, tuple[float, ...]]:
        """What trials ended with, or are expected to; smaller is better."""
        return {n: self._oriented(values) for n, values in {**self._search.estimates(), **self.results}.items()}

    def standing(self) -> dict[int, tuple[float, ...]]:
        """What the complete trials of the search ended with; smaller is better."""
        return {n: self._oriented(values) for n, values in self.results.items()}

    def _oriented(self, values: tuple[float, ...]) -> tuple[float, ...]:
        signs = [-1.0 if o.direction == "max" else 1.0 for o in self._experiment.objectives]
        return tuple(s * v for s, v in zip(signs, values, strict=True))
