"""A study's outcome: its trials, their front, and what to take from it. Reads the journal, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from elastune.core.divergence import FACTOR
from elastune.core.errors import UserError
from elastune.job.output_dir import JOURNAL
from elastune.journal.entry import Entry
from elastune.journal.reader import read
from elastune.journal.records import AFTERWARDS, ArtifactKept, StudyFinished, StudyStarted
from elastune.journal.trials import AllocationSpan, fold
from elastune.search.analysis.front import default_reference, hypervolume, nondominated, pick, representative
from elastune.search.analysis.importance import Importance, Tried, importance
from elastune.search.space.objective import Objective, oriented, parse_objectives
from elastune.study.results.assets import Assets, assets_of
from elastune.study.results.command import program_path, run_command
from elastune.study.results.trials import Trial, check_params, outcomes


@dataclass(frozen=True)
class Picked:
    """A trial of the front, why it was taken, and the command that trains it.

    ``caveat``: what the command does otherwise than the trial did; empty where it does the same.
    """

    trial: Trial
    reason: str
    command: str
    caveat: str = ""


@dataclass(frozen=True)
class Study:
    """All that a study found. ``program`` is the file it tuned; ``trials`` those that ended, then those that paused.

    ``seconds``: how long controllers worked on it; ``ending``: why they stopped ("": they have not). ``spans``: when
    which trial had how many of the study's ``workers``, which are those of its newest controller; ``worker_seconds``:
    those that all its controllers offered. ``defaults``: the program's own settings, where recorded.
    ``data``: the folder of data sets that the program was told. ``kept``: whose weights and predictions have stayed.
    ``assets``: single trials, soups and ensembles as one front, once one of the latter was written.
    """

    out: Path
    program: str
    seed: int
    epochs: int | None
    objectives: tuple[Objective, ...]
    trials: tuple[Trial, ...]
    workers: int = 1
    seconds: float = 0.0
    worker_seconds: float = 0.0
    ending: str = ""
    spans: tuple[AllocationSpan, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)
    price_per_worker_hour: float = 1.0
    divergence: float | None = FACTOR
    data: str | None = None
    kept: tuple[ArtifactKept, ...] = ()
    assets: Assets | None = None

    @classmethod
    def load(cls, out: str | Path) -> Study:
        """The study in folder ``out``, finished or not. Raises ``UserError`` where there is none."""
        return cls.of(Path(out), read(Path(out) / JOURNAL))

    @classmethod
    def of(cls, out: Path, entries: Sequence[Entry]) -> Study:
        """The study that ``entries`` tell of."""
        started = next((e.record for e in entries if isinstance(e.record, StudyStarted)), None)
        if started is None or "objectives" not in started.settings:
            raise UserError("a study's journal must begin with its settings", out, "give the --out of elastune tune")
        asked, table = started.settings, fold(entries)
        price = float(asked.get("price_per_worker_hour", 1.0))
        objectives = parse_objectives(asked["objectives"])
        workers, worker_seconds = _offered(entries)
        last = [e.record for e in entries if isinstance(e.record, (StudyStarted, StudyFinished))][-1]
        return cls(
            out=out,
            program=program_path(asked["program"]),
            seed=int(asked.get("seed", 0)),
            epochs=asked.get("epochs"),
            objectives=objectives,
            trials=outcomes(table, [o.name for o in objectives], price),
            workers=workers,
            seconds=table.seconds,
            worker_seconds=worker_seconds,
            ending=last.reason if isinstance(last, StudyFinished) else "",
            spans=table.spans,
            defaults=dict(asked.get("defaults", {})),
            price_per_worker_hour=price,
            divergence=asked.get("divergence", FACTOR),
            data=asked.get("data"),
            kept=tuple(table.artifacts[number] for number in sorted(table.artifacts)),
            assets=assets_of(entries, table),
        )

    @property
    def complete(self) -> list[Trial]:
        """The trials with a value for every objective that broke no constraint."""
        names = {objective.name for objective in self.objectives}
        return [trial for trial in self.trials if trial.state == "complete" and names <= trial.values.keys()]

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

    def covered(self, chosen: Sequence[Trial]) -> float:
        """The share of the front's hypervolume that ``chosen`` cover, from 0 to 1."""
        points = oriented([t.values for t in self.complete], self.objectives)
        reference = default_reference(points)
        return hypervolume(oriented([t.values for t in chosen], self.objectives), reference) / hypervolume(
            points, reference
        )

    def pick(self, *, weights: dict[str, float] | None = None, **targets: float) -> Picked:
        """One trial: ``pick(accuracy=0.98)`` by target, ``pick(weights={...})`` by weights, ``pick()`` the knee."""
        done = self.complete
        found = pick([t.values for t in done], self.objectives, targets=targets or None, weights=weights)
        trial = done[found.index]
        command = run_command(
            self.program,
            trial.config,
            trial.means,
            self.seed,
            self.epochs,
            defaults=self.defaults or None,
            divergence=self.divergence,
            data=self.data,
        )
        return Picked(trial, found.reason, command, self._caveat(trial))

    def _caveat(self, trial: Trial) -> str:
        """Where the command gives another result: what it leaves out of the trial's life."""
        left_out = []
        if trial.parent is not None:
            went = f"trial {trial.number} went on from a checkpoint of trial {trial.parent}"
            left_out.append(f"{went}; the command trains its settings from the beginning")
        had = sorted({span.workers for span in self.spans if span.trial == trial.number})
        if len(had) > 1 and trial.means.get("mode") == "fast":
            counts = " and ".join(map(str, had)) if len(had) == 2 else f"{had[0]} to {had[-1]}"
            went = f"trial {trial.number} had {counts} workers, which show in the result in fast mode"
            left_out.append(f"{went}; the command trains on {trial.means['workers']}")
        return "; ".join(left_out)

    def time_to(self, **targets: float) -> float | None:
        """Seconds from the study's start until the first trial that reaches all ``targets`` was there; None: never.

        Everything counts that happened until then: other trials, failed and paused ones, earlier controllers. Only the
        time between two controllers does not, when nobody worked on it. Raises ``UserError`` for an unknown objective.
        """
        if not targets:
            raise UserError("time_to needs a target", "none", "for example time_to(accuracy=0.98)")
        known = {objective.name: objective for objective in self.objectives}
        for name in targets:
            if name not in known:
                raise UserError("a target may name objectives only", name, f"known: {', '.join(known)}")
        asked = [known[name] for name in targets]
        limits = oriented(targets, asked)
        there = [t.ended_s for t in self.complete if (oriented(t.values, asked) <= limits).all()]
        return min(there, default=None)

    def importance(self) -> tuple[Importance, ...]:
        """How much each parameter decides every objective: see ``search.analysis.importance``."""
        check_params(self.trials)
        tried = [
            Tried(t.params, t.distributions, t.values)
            for t in self.trials
            if t.phase == "search" and t.state in ("complete", "infeasible")
        ]
        return importance(tried, self.objectives)

    def ensemble(self, **options: Any) -> Any:
        """``elastune.ensemble`` of this study, with the same options: an ``Ensemble``."""
        return _reuse("ensemble").ensemble(self, **options)

    def predict(self, data: Sequence[str], **options: Any) -> Any:
        """``elastune.predict`` of this study, with the same options: a list of ``Prediction``."""
        return _reuse("predict").predict(self, data, **options)

    def soup(self, **options: Any) -> Any:
        """What ``elastune soup`` does with this study, see ``reuse.soup_study``: a ``StudySoup``."""
        return _reuse("soup_study").soup_of_study(self, **options)

    def frame(self) -> Any:
        """One row a trial as a pandas ``DataFrame``: the columns of ``elastune export``, times as time stamps."""
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise UserError(
                "a frame needs pandas", "no such package", "pip install pandas, or use elastune export --csv"
            ) from None
        from elastune.study.results.trials import flat_row

        frame = pandas.DataFrame([flat_row(trial) for trial in self.trials])
        for name in ("started_at", "ended_at"):
            if name in frame:
                frame[name] = pandas.to_datetime(frame[name], unit="s", utc=True)
        return frame


def _reuse(module: str) -> Any:
    """A later room, by its name: a study offers what stands upon it, and is not built of it."""
    return import_module(f"elastune.reuse.{module}")


def _offered(entries: Sequence[Entry]) -> tuple[int, float]:
    """The workers of the newest controller, and the worker-seconds of all: each may be told other ``--workers``.

    Time between two controllers does not count.
    """
    workers, offered, last_at = 1, 0.0, entries[0].at
    for entry in entries:
        if isinstance(entry.record, AFTERWARDS):
            continue
        if isinstance(entry.record, StudyStarted):
            told = entry.record.settings.get("workers", 1)
            workers = max(told) if isinstance(told, list) else int(told)
        else:
            offered += workers * (entry.at - last_at)
        last_at = entry.at
    return workers, offered
