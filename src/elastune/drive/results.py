"""A study's outcome: its trials, their front, and what to take from it. Reads the journal, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastune.core.errors import UserError
from elastune.drive.command import run_command
from elastune.drive.folders import JOURNAL
from elastune.journal.entry import Entry
from elastune.journal.reader import read
from elastune.journal.records import StudyStarted, TrialFinished, TrialStarted
from elastune.search.front import nondominated, pick, representative
from elastune.search.objective import Objective, oriented, parse_objectives


@dataclass(frozen=True)
class Trial:
    """A trial that is over. ``values``: one number per objective; empty unless ``state`` is "complete"."""

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


@dataclass(frozen=True)
class Picked:
    """A trial of the front, why it was taken, and the command that trains it."""

    trial: Trial
    reason: str
    command: str


@dataclass(frozen=True)
class Study:
    """All that a study found. ``program`` is the file it tuned."""

    out: Path
    program: str
    seed: int
    epochs: int | None
    objectives: tuple[Objective, ...]
    trials: tuple[Trial, ...]

    @classmethod
    def load(cls, out: Path) -> Study:
        """The study in folder ``out``, finished or not. Raises ``UserError`` where there is none."""
        return cls.of(out, read(out / JOURNAL))

    @classmethod
    def of(cls, out: Path, entries: Sequence[Entry]) -> Study:
        """The study that ``entries`` tell of."""
        started = next((e.record for e in entries if isinstance(e.record, StudyStarted)), None)
        if started is None or "objectives" not in started.settings:
            raise UserError("a study's journal must begin with its settings", out, "give the --out of elastune tune")
        asked = started.settings
        return cls(
            out=out,
            program=str(asked["program"]),
            seed=int(asked.get("seed", 0)),
            epochs=asked.get("epochs"),
            objectives=parse_objectives(asked["objectives"]),
            trials=trials(entries),
        )

    @property
    def complete(self) -> list[Trial]:
        """The trials with a value for every objective that broke no constraint."""
        return [trial for trial in self.trials if trial.state == "complete"]

    def front(self) -> list[Trial]:
        """The complete trials that no other dominates, best in the first objective first."""
        done = self.complete
        if not done:
            return []
        points = oriented([t.values for t in done], self.objectives)
        best = [t for t, keep in zip(done, nondominated(points), strict=True) if keep]
        return sorted(best, key=lambda t: tuple(oriented(t.values, self.objectives)))

    def subset(self, k: int) -> list[Trial]:
        """At most ``k`` trials of the front that together cover the most hypervolume, the most important first."""
        done = self.complete
        return [done[i] for i in representative(oriented([t.values for t in done], self.objectives), k)]

    def pick(self, *, weights: dict[str, float] | None = None, **targets: float) -> Picked:
        """One trial: ``pick(accuracy=0.98)`` by target, ``pick(weights={...})`` by weights, ``pick()`` the knee."""
        done = self.complete
        found = pick([t.values for t in done], self.objectives, targets=targets or None, weights=weights)
        trial = done[found.index]
        return Picked(trial, found.reason, run_command(self.program, trial.config, trial.means, self.seed, self.epochs))


def trials(entries: Sequence[Entry]) -> tuple[Trial, ...]:
    """The finished trials in a journal."""
    started = {e.record.trial: e.record for e in entries if isinstance(e.record, TrialStarted)}
    return tuple(
        Trial(
            number=r.trial,
            state=r.state,
            config=started[r.trial].config,
            means=started[r.trial].means,
            values=r.values,
            metrics=r.metrics,
            seconds=r.seconds,
            reason=r.reason,
            phase=started[r.trial].phase,
            tags=started[r.trial].tags,
        )
        for r in (e.record for e in entries)
        if isinstance(r, TrialFinished) and r.trial in started
    )
