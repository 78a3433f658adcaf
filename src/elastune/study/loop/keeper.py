"""Does with trials' folders what a retention rule decides, within a bound of bytes; the journal tells what is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from elastune.cluster.run_files import RunFiles
from elastune.journal.records import ArtifactKept, ArtifactRemoved
from elastune.journal.trials import TrialLife, TrialTable
from elastune.study.loop.disagreement import Disagreements
from elastune.study.loop.retention import KeepNothing, Retention, Standing
from elastune.train.checkpoints.checkpoint import of_step


def trial_folder(out: Path, number: int) -> Path:
    """Where the trial ``number`` of the study in ``out`` has its checkpoints, predictions and logs."""
    return out / "trials" / f"{number:05d}"


@dataclass(frozen=True)
class KeepVerdict:
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

    def ended(self, number: int, folder: Path, table: TrialTable, standing: Standing) -> KeepVerdict:
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
        return KeepVerdict(tuple(told), (*([] if keeps else [folder]), *folders))

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

    def _artifact(self, life: TrialLife, folder: Path) -> ArtifactKept | None:
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
