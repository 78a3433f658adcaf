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
from elastune.core.journal.records import ArtifactKept, ArtifactRemoved
from elastune.core.journal.trials import TrialSummary, TrialTable
from elastune.runtime.clusters.base import RunFiles
from elastune.train.checkpoints.checkpoint import of_step
from elastune.train.predictions import HELD_OUT, file_of, read_predictions
from elastune.tune.search.front import nondominated

# [retention] Which trials' weights and predictions stay when the trials are over: a rule names them, the most wanted first.

Standing = Mapping[int, tuple[float, ...]]
"""The values of the complete trials so far, by number; smaller is better."""
PairDistance = Callable[[int, int], float | None]
"""By how much the predictions of two trials differ; None: nobody knows."""
KEEP_NOTHING = "none"
_RULE = "what is kept is none, all, front, best, best:K, diverse, diverse:K or last:K, joined by +"
DIVERSE = 8
_FIX = 'such as --keep "front+last:3"'


class Retention(Protocol):
    """A rule. It is asked whenever a trial has ended well, because that trial may have overtaken others."""

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        """Return the trials of ``ended`` (the newest last) whose folders stay; where not all fit, the first ones do."""
        ...


@dataclass(frozen=True)
class KeepNothing:
    """``none``: nothing stays but the results in the journal."""

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        return []


@dataclass(frozen=True)
class KeepAll:
    """``all``: everything stays, the best first.

    It is for studies whose later trials begin with earlier ones, or where nobody knows yet what will be wanted.
    """

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        return list(dict.fromkeys([*by_rank(standing), *reversed(ended)]))


@dataclass(frozen=True)
class KeepFront:
    """``front``: the trials that no other dominates stay."""

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        return by_rank(standing, layers=1)


@dataclass(frozen=True)
class KeepBest:
    """``best:K``: the best ``count`` trials by each objective stay."""

    count: int = 1

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        found: dict[int, None] = {}

        def by(axis: int) -> list[int]:
            return sorted(standing, key=lambda number: standing[number][axis])

        ranked = [by(axis) for axis in range(len(next(iter(standing.values()), ())))]
        for place in range(self.count):
            found |= dict.fromkeys(order[place] for order in ranked if place < len(order))
        return list(found)


@dataclass(frozen=True)
class KeepLast:
    """``last:K``: the ``count`` trials that ended last stay, whatever they reached."""

    count: int = 1

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        return list(reversed(ended))[: self.count]


@dataclass(frozen=True)
class KeepDiverse:
    """``diverse:K``: the best trial stays, and others that differ most in what they predict, ``count`` together.

    They are for members of an ensemble. They are chosen one after another: each is the trial that is furthest from the
    nearest of those before. Only the better half of the trials counts, or the best ``count`` where those are more,
    because a trial that has learnt nothing differs most.
    """

    count: int = DIVERSE

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        ranked = by_rank(standing)
        rest = ranked[: max(self.count, len(ranked) // 2)]
        found, rest = rest[:1], rest[1:]
        while len(found) < self.count:
            far = {number: _nearest([apart(number, other) for other in found]) for number in rest}
            best = max(rest, key=lambda number: far[number], default=None)
            if best is None or far[best] < 0:
                break
            found.append(best)
            rest.remove(best)
        return found


@dataclass(frozen=True)
class KeepAny:
    """``A+B``: whatever one of ``rules`` keeps stays; the trials of the first rule come first."""

    rules: tuple[Retention, ...]

    def chosen(self, ended: Sequence[int], standing: Standing, apart: PairDistance) -> list[int]:
        return list(dict.fromkeys(number for rule in self.rules for number in rule.chosen(ended, standing, apart)))


def parse_retention(text: str) -> Retention:
    """Return the rule that ``text`` names, as for ``--keep``. Raises ``UserError``."""
    parts = [part.strip() for part in text.split("+")]
    if parts == [KEEP_NOTHING]:
        return KeepNothing()
    rules = tuple(_one(part, text) for part in parts)
    return rules[0] if len(rules) == 1 else KeepAny(rules)


def retention_of(keep: str, most_bytes: int | None, *, population: bool) -> Retention:
    """Return the rule ``keep``, within ``most_bytes`` of the disk.

    Raises:
        UserError: For a text that is no rule, and for a rule without what a ``population`` needs: its members begin
            with one another's checkpoints.
    """
    asked = parse_retention(keep)
    if most_bytes is not None and (asked == KeepNothing() or most_bytes < 1):
        fix = "leave it out, or say what to keep, such as --keep best:8 --keep-size 2GB"
        raise UserError("a bound is for what --keep keeps, and above 0", most_bytes, fix)
    if not population:
        return asked
    if asked not in (KeepNothing(), KeepAll()) or most_bytes is not None:
        rule = "members of a population begin with one another's checkpoints, so all stay"
        raise UserError(rule, f"--keep {keep}", "use --keep all, without --keep-size")
    return KeepAll()


def _one(part: str, text: str) -> Retention:
    name, colon, told = part.partition(":")
    if name in ("all", "front") and not colon:
        return KeepAll() if name == "all" else KeepFront()
    count = int(told) if told.isascii() and told.isdecimal() and len(told) < 7 else 0
    if name == "best" and (count or not colon):
        return KeepBest(count or 1)
    if name == "diverse" and (count > 1 or not colon):
        return KeepDiverse(count or DIVERSE)
    if name == "last" and count:
        return KeepLast(count)
    raise UserError(_RULE, repr(text)[:80], _FIX)


def _nearest(distances: Sequence[float | None]) -> float:
    """The smallest; -1 where one is not known."""
    return min(-1.0 if found is None else found for found in distances)


def by_rank(standing: Standing, layers: int | None = None) -> list[int]:
    """Return the trials front by front: those that no other dominates, then the front of the rest, and so on.

    Within one front, the better by the first objective comes first.

    Args:
        standing: The trials and their values.
        layers: The number of fronts; None: all.
    """
    rest, found = dict(standing), []
    while rest and layers != 0:
        best = nondominated(np.array(list(rest.values()), dtype=float))
        front = [number for number, on_front in zip(rest, best, strict=True) if on_front]
        if not front:  # such as values that are not numbers
            break
        found += sorted(front, key=lambda number: standing[number])
        rest = {number: values for number, values in rest.items() if number not in set(front)}
        layers = None if layers is None else layers - 1
    return found


# [disagreement] By how much two kept trials' predictions differ: what ensembles live on, and a retention rule can go by.

ROWS = 10_000  # of one data set that are compared: an even sample of more


class Disagreements:
    """Of trials whose predictions lie in the ``folder`` of each, as their artifacts tell. A file is read once.

    Test data are left out: what stays is a choice, too.
    """

    def __init__(self, folder: Callable[[int], Path]) -> None:
        self._folder = folder
        self._read: dict[tuple[int, str], NDArray[Any] | None] = {}

    def between(self, one: ArtifactKept, other: ArtifactKept) -> float | None:
        """The share of samples of which they name other classes, or the mean distance of values in standard
        deviations of what is right; None where they have no predictions of the same data."""
        for name in sorted(set(one.predictions) & set(other.predictions)):
            parts = [self._said(kept, name) for kept in (one, other)]
            if parts[0] is not None and parts[1] is not None and parts[0].shape == parts[1].shape:
                return apart(parts[0], parts[1])
        return None

    def forget(self, there: Mapping[int, ArtifactKept]) -> None:
        """All but what is ``there``: memory is for what is kept."""
        known = {(kept.trial, digest) for kept in there.values() for digest in kept.predictions.values()}
        self._read = {key: said for key, said in self._read.items() if key in known}

    def _said(self, kept: ArtifactKept, name: str) -> NDArray[Any] | None:
        if name.startswith(HELD_OUT):
            return None
        key = kept.trial, kept.predictions[name]
        if key not in self._read:
            try:
                found = read_predictions(file_of(self._folder(kept.trial), name), key[1])
            except UserError:  # damaged since: it is told where they are used, and no reason to end a study
                self._read[key] = None
            else:
                self._read[key] = _comparable(found["outputs"], found["targets"])
        return self._read[key]


def apart(one: NDArray[Any], other: NDArray[Any]) -> float:
    """How much two differ: classes, integers, or values."""
    return float((one != other).mean() if one.dtype.kind == "i" else np.abs(one - other).mean())


def _comparable(outputs: torch.Tensor, targets: torch.Tensor) -> NDArray[Any]:
    """An even sample: classes, or values over the standard deviation of what is right in their column."""
    few = outputs[:: max(1, -(-len(outputs) // ROWS))]
    if not targets.is_floating_point():
        return np.asarray(few.argmax(-1).numpy())
    spread = targets.double().reshape(len(targets), -1).std(0, correction=0)
    values = few.double().reshape(len(few), -1) / torch.where(spread > 0, spread, 1)
    return np.asarray(values.numpy())


# [keeper] Does with trials' folders what a retention rule decides, within a bound of bytes; the journal tells what is there.


def trial_folder(out: Path, number: int) -> Path:
    """Where the trial ``number`` of the study in ``out`` has its checkpoints, predictions and logs."""
    return out / "trials" / f"{number:05d}"


@dataclass(frozen=True)
class RetentionDecision:
    """What is to be recorded, and the folders that are to go then: what the journal tells of is there."""

    told: tuple[ArtifactKept | ArtifactRemoved, ...]
    gone: tuple[Path, ...]


class Keeper:
    """``policy`` decides about the trials' folders in ``out``. ``most_bytes``: of all that stays; None: no bound."""

    def __init__(self, policy: Retention, files: RunFiles, out: Path, most_bytes: int | None = None) -> None:
        self._policy = policy
        self._files = files
        self._out = out
        self._most_bytes = most_bytes
        self._disagreements = Disagreements(self.folder)

    def ended(self, number: int, folder: Path, table: TrialTable, standing: Standing) -> RetentionDecision:
        """Trial ``number``, which ran in ``folder``, ended well: what stays now, and what others it has overtaken."""
        there = {other: kept for other, kept in table.artifacts.items() if other != number}
        new = None if self._policy == KeepNothing() else self._artifact(table.trials[number], folder)
        known = there if new is None else {**there, number: new}

        def apart(one: int, other: int) -> float | None:
            both = one in known and other in known
            return self._disagreements.between(known[one], known[other]) if both else None

        wanted = self._policy.chosen(_ended_well(table), standing, apart)
        stays = self._that_fit(wanted, known)
        self._disagreements.forget({other: known[other] for other in stays})
        keeps = new is not None and number in stays
        lost = [other for other in there if other not in stays]
        told: list[ArtifactKept | ArtifactRemoved] = [new] if new is not None and keeps else []
        told += [ArtifactRemoved(other) for other in lost]
        folders = [self.folder(other) for other in lost]  # by number: the path in a journal may lead anywhere
        return RetentionDecision(tuple(told), (*([] if keeps else [folder]), *folders))

    def remove(self, folders: Iterable[Path]) -> None:
        """Once the journal no longer tells of them."""
        for folder in folders:
            self._files.remove(folder)

    def undecided(self, table: TrialTable) -> list[int]:
        """The trials that ended well, and whose controller died before it had decided about their folders."""
        left = [number for number in _ended_well(table) if number not in table.artifacts]
        return [number for number in left if self.folder(number).is_dir()]

    def folder(self, number: int) -> Path:
        """Of a trial of this study."""
        return trial_folder(self._out, number)

    def _that_fit(self, wanted: list[int], there: dict[int, ArtifactKept]) -> set[int]:
        """Of what is ``there``, all that is ``wanted`` and has room beside what is wanted more."""
        stays, used = set(), 0
        for number in wanted:
            if number in there and (self._most_bytes is None or used + there[number].size <= self._most_bytes):
                stays.add(number)
                used += there[number].size
        return stays

    def _artifact(self, life: TrialSummary, folder: Path) -> ArtifactKept | None:
        """What a trial has left; None where it has no checkpoint."""
        found = self._files.checkpoints(folder)
        run = life.finished.run if life.finished is not None else None
        if not found or run is None:
            return None
        path = of_step(folder / "checkpoints", found[-1]).relative_to(self._out)
        size, predictions = self._files.size_bytes(folder), self._files.predictions(folder)
        seal = self._files.seal(folder, found[-1])
        return ArtifactKept(life.number, found[-1], path.as_posix(), run.sha256, size, predictions, seal=seal)


def _ended_well(table: TrialTable) -> list[int]:
    """The trials that are over and have left a model, the newest last: one that failed takes nobody's place."""
    ended = [table.trials[number].finished for number in table.ended]
    return [finished.trial for finished in ended if finished is not None and finished.run is not None]
