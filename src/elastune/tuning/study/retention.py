"""Which trials keep their weights and predictions after they end: the rules, and the deletion of the rest.

A rule ranks the trials, and the keeper stays within a limit of bytes. The journal records what exists. The rule
``diverse`` measures by how much the predictions of two trials differ, since ensembles gain from that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.core.journal.folds import TrialSummary, TrialTable
from elastune.core.journal.records import ArtifactKept, ArtifactRemoved
from elastune.runtime.clusters.base import RunFiles
from elastune.train.checkpoints.checkpoint import of_step
from elastune.train.predictions import HELD_OUT, file_of, read_predictions
from elastune.tuning.search.front import nondominated

Standing = Mapping[int, tuple[float, ...]]
"""The values of the complete trials so far, by number; smaller is better."""
PairDistance = Callable[[int, int], float | None]
"""By how much the predictions of two trials differ; None: unknown."""
KEEP_NOTHING = "none"
ROWS = 10_000  # predictions of one data set that are compared, at most: an even sample
_RULE = "what is kept is none, all, front, best, best:K, diverse, diverse:K or last:K, joined by +"
DIVERSE = 8  # trials that the rule ``diverse`` keeps
_FIX = 'such as --keep "front+last:3"'


class Retention(Protocol):
    """A retention rule. It decides after every complete trial, because that trial may have overtaken others."""

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        """Return the trials of ``ended`` (the newest last) whose folders stay, the most wanted first."""
        ...


@dataclass(frozen=True)
class KeepNothing:
    """``none``: nothing stays but the results in the journal."""

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        return []


@dataclass(frozen=True)
class KeepAll:
    """``all``: everything stays, the best first.

    It is for studies whose later trials begin with weights of earlier ones, or whose use is still open.
    """

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        return list(dict.fromkeys([*by_rank(standing), *reversed(ended)]))


@dataclass(frozen=True)
class KeepFront:
    """``front``: the trials that no other trial dominates stay."""

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        return by_rank(standing, layers=1)


@dataclass(frozen=True)
class KeepBest:
    """``best:K``: the best ``count`` trials by each objective stay."""

    count: int = 1

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        kept: dict[int, None] = {}

        def order_by(axis: int) -> list[int]:
            return sorted(standing, key=lambda number: standing[number][axis])

        ranked = [order_by(axis) for axis in range(len(next(iter(standing.values()), ())))]
        for rank in range(self.count):
            kept |= dict.fromkeys(order[rank] for order in ranked if rank < len(order))
        return list(kept)


@dataclass(frozen=True)
class KeepLast:
    """``last:K``: the ``count`` trials that ended last stay, whatever they reached."""

    count: int = 1

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        return list(reversed(ended))[: self.count]


@dataclass(frozen=True)
class KeepDiverse:
    """``diverse:K``: the best trial stays, and others with the most different predictions, ``count`` together.

    They are for ensembles. They are chosen one after another: each is the trial that is furthest from the nearest
    chosen one. Only the better half of the trials counts, or the best ``count`` if these are more, because a trial that
    has learnt nothing differs most.
    """

    count: int = DIVERSE

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        ranked = by_rank(standing)
        rest = ranked[: max(self.count, len(ranked) // 2)]
        kept, rest = rest[:1], rest[1:]
        while len(kept) < self.count:
            distances = {number: _nearest([apart(number, other) for other in kept]) for number in rest}
            best = max(rest, key=lambda number: distances[number], default=None)
            if best is None or distances[best] < 0:
                break
            kept.append(best)
            rest.remove(best)
        return kept


@dataclass(frozen=True)
class KeepAny:
    """``A+B``: trials that one of ``rules`` keeps stay; the trials of the first rule come first."""

    rules: tuple[Retention, ...]

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        return list(dict.fromkeys(number for rule in self.rules for number in rule.chosen(ended, standing, apart)))


def parse_retention(text: str) -> Retention:
    """Return the rule that ``text`` names, as for ``--keep``. Raises ``UserError``."""
    parts = [part.strip() for part in text.split("+")]
    if parts == [KEEP_NOTHING]:
        return KeepNothing()
    rules = tuple(_parse_rule(part, text) for part in parts)
    return rules[0] if len(rules) == 1 else KeepAny(rules)


def retention_of(keep: str, most_bytes: int | None, *, population: bool) -> Retention:
    """Return the rule ``keep``, within ``most_bytes`` of the disk.

    Raises:
        UserError: For a text that is not a rule. Also for a rule other than ``all`` with a ``population``, whose
            members begin with checkpoints of other members.
    """
    parsed = parse_retention(keep)
    if most_bytes is not None and (parsed == KeepNothing() or most_bytes < 1):
        fix = "leave it out, or say what to keep, such as --keep best:8 --keep-size 2GB"
        raise UserError("a bound is for what --keep keeps, and above 0", most_bytes, fix)
    if not population:
        return parsed
    if parsed not in (KeepNothing(), KeepAll()) or most_bytes is not None:
        rule = "members of a population begin with one another's checkpoints, so all stay"
        raise UserError(rule, f"--keep {keep}", "use --keep all, without --keep-size")
    return KeepAll()


def _parse_rule(part: str, text: str) -> Retention:
    name, colon, argument = part.partition(":")
    if name in ("all", "front") and not colon:
        return KeepAll() if name == "all" else KeepFront()
    count = int(argument) if argument.isascii() and argument.isdecimal() and len(argument) < 7 else 0
    if name == "best" and (count or not colon):
        return KeepBest(count or 1)
    if name == "diverse" and (count > 1 or not colon):
        return KeepDiverse(count or DIVERSE)
    if name == "last" and count:
        return KeepLast(count)
    raise UserError(_RULE, repr(text)[:80], _FIX)


def _nearest(distances: Sequence[float | None]) -> float:
    """The smallest distance; -1 if one is unknown."""
    return min(-1.0 if each is None else each for each in distances)


def by_rank(standing: Standing, layers: int | None = None) -> list[int]:
    """Return the trials front by front: those that no other trial dominates, then the front of the rest, and so on.

    Within one front, the better by the first objective comes first.

    Args:
        standing: The trials and their values.
        layers: The number of fronts; None: all.
    """
    rest, ranked = dict(standing), []
    while rest and layers != 0:
        best = nondominated(np.array(list(rest.values()), dtype=float))
        front = [number for number, on_front in zip(rest, best, strict=True) if on_front]
        if not front:  # such as values that are not numbers
            break
        ranked += sorted(front, key=lambda number: standing[number])
        rest = {number: values for number, values in rest.items() if number not in set(front)}
        layers = None if layers is None else layers - 1
    return ranked


# --- by how much predictions differ ---


class Disagreements:
    """Measures by how much the predictions of kept trials differ. Each file of predictions is read once.

    Held-out data do not count, since retention is a choice, too. ``folder`` returns the folder of a trial.
    """

    def __init__(self, folder: Callable[[int], Path]) -> None:
        self._folder = folder
        self._read: dict[tuple[int, str], NDArray[Any] | None] = {}

    def between(self, first: ArtifactKept, second: ArtifactKept) -> float | None:
        """Return by how much the predictions of two trials differ; None if they have none of the same data.

        For classes it is the share of samples with different classes. For values it is the mean distance in standard
        deviations of the targets.
        """
        for name in sorted(set(first.predictions) & set(second.predictions)):
            parts = [self._read_comparable(kept, name) for kept in (first, second)]
            if parts[0] is not None and parts[1] is not None and parts[0].shape == parts[1].shape:
                return apart(parts[0], parts[1])
        return None

    def forget(self, kept_trials: Mapping[int, ArtifactKept]) -> None:
        """Free the memory of all predictions that are not among ``kept_trials``."""
        digests = {(kept.trial, digest) for kept in kept_trials.values() for digest in kept.predictions.values()}
        self._read = {key: predictions for key, predictions in self._read.items() if key in digests}

    def _read_comparable(self, kept: ArtifactKept, name: str) -> NDArray[Any] | None:
        if name.startswith(HELD_OUT):
            return None
        key = kept.trial, kept.predictions[name]
        if key not in self._read:
            try:
                content = read_predictions(file_of(self._folder(kept.trial), name), key[1])
            except UserError:  # a damaged file is reported where it is used; it must not end a study
                self._read[key] = None
            else:
                self._read[key] = _comparable(content["outputs"], content["targets"])
        return self._read[key]


def apart(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return by how much two arrays of classes (integers) or of values differ."""
    return float((first != second).mean() if first.dtype.kind == "i" else np.abs(first - second).mean())


def _comparable(outputs: torch.Tensor, targets: torch.Tensor) -> NDArray[Any]:
    """An even sample of predictions: classes, or values over the standard deviation of their targets' column."""
    sample = outputs[:: max(1, -(-len(outputs) // ROWS))]
    if not targets.is_floating_point():
        return np.asarray(sample.argmax(-1).numpy())
    spread = targets.double().reshape(len(targets), -1).std(0, correction=0)
    values = sample.double().reshape(len(sample), -1) / torch.where(spread > 0, spread, 1)
    return np.asarray(values.numpy())


# --- the keeper ---


def trial_folder(out: Path, number: int) -> Path:
    """Return the folder of trial ``number`` in the study in ``out``: its checkpoints, predictions and logs."""
    return out / "trials" / f"{number:05d}"


@dataclass(frozen=True)
class RetentionDecision:
    """The records to write, and the folders to remove after that, so that all artifacts in the journal exist.

    Attributes:
        records: The records.
        folders: The folders.
    """

    records: tuple[ArtifactKept | ArtifactRemoved, ...]
    folders: tuple[Path, ...]


class Keeper:
    """Applies a retention rule to the folders of trials, within a limit of bytes.

    Args:
        policy: The rule.
        files: The files of runs on the cluster.
        out: The folder of the study.
        most_bytes: The most bytes of all that stays; None: no limit.
    """

    def __init__(self, policy: Retention, files: RunFiles, out: Path, most_bytes: int | None = None) -> None:
        self._policy = policy
        self._files = files
        self._out = out
        self._most_bytes = most_bytes
        self._disagreements = Disagreements(self.folder)

    def ended(self, number: int, folder: Path, table: TrialTable, standing: Standing) -> RetentionDecision:
        """Decide what stays after trial ``number`` ended in ``folder``; it may have overtaken other trials."""
        artifacts = {other: kept for other, kept in table.artifacts.items() if other != number}
        new = None if self._policy == KeepNothing() else self._artifact(table.trials[number], folder)
        candidates = artifacts if new is None else {**artifacts, number: new}

        def apart(first: int, second: int) -> float | None:
            both = first in candidates and second in candidates
            return self._disagreements.between(candidates[first], candidates[second]) if both else None

        wanted = self._policy.chosen(_ended_well(table), standing, apart)
        stays = self._that_fit(wanted, candidates)
        self._disagreements.forget({other: candidates[other] for other in stays})
        keeps = new is not None and number in stays
        dropped = [other for other in artifacts if other not in stays]
        records: list[ArtifactKept | ArtifactRemoved] = [new] if new is not None and keeps else []
        records += [ArtifactRemoved(other) for other in dropped]
        folders = [self.folder(other) for other in dropped]  # by number: the path in a journal may lead anywhere
        return RetentionDecision(tuple(records), (*([] if keeps else [folder]), *folders))

    def remove(self, folders: Iterable[Path]) -> None:
        """Remove folders that the journal no longer names."""
        for folder in folders:
            self._files.remove(folder)

    def undecided(self, table: TrialTable) -> list[int]:
        """Return the trials with a result whose controller died before it decided about their folders."""
        numbers = [number for number in _ended_well(table) if number not in table.artifacts]
        return [number for number in numbers if self.folder(number).is_dir()]

    def folder(self, number: int) -> Path:
        """Return the folder of a trial of this study."""
        return trial_folder(self._out, number)

    def _that_fit(self, wanted: list[int], artifacts: dict[int, ArtifactKept]) -> set[int]:
        """The ``wanted`` trials, the most wanted first, that fit into the limit of bytes."""
        stays, used = set(), 0
        for number in wanted:
            if number in artifacts and (self._most_bytes is None or used + artifacts[number].size <= self._most_bytes):
                stays.add(number)
                used += artifacts[number].size
        return stays

    def _artifact(self, life: TrialSummary, folder: Path) -> ArtifactKept | None:
        """The artifact of a trial; None if it has no checkpoint."""
        steps = self._files.checkpoints(folder)
        run = life.finished.run if life.finished is not None else None
        if not steps or run is None:
            return None
        path = of_step(folder / "checkpoints", steps[-1]).relative_to(self._out)
        size, predictions = self._files.size_bytes(folder), self._files.predictions(folder)
        seal = self._files.seal(folder, steps[-1])
        return ArtifactKept(life.number, steps[-1], path.as_posix(), run.sha256, size, predictions, seal=seal)


def _ended_well(table: TrialTable) -> list[int]:
    """The ended trials that have a model, the newest last; a failed trial replaces no other one."""
    ended = [table.trials[number].finished for number in table.ended]
    return [finished.trial for finished in ended if finished is not None and finished.run is not None]
