"""The result of a study: its trials, their front, and what to pick. All of it is read from the journal alone."""

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
from elastune.journal.records import AFTERWARDS, ArtifactKept, ChangesAccepted, StudyFinished, StudyStarted
from elastune.journal.trials import AllocationSpan, compared_all, fold
from elastune.search.analysis.front import (
    Pick,
    default_reference,
    hypervolume,
    nondominated,
    pick,
    quality,
    recommend,
    representative,
)
from elastune.search.analysis.importance import Importance, Tried, importance
from elastune.search.space.constraint import parse_constraints
from elastune.search.space.objective import Objective, oriented, parse_objectives
from elastune.study.results.assets import Assets, assets_of
from elastune.study.results.command import program_path, run_command
from elastune.study.results.eligible import floor, largest_class, proportional, reaching, tasks
from elastune.study.results.trials import Trial, check_params, outcomes


@dataclass(frozen=True)
class Picked:
    """A trial that was picked from the front.

    Attributes:
        trial: The trial.
        reason: Why this trial was picked.
        command: The command that trains it again.
        caveat: What the command does in another way than the trial did; "" where it does the same.
    """

    trial: Trial
    reason: str
    command: str
    caveat: str = ""


@dataclass(frozen=True)
class Study:
    """All that a study found.

    Attributes:
        out: The study's folder.
        program: The file that was tuned.
        trials: The trials that ended, then those that are paused.
        workers: How many workers the newest controller of the study had.
        seconds: How long controllers worked on the study.
        worker_seconds: The worker-seconds that all its controllers offered.
        ending: Why the study stopped; "" where it has not.
        spans: When each trial had how many of the workers.
        defaults: The program's own settings, where they were recorded.
        divergence: The factor of ``core.divergence``; None for off.
        data: The folder of data sets that the program was told.
        kept: The trials whose weights and predictions were kept.
        since: Trials with lower numbers began before a change of the program, its space or the data, which was
            accepted. They are in ``trials``; fronts and picks are of the others.
        accepted: What was accepted, and when.
        assets: Single trials, soups, ensembles and further models on one front; None until the first model of several
            trials was written.
        until: What ``--until`` asked for. Only trials that reach it are recommended.
        proportional: Objectives that are another one times a constant: the cost at one price and a fixed number of
            workers. They do not count as objectives of their own where trials are weighed.
        largest_class: The share of the most frequent class of its training data: what guessing it gives; 0 where it is
            not known.

    Example:
        >>> elastune.Study.load("out").pick(accuracy=0.98).command
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
    until: tuple[str, ...] = ()
    proportional: frozenset[str] = frozenset()
    since: int = 0
    largest_class: float = 0.0
    accepted: tuple[Entry, ...] = ()

    @classmethod
    def load(cls, out: str | Path, *, across_changes: bool = False) -> Study:
        """Read the study in folder ``out``, finished or not.

        Args:
            out: The folder.
            across_changes: Compare trials that began before an accepted change with those after it.

        Raises:
            UserError: Where the folder holds no study.
        """
        entries = read(Path(out) / JOURNAL)
        return cls.of(Path(out), compared_all(entries) if across_changes else entries)

    @classmethod
    def of(cls, out: Path, entries: Sequence[Entry]) -> Study:
        """Return the study that the journal's ``entries`` tell of."""
        started = next((e.record for e in entries if isinstance(e.record, StudyStarted)), None)
        if started is None or "objectives" not in started.settings:
            raise UserError("a study's journal must begin with its settings", out, "give the --out of elastune tune")
        asked, table = started.settings, fold(entries)
        price = float(asked.get("price_per_worker_hour", 1.0))
        objectives = parse_objectives(asked["objectives"])
        workers, worker_seconds = _offered(entries)
        last = [e.record for e in entries if isinstance(e.record, (StudyStarted, StudyFinished))][-1]
        newest = [e.record.settings for e in entries if isinstance(e.record, StudyStarted)][-1]
        names = [o.name for o in objectives]
        trials = outcomes(table, names, price)
        return cls(
            out=out,
            program=program_path(asked["program"]),
            seed=int(asked.get("seed", 0)),
            epochs=asked.get("epochs"),
            objectives=objectives,
            trials=trials,
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
            until=tuple(newest.get("until", ())),
            proportional=proportional(trials, names, asked),
            since=table.since,
            largest_class=largest_class(table),
            accepted=tuple(entry for entry in entries if isinstance(entry.record, ChangesAccepted)),
        )

    @property
    def complete(self) -> list[Trial]:
        """The trials that have a value for every objective, break no constraint, and began since the last change."""
        names = {objective.name for objective in self.objectives}
        compared = (trial for trial in self.trials if trial.number >= self.since)
        return [trial for trial in compared if trial.state == "complete" and names <= trial.values.keys()]

    @property
    def tasks(self) -> tuple[str, ...]:
        """The parts of a tree of classes that its trials were trained for; () where they can be compared."""
        return tasks(self.trials)

    @property
    def counted(self) -> tuple[Objective, ...]:
        """The objectives without those that are ``proportional`` to another one."""
        return tuple(each for each in self.objectives if each.name not in self.proportional)

    def front(self) -> list[Trial]:
        """Return the complete trials that no other trial dominates, the best in the first objective first."""
        done = self.complete
        if not done:
            return []
        points = oriented([t.values for t in done], self.objectives)
        best = [t for t, keep in zip(done, nondominated(points), strict=True) if keep]
        return sorted(best, key=lambda t: tuple(oriented(t.values, self.objectives)))

    def subset(self, k: int) -> list[Trial]:
        """Return at most ``k`` trials of the front that together cover the most hypervolume.

        The most important trial comes first.
        """
        done = self.complete
        return [done[i] for i in representative(oriented([t.values for t in done], self.counted), k)]

    def covered(self, chosen: Sequence[Trial]) -> float:
        """Return the share of the front's hypervolume that the trials ``chosen`` cover, from 0 to 1."""
        points = oriented([t.values for t in self.complete], self.counted)
        reference = default_reference(points)
        return hypervolume(oriented([t.values for t in chosen], self.counted), reference) / hypervolume(
            points, reference
        )

    def pick(self, *, weights: dict[str, float] | None = None, **targets: float) -> Picked:
        """Pick one trial of the front: by targets, by weights, or, without either, the first of ``choices``.

        Args:
            weights: How much each objective counts.
            targets: Values of objectives that the trial must reach. They take the place of ``until``.

        Raises:
            UserError: Where no trial may be recommended: there is none, none reaches the targets or ``until``, or the
                trials have different tasks.

        Example:
            >>> study.pick(accuracy=0.98)
            >>> study.pick(weights={"accuracy": 2, "seconds": 1})
            >>> study.pick()
        """
        if not targets and not weights:
            return self.choices()[0]
        self._check_comparable()
        pool = self.complete if targets else self.eligible
        if pool == [] and self.complete:
            raise self._unreached()
        found = pick([t.values for t in pool], self.objectives, targets=targets or None, weights=weights)
        return self._picked(pool, found)

    def choices(self) -> tuple[Picked, ...]:
        """Return the trials to choose from where nobody has said a preference, the pick first.

        They are the fastest trial within 1 % of the best quality (the pick), the best one, and the cheapest within 5 %
        of the best. One trial may be several of them.

        Raises:
            UserError: Where no trial may be recommended: see ``pick``.

        Example:
            >>> [choice.command for choice in study.choices()]
        """
        self._check_comparable()
        pool, lead = self.eligible, quality(self.objectives)
        if not pool and self.complete:
            raise self._unreached()
        rules = parse_constraints(self.until)
        found = recommend(
            [t.values for t in pool],
            self.objectives,
            proportional=self.proportional,
            floor=floor(self.complete, lead, self.defaults, self.largest_class),
            condition=" and ".join(self.until) if any(lead.name in rule.names for rule in rules) else "",
        )
        return tuple(self._picked(pool, each) for each in found)

    @property
    def eligible(self) -> list[Trial]:
        """The complete trials that reach ``until``: those that may be recommended."""
        return reaching(self.complete, parse_constraints(self.until))

    def no_choice(self) -> str:
        """Return why no trial is recommended, in one sentence; "" where one is."""
        if not self.complete:
            return "no trial has a result"
        try:
            self.choices()
        except UserError as refused:
            return f"{refused.rule} ({refused.value}): {refused.fix}"
        return ""

    def _check_comparable(self) -> None:
        if self.tasks:
            rule = "a pick is among trials of one task"
            value = f"{len(self.tasks)} parts of a tree of classes"
            raise UserError(rule, value, "make one model of them: elastune join, see docs/transfer.md")

    def _unreached(self) -> UserError:
        lead = quality(self.objectives)
        best = min(self.complete, key=lambda t: float(oriented(t.values, [lead])[0])).values[lead.name]
        rule = f"a trial must reach {' and '.join(self.until)} to be recommended"
        return UserError(
            rule, f"none does; the best {lead.name} is {best:g}", "search on with --resume, or give --pick"
        )

    def _picked(self, pool: Sequence[Trial], found: Pick) -> Picked:
        trial = pool[found.index]
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
        """Return the seconds from the study's start until the first trial reached all ``targets``; None where none did.

        The time covers everything that happened until then: other trials, failed and paused ones, earlier controllers.
        Only the time between two controllers, when nobody worked on the study, does not count.

        Raises:
            UserError: For an unknown objective.
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
        """Return how much each parameter decides each objective: see ``search.analysis.importance``."""
        check_params(self.trials)
        tried = [
            Tried(t.params, t.distributions, t.values)
            for t in self.trials
            if t.number >= self.since and t.phase == "search" and t.state in ("complete", "infeasible")
        ]
        return importance(tried, self.objectives)

    def ensemble(self, **options: Any) -> Any:
        """Call ``elastune.ensemble`` for this study, with the same options; returns an ``Ensemble``."""
        return _reuse("ensemble").ensemble(self, **options)

    def predict(self, data: Sequence[str], **options: Any) -> Any:
        """Call ``elastune.predict`` for this study, with the same options; returns a list of ``Prediction``."""
        return _reuse("predict").predict(self, data, **options)

    def soup(self, **options: Any) -> Any:
        """Average the weights of kept trials, as ``elastune soup`` does; returns a ``StudySoup``.

        See ``reuse.soup_study`` for the options.
        """
        return _reuse("soup_study").soup_of_study(self, **options)

    def frame(self) -> Any:
        """Return the trials as a pandas ``DataFrame``, one row a trial.

        The columns are those of ``elastune export``; times are time stamps.
        """
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
