"""The result of a study: its trials, their front, which one to pick, and where its worker-seconds went.

All of it is read from the journal alone. Beside single trials a study offers soups, ensembles, joined and stacked
models. ``Assets`` is one front of all of them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from elastune.core.command import TrainingCommand
from elastune.core.divergence import FACTOR
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.folds import AllocationSpan, TrialTable, compared_all, fold, training_of
from elastune.core.journal.records import (
    AFTERWARDS,
    ArtifactKept,
    AssetMade,
    ChangesAccepted,
    Entry,
    StudyFinished,
    StudyStarted,
)
from elastune.runtime.job.output import JOURNAL
from elastune.tuning.search.constraint import parse_constraints
from elastune.tuning.search.front import (
    Pick,
    default_reference,
    hypervolume,
    nondominated,
    pick,
    quality,
    recommend,
    representative,
)
from elastune.tuning.search.importance import EvaluatedTrial, Importance, importance
from elastune.tuning.search.objective import Objective, oriented, parse_objectives
from elastune.tuning.study.run_command import program_path, run_command, training_command_of
from elastune.tuning.study.trials import (
    Trial,
    check_params,
    floor,
    largest_class,
    outcomes,
    proportional,
    reaching,
    tasks,
)

TRAINING, INFERENCE = "training_s", "parameters"
COSTS = (TRAINING, INFERENCE)
FATES = {
    "front": "trials on the final front",
    "complete": "other trials that completed",
    "paused": "trials that were stopped early or paused",
    "infeasible": "trials that failed or broke a constraint",
    "unfinished": "trials that have not ended",
    "resizing": "pauses while workers changed",
    "waiting": "waiting",
}


@dataclass(frozen=True)
class Picked:
    """A trial that was picked from the front.

    Attributes:
        trial: The trial.
        reason: Why this trial was picked.
        command: The command that trains it again.
        caveat: How the command differs from the trial; "" if it does the same.
    """

    trial: Trial
    reason: str
    command: str
    caveat: str = ""


class Front(list[Trial]):
    """The trials of a front. A notebook shows them as a table."""

    def _repr_html_(self) -> str | None:
        return html_of("of_front", self) if self else None


@dataclass(frozen=True)
class Study:
    """The result of a study, as ``elastune.tune`` returns it: its trials, their front, and the trials to choose.

    Attributes:
        out: The study's folder.
        program: The file that was tuned.
        trials: The trials that ended, then those that are paused.
        workers: How many workers the newest controller of the study had.
        seconds: How long controllers worked on the study.
        worker_seconds: The worker-seconds that all its controllers offered.
        ending: Why the study stopped; "" where it has not.
        spans: How many workers each trial had, and when.
        defaults: The program's own settings, where they were recorded.
        divergence: The factor of ``core.divergence``; None for off.
        data: The folder of data sets that the program got.
        kept: The trials whose weights and predictions were kept.
        since: Trials with lower numbers began before an accepted change of the program, its space or the data. They
            are in ``trials``, but not in fronts and picks.
        accepted: What was accepted, and when.
        assets: Single trials, soups, ensembles and further models on one front; None until the first model of several
            trials was written.
        until: The conditions of ``--until``. Only trials that reach them are recommended.
        proportional: Objectives that are another one times a constant: the cost at one price and a fixed number of
            workers. They do not count where trials are compared.
        largest_class: The share of the most frequent class of its training data, which is the accuracy of guessing it;
            0: unknown.

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
    arguments: tuple[str, ...] = ()
    training_command: TrainingCommand | None = None
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
        """Return the study of the journal's ``entries``."""
        started = next((e.record for e in entries if isinstance(e.record, StudyStarted)), None)
        if started is None or "objectives" not in started.settings:
            raise UserError("a study's journal must begin with its settings", out, "give the --out of elastune tune")
        first_settings, table = started.settings, fold(entries)
        price = float(first_settings.get("price_per_worker_hour", 1.0))
        objectives = parse_objectives(first_settings["objectives"])
        workers, worker_seconds = _offered(entries)
        last = [e.record for e in entries if isinstance(e.record, (StudyStarted, StudyFinished))][-1]
        newest = [e.record.settings for e in entries if isinstance(e.record, StudyStarted)][-1]
        names = [o.name for o in objectives]
        trials = outcomes(table, names, price)
        return cls(
            out=out,
            program=program_path(first_settings["program"]),
            seed=int(first_settings.get("seed", 0)),
            epochs=first_settings.get("epochs"),
            objectives=objectives,
            trials=trials,
            workers=workers,
            seconds=table.seconds,
            worker_seconds=worker_seconds,
            ending=last.reason if isinstance(last, StudyFinished) else "",
            spans=table.spans,
            defaults=dict(first_settings.get("defaults", {})),
            price_per_worker_hour=price,
            divergence=first_settings.get("divergence", FACTOR),
            data=first_settings.get("data"),
            arguments=tuple(first_settings.get("arguments", ())),
            training_command=training_command_of(first_settings),
            kept=tuple(table.artifacts[number] for number in sorted(table.artifacts)),
            assets=assets_of(entries, table),
            until=tuple(newest.get("until", ())),
            proportional=proportional(trials, names, first_settings),
            since=table.since,
            largest_class=largest_class(table),
            accepted=tuple(entry for entry in entries if isinstance(entry.record, ChangesAccepted)),
        )

    def _repr_html_(self) -> str | None:
        return html_of("of_study", self)

    @property
    def complete(self) -> list[Trial]:
        """The trials that have a value for every objective, break no constraint, and began since the last change."""
        names = {objective.name for objective in self.objectives}
        compared = (trial for trial in self.trials if trial.number >= self.since)
        return [trial for trial in compared if trial.state == "complete" and names <= trial.values.keys()]

    @property
    def tasks(self) -> tuple[str, ...]:
        """The parts of a tree of classes that its trials were trained for; () if all trials have one task."""
        return tasks(self.trials)

    @property
    def counted(self) -> tuple[Objective, ...]:
        """The objectives without those that are ``proportional`` to another one."""
        return tuple(each for each in self.objectives if each.name not in self.proportional)

    def front(self) -> Front:
        """Return the complete trials that no other trial dominates, the best in the first objective first."""
        done = self.complete
        if not done:
            return Front()
        points = oriented([t.values for t in done], self.objectives)
        best = [t for t, keep in zip(done, nondominated(points), strict=True) if keep]
        return Front(sorted(best, key=lambda t: tuple(oriented(t.values, self.objectives))))

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
        picked = pick([t.values for t in pool], self.objectives, targets=targets or None, weights=weights)
        return self._picked(pool, picked)

    def choices(self) -> tuple[Picked, ...]:
        """Return the trials to choose from without a preference, the pick first.

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
        picks = recommend(
            [t.values for t in pool],
            self.objectives,
            proportional=self.proportional,
            floor=floor(self.complete, lead, self.defaults, self.largest_class),
            condition=" and ".join(self.until) if any(lead.name in rule.names for rule in rules) else "",
        )
        return tuple(self._picked(pool, each) for each in picks)

    @property
    def eligible(self) -> list[Trial]:
        """The complete trials that reach ``until`` and so may be recommended."""
        return reaching(self.complete, parse_constraints(self.until))

    def no_choice_reason(self) -> str:
        """Return in one sentence why no trial is recommended; "" if one is."""
        if not self.complete:
            return "no trial has a result"
        try:
            self.choices()
        except UserError as error:
            return f"{error.rule} ({error.value}): {error.fix}"
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

    def _picked(self, pool: Sequence[Trial], picked: Pick) -> Picked:
        trial = pool[picked.index]
        command = run_command(
            self.program,
            trial.config,
            trial.execution,
            self.seed,
            self.epochs,
            defaults=self.defaults or None,
            divergence=self.divergence,
            data=self.data,
            arguments=self.arguments,
            training_command=self.training_command,
        )
        return Picked(trial, picked.reason, command, self._caveat(trial))

    def _caveat(self, trial: Trial) -> str:
        """Why the command may give another result than the trial; "" if it gives the same."""
        left_out = []
        if trial.parent is not None:
            cause = f"trial {trial.number} went on from a checkpoint of trial {trial.parent}"
            left_out.append(f"{cause}; the command trains its settings from the beginning")
        worker_counts = sorted({span.workers for span in self.spans if span.trial == trial.number})
        if len(worker_counts) > 1 and trial.execution.get("mode") == "fast":
            counts = (
                " and ".join(map(str, worker_counts))
                if len(worker_counts) == 2
                else f"{worker_counts[0]} to {worker_counts[-1]}"
            )
            cause = f"trial {trial.number} had {counts} workers, which show in the result in fast mode"
            left_out.append(f"{cause}; the command trains on {trial.execution['workers']}")
        return "; ".join(left_out)

    def time_to(self, **targets: float) -> float | None:
        """Return the seconds from the study's start until the first trial reached all ``targets``; None if none did.

        The time includes all other trials, also failed and paused ones, and earlier controllers. Only the time between
        two controllers does not count.

        Raises:
            UserError: For an unknown objective.
        """
        if not targets:
            raise UserError("time_to needs a target", "none", "for example time_to(accuracy=0.98)")
        by_name = {objective.name: objective for objective in self.objectives}
        for name in targets:
            if name not in by_name:
                raise UserError("a target may name objectives only", name, f"known: {', '.join(by_name)}")
        wanted = [by_name[name] for name in targets]
        limits = oriented(targets, wanted)
        ends_s = [t.ended_s for t in self.complete if (oriented(t.values, wanted) <= limits).all()]
        return min(ends_s, default=None)

    def importance(self) -> tuple[Importance, ...]:
        """Return how much each parameter decides each objective: see ``tune.search.importance``."""
        check_params(self.trials)
        tried = [
            EvaluatedTrial(t.params, t.distributions, t.values)
            for t in self.trials
            if t.number >= self.since and t.phase == "search" and t.state in ("complete", "infeasible")
        ]
        return importance(tried, self.objectives)

    def ensemble(self, **options: Any) -> Any:
        """Call ``elastune.ensemble`` for this study, with the same options; returns an ``Ensemble``."""
        return _reuse("ensemble").ensemble(self, **options)

    def predict(self, data: Sequence[str], **options: Any) -> Any:
        """Call ``elastune.predict`` for this study, with the same options; returns a list of ``Prediction``."""
        return _reuse("predictions").predict(self, data, **options)

    def soup(self, **options: Any) -> Any:
        """Average the weights of kept trials, as ``elastune soup`` does; returns a ``StudySoup``.

        See ``tuning.reuse.soup`` for the options.
        """
        return _reuse("soup").soup_of_study(self, **options)

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
        from elastune.tuning.study.trials import flat_row

        frame = pandas.DataFrame([flat_row(trial) for trial in self.trials])
        for name in ("started_at", "ended_at"):
            if name in frame:
                frame[name] = pandas.to_datetime(frame[name], unit="s", utc=True)
        return frame


def html_of(kind: str, result: object) -> str | None:
    """What a notebook shows of ``result``: by a function of ``report.notebook``, which comes after this room.

    None, for which notebooks show the text, where the journal or a package of reports is missing.
    """
    try:
        return getattr(import_module("elastune.report.notebook"), kind)(result) or None
    except (ImportError, OSError, UserError):
        return None


def _reuse(module: str) -> Any:
    """Import a module of ``tuning.reuse`` by name: ``reuse`` imports this file, so this file must not import it."""
    return import_module(f"elastune.tuning.reuse.{module}")


def _offered(entries: Sequence[Entry]) -> tuple[int, float]:
    """The workers of the newest controller, and the worker-seconds of all, which may have other ``--workers``.

    Time between two controllers does not count.
    """
    workers, offered, last_at = 1, 0.0, entries[0].at
    for entry in entries:
        if isinstance(entry.record, AFTERWARDS):
            continue
        if isinstance(entry.record, StudyStarted):
            setting = entry.record.settings.get("workers", 1)
            workers = max(setting) if isinstance(setting, list) else int(setting)
        else:
            offered += workers * (entry.at - last_at)
        last_at = entry.at
    return workers, offered


# --- one front of all models ---


@dataclass(frozen=True)
class AssetPoint:
    """A model that can be used.

    Attributes:
        form: "trial", "soup", "ensemble", "joined" or "stacked".
        trials: The trials of the model.
        parts: The trials of a joined or stacked model, each with the name of its study: "gate 3".
        values: The score by its name, ``training_s`` and ``parameters``. ``training_s`` is the worker-seconds of its
            trials and of the trials whose weights they began with. Other trials of the search do not count.
            ``parameters`` is the number of parameters that one inference uses.
        method: How its trials were chosen and weighted; "" for a trial.
        file: The path of the model; "" for a trial.
        sha256: The digest of ``file`` when it was written.
        test: The score on held-out data, where known. No choice uses it.
        unrecorded: Initial weights of its trials whose training is in no journal, so that ``training_s`` lacks it.
    """

    form: str
    trials: tuple[int, ...]
    values: dict[str, float]
    method: str = ""
    file: str = ""
    test: float | None = None
    unrecorded: tuple[str, ...] = ()
    sha256: str = ""
    parts: tuple[str, ...] = ()

    @property
    def whom(self) -> str:
        """The trials of the model, in words."""
        return ", ".join((*map(str, self.trials), *self.parts))

    @cached_property
    def trouble(self) -> str:
        """Why the model cannot be used: its file is "gone" or "changed"; "": it can. The file is read once."""
        if not self.file:
            return ""
        try:
            with Path(self.file).open("rb") as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
        except OSError:
            return "gone"
        return "" if same else "changed"


@dataclass(frozen=True)
class PickedAsset:
    """A point of the front, and the reason why it was picked."""

    point: AssetPoint
    reason: str


@dataclass(frozen=True)
class Assets:
    """All models of a study on one front, judged by one score on the same predictions.

    A model whose file is gone or has changed stays among the points, but is neither on the front nor picked.

    Attributes:
        data: The data set of the predictions.
        objectives: The score, the training time and the number of parameters.
        points: The models.
    """

    data: str
    objectives: tuple[Objective, ...]
    points: tuple[AssetPoint, ...]

    @property
    def usable(self) -> list[AssetPoint]:
        """The points whose files exist unchanged."""
        return [point for point in self.points if not point.trouble]

    def front(self) -> list[AssetPoint]:
        """Return the points that no other point dominates, the best score first."""
        usable = self.usable
        if not usable:
            return []
        keep = nondominated(oriented([point.values for point in usable], self.objectives))
        best = [point for point, on_front in zip(usable, keep, strict=True) if on_front]
        return sorted(best, key=lambda point: tuple(oriented(point.values, self.objectives)))

    def pick(self, *, weights: Mapping[str, float] | None = None, **targets: float) -> PickedAsset:
        """Pick one point as ``Study.pick`` picks a trial.

        Without targets and weights it is the point with the least training within 1 % of the best score.

        Raises:
            UserError: If no point reaches a target, for unknown names, and if no file is left.

        Example:
            >>> elastune.Study.load("out").assets.pick(accuracy=0.9, weights={"parameters": 1})
        """
        usable = self.usable
        if not usable:
            rule = "what is picked is there as it was written"
            raise UserError(rule, "none of the files is", "restore them, or write them anew")
        picked = pick([p.values for p in usable], self.objectives, targets=targets or None, weights=weights)
        return PickedAsset(usable[picked.index], picked.reason)


def assets_of(entries: Sequence[Entry], table: TrialTable) -> Assets | None:
    """Return the models that a study's journal records; None if no model was made of its trials.

    All are judged by the score and the predictions of the newest model.
    """
    made = [entry.record for entry in entries if isinstance(entry.record, AssetMade)]
    if not made:
        return None
    newest = made[-1]
    comparable = [asset for asset in made if (asset.data, asset.objective) == (newest.data, newest.objective)]
    name = newest.objective

    def point(form: str, trials: Iterable[int], score: float, parameters: int, **more: Any) -> AssetPoint:
        members = tuple(trials)
        training = training_of(entries, table, [trial for trial in members if trial in table.trials])
        seconds = training.worker_seconds + more.pop("parts_s", 0.0)
        values = {name: score, TRAINING: seconds, INFERENCE: float(parameters)}
        return AssetPoint(form, members, values, unrecorded=(*training.unrecorded, *more.pop("unrecorded", ())), **more)

    points: dict[object, AssetPoint] = {}  # a newer entry replaces an older one of the same model
    for asset in comparable:
        for single in asset.singles:
            points[single.trial] = point("trial", [single.trial], single.score, single.parameters)
        trials = (member.trial for member in asset.members)
        parts = tuple(f"{Path(part.study).name} {part.trial}" for part in asset.parts)
        fields_of_asset: dict[str, Any] = {
            "method": asset.method,
            "file": asset.file,
            "test": asset.test,
            "sha256": asset.sha256,
        }
        fields_of_asset["parts"] = parts
        fields_of_asset |= {"parts_s": asset.parts_s, "unrecorded": asset.unrecorded}
        points[asset.file] = point(asset.form, trials, asset.score, asset.parameters, **fields_of_asset)
    objectives = (Objective(name, newest.direction), Objective(TRAINING, "min"), Objective(INFERENCE, "min"))
    return Assets(newest.data, objectives, tuple(points.values()))


def asset_json(point: AssetPoint) -> dict[str, Any]:
    """Return a point as plain values."""
    values = {field.name: getattr(point, field.name) for field in fields(point)}
    lists = {name: list(values[name]) for name in ("trials", "unrecorded", "parts")}
    return {**values, **lists, "trouble": point.trouble}


# --- where the worker-seconds went ---


def worker_time(study: Study) -> dict[str, float]:
    """Return where the worker-seconds of ``study`` went, as shares that sum to 1.

    Args:
        study: The result of ``elastune.tune``, or ``Study.load(folder)``.

    Returns:
        A share for each of ``FATES``. The shares of trials leave out the pauses in which their workers changed. Time
        without a trial counts as waiting. The result is empty if the study took no time.

    Example:
        >>> worker_time(elastune.Study.load("out"))["front"]
        0.31
    """
    used: dict[int, float] = defaultdict(float)
    paused: dict[int, float] = defaultdict(float)
    for span in study.spans:
        used[span.trial] += span.worker_seconds
        paused[span.trial] += span.pause_s * span.workers
    whole = max(study.worker_seconds, sum(used.values()))
    if whole <= 0:
        return {}
    front = {trial.number for trial in study.front()}
    states = {trial.number: trial.state for trial in study.trials}
    shares = dict.fromkeys(FATES, 0.0)
    for number, seconds in used.items():
        resizing = min(paused[number], seconds)
        shares["resizing"] += resizing / whole
        fate = "front" if number in front else states.get(number, "unfinished")
        shares[fate if fate in FATES else "infeasible"] += (seconds - resizing) / whole
    shares["waiting"] = max(0.0, 1.0 - sum(shares.values()))
    return shares
