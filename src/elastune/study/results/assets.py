"""One front of all models that a study offers: single trials, soups, ensembles, joined and stacked models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from elastune.core.errors import UserError
from elastune.journal.entry import Entry
from elastune.journal.records import AssetMade
from elastune.journal.training import training_of
from elastune.journal.trials import TrialTable
from elastune.search.analysis.front import nondominated, pick
from elastune.search.space.objective import Objective, oriented

TRAINING, INFERENCE = "training_s", "parameters"
COSTS = (TRAINING, INFERENCE)


@dataclass(frozen=True)
class AssetPoint:
    """A model that can be used.

    Attributes:
        form: "trial", "soup", "ensemble", "joined" or "stacked".
        trials: The trials that it is made of.
        parts: The trials of a joined or stacked model, each with the name of its study: "gate 3".
        values: The score by its name, ``training_s`` and ``parameters``. ``training_s`` is the worker-seconds of its
            trials together with those of the weights they began with, whatever else the search has tried.
            ``parameters`` is the number of parameters that one inference uses.
        method: How its trials were found and weighed; "" for a trial.
        file: Where it was written; "" for a trial.
        sha256: The digest of what was written to ``file``.
        test: The score on data that no choice has seen, where it is known. Nothing is picked by it.
        untold: Weights that its trials began with, whose training is in no journal: ``training_s`` does not count it.
    """

    form: str
    trials: tuple[int, ...]
    values: dict[str, float]
    method: str = ""
    file: str = ""
    test: float | None = None
    untold: tuple[str, ...] = ()
    sha256: str = ""
    parts: tuple[str, ...] = ()

    @property
    def whom(self) -> str:
        """The trials that it is made of, in words."""
        return ", ".join((*map(str, self.trials), *self.parts))

    @cached_property
    def trouble(self) -> str:
        """Why it cannot be used: its file is gone or has changed; "" where it can be used. The file is read once."""
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
    """All ``points`` that were judged by one score on the same predictions, ``data``.

    A model whose file is gone or has changed stays among the points, but is neither on the front nor picked.
    """

    data: str
    objectives: tuple[Objective, ...]
    points: tuple[AssetPoint, ...]

    @property
    def usable(self) -> list[AssetPoint]:
        """The points whose files are still there as they were written."""
        return [point for point in self.points if not point.trouble]

    def front(self) -> list[AssetPoint]:
        """Return the points that no other point dominates, the best score first."""
        known = self.usable
        if not known:
            return []
        keep = nondominated(oriented([point.values for point in known], self.objectives))
        best = [point for point, on_front in zip(known, keep, strict=True) if on_front]
        return sorted(best, key=lambda point: tuple(oriented(point.values, self.objectives)))

    def pick(self, *, weights: Mapping[str, float] | None = None, **targets: float) -> PickedAsset:
        """Pick one point as ``Study.pick`` picks a trial: by targets, by weights, or the least training
        within 1 % of the best score.

        Raises:
            UserError: Where no point reaches a target, for unknown names, and where no file is left.

        Example:
            >>> elastune.Study.load("out").assets.pick(accuracy=0.9, weights={"parameters": 1})
        """
        known = self.usable
        if not known:
            rule = "what is picked is there as it was written"
            raise UserError(rule, "none of the files is", "restore them, or write them anew")
        found = pick([p.values for p in known], self.objectives, targets=targets or None, weights=weights)
        return PickedAsset(known[found.index], found.reason)


def assets_of(entries: Sequence[Entry], table: TrialTable) -> Assets | None:
    """Return the models that a study's journal tells of; None where nothing was made of its trials.

    All are judged by the score and the predictions of the newest model that was made.
    """
    made = [entry.record for entry in entries if isinstance(entry.record, AssetMade)]
    if not made:
        return None
    newest = made[-1]
    alike = [one for one in made if (one.data, one.objective) == (newest.data, newest.objective)]
    name = newest.objective

    def point(form: str, trials: Iterable[int], score: float, parameters: int, **more: Any) -> AssetPoint:
        of = tuple(trials)
        took = training_of(entries, table, [trial for trial in of if trial in table.trials])
        seconds = took.worker_seconds + more.pop("parts_s", 0.0)
        values = {name: score, TRAINING: seconds, INFERENCE: float(parameters)}
        return AssetPoint(form, of, values, untold=(*took.untold, *more.pop("untold", ())), **more)

    points: dict[object, AssetPoint] = {}  # what was found again, or written anew, takes the place of what was
    for one in alike:
        for single in one.singles:
            points[single.trial] = point("trial", [single.trial], single.score, single.parameters)
        trials = (member.trial for member in one.members)
        parts = tuple(f"{Path(part.study).name} {part.trial}" for part in one.parts)
        told: dict[str, Any] = {"method": one.method, "file": one.file, "test": one.test, "sha256": one.sha256}
        told["parts"] = parts
        told |= {"parts_s": one.parts_s, "untold": one.untold}
        points[one.file] = point(one.form, trials, one.score, one.parameters, **told)
    objectives = (Objective(name, newest.direction), Objective(TRAINING, "min"), Objective(INFERENCE, "min"))
    return Assets(newest.data, objectives, tuple(points.values()))


def asset_json(point: AssetPoint) -> dict[str, Any]:
    """Return a point as plain values."""
    told = {field.name: getattr(point, field.name) for field in fields(point)}
    lists = {name: list(told[name]) for name in ("trials", "untold", "parts")}
    return {**told, **lists, "trouble": point.trouble}
