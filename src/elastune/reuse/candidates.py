"""The trials of a study that can become members: those that have left predictions and weights, as its journal tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from elastune.core.errors import UserError
from elastune.job.output_dir import JOURNAL
from elastune.journal.reader import read
from elastune.journal.records import ArtifactKept, StudyStarted
from elastune.journal.trials import TrialTable, fold
from elastune.study.results.study import Study
from elastune.train.checkpoints.checkpoint import load, seal_of
from elastune.train.predictions import HELD_OUT, check_name, file_of, read_predictions

KEEP = "tune with --keep all (or front, best:8, ...), and let the program call session.predictions"
ASK = "elastune predict asks kept trials about other data"


class ReadTooSoon(RuntimeError):
    """Something has asked for test data before everything was chosen: a mistake of the program, never of its user."""


@dataclass(frozen=True)
class Candidate:
    """A trial whose weights are at ``checkpoint`` and whose predictions are in ``folder``, as ``artifact`` records."""

    trial: int
    config: dict[str, Any]
    folder: Path
    checkpoint: Path
    artifact: ArtifactKept
    worker_seconds: float

    def predictions(self, name: str) -> dict[str, torch.Tensor]:
        """Return the predictions on the data set ``name``.

        Raises:
            ReadTooSoon: For data that no choice may rest on: see ``SealedTest``.
            UserError: Where they are not what the journal says.
        """
        if name.startswith(HELD_OUT):
            raise ReadTooSoon(f"{name} of trial {self.trial} was asked for where something is chosen")
        return self.read(name)

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Return the predictions on any data set, for use after the choice."""
        check_name(name)  # a journal may come from elsewhere, and it becomes the name of a file
        return read_predictions(file_of(self.folder, name), self.artifact.predictions[name])

    def weights(self) -> Mapping[str, Any]:
        """Return the model's state by name: tensors that are read on demand (``scattered.Stored``).

        Raises:
            UserError: Where they are damaged, or are not those that the journal records.
        """
        wanted = self.artifact.seal
        if wanted and seal_of(self.checkpoint) not in ("", wanted):  # "": gone, which loading tells
            rule = f"the weights of trial {self.trial} are those that the study has kept"
            raise UserError(rule, f"others in {self.checkpoint}", "restore them, or leave the trial out")
        found: Mapping[str, Any] = load(self.checkpoint, "train the trial again", whole_parts=False).states["model"]
        return found


@dataclass(frozen=True)
class Library:
    """The ``candidates`` of the study in ``out``, and its trial table.

    Attributes:
        settings: The settings that the study was begun with.
    """

    out: Path
    study: Study
    table: TrialTable
    candidates: tuple[Candidate, ...]
    settings: dict[str, Any]

    def asked(self, trials: Sequence[int] | None) -> list[Candidate]:
        """Return the candidates of these ``trials``, or all.

        Raises:
            UserError: For a trial that was not kept, and where none was.
        """
        known = {one.trial: one for one in self.candidates}
        if not known:
            raise UserError("kept trials are used", f"none in {self.out}", KEEP)
        if trials is None:
            return list(self.candidates)
        if missing := [trial for trial in trials if trial not in known]:
            kept = ", ".join(map(str, known))
            raise UserError("trials that are used were kept", f"trial {missing[0]}", f"choose among {kept}")
        if not trials:
            raise UserError("at least one trial is used", "none", "name some, or leave trials out")
        return [known[trial] for trial in dict.fromkeys(trials)]

    def having(self, data: str) -> list[Candidate]:
        """Return the candidates with predictions on ``data``, which a choice may rest on.

        Raises:
            UserError: Where there are none.
        """
        check_chosen_by(data)
        found = [one for one in self.candidates if data in one.artifact.predictions]
        if not found:
            known = sorted({name for one in self.candidates for name in one.artifact.predictions})
            there = ", ".join(name for name in known if not name.startswith(HELD_OUT))
            fix = f"use --data with {there}" if there else ASK if self.candidates else KEEP
            raise UserError(f"an ensemble needs trials with predictions on {data}", f"none in {self.out}", fix)
        return found


def check_chosen_by(data: str) -> None:
    """Raise ``UserError`` for data that nothing may be chosen by."""
    if data.startswith(HELD_OUT):
        rule = f"nothing is chosen by data whose name begins with {HELD_OUT!r}"
        raise UserError(rule, data, "name the predictions on a validation set, such as --data validation")


def library(study: Study | str | Path) -> Library:
    """Return what the study, or the study in that folder, has left. Raises ``UserError`` where there is no study."""
    out = study.out if isinstance(study, Study) else Path(study)
    entries = read(out / JOURNAL)
    table = fold(entries)
    found = []
    for number, artifact in sorted(table.artifacts.items()):
        life = table.trials.get(number)
        if life is None or life.finished is None or life.finished.state != "complete":
            continue
        checkpoint = _inside(out, artifact.path)
        folder = checkpoint.parents[1]
        found.append(Candidate(number, life.started.config, folder, checkpoint, artifact, life.worker_seconds))
    study = Study.of(out, entries)
    settings = next(entry.record.settings for entry in entries if isinstance(entry.record, StudyStarted))
    return Library(out, study, table, tuple(found), settings)


def _inside(out: Path, path: str) -> Path:
    """A journal may come from elsewhere: it names nothing outside its own folder."""
    parts = Path(path).parts
    if len(parts) != 4 or ".." in parts or Path(path).is_absolute():
        fix = "restore the journal"
        raise UserError("what a study has kept lies in its folder, as trials/N/checkpoints/step-N", path[:100], fix)
    return out / path


@dataclass(frozen=True)
class ReadOnDemand(Mapping[int, dict[str, torch.Tensor]]):
    """The candidates' predictions, by trial.

    Each is ``read`` when it is asked for: all at once may not fit in memory.
    """

    candidates: Sequence[Candidate]
    read: Callable[[Candidate], dict[str, torch.Tensor]]

    def __getitem__(self, trial: int) -> dict[str, torch.Tensor]:
        return self.read(next(one for one in self.candidates if one.trial == trial))

    def __iter__(self) -> Iterator[int]:
        return iter(one.trial for one in self.candidates)

    def __len__(self) -> int:
        return len(self.candidates)


@dataclass
class SealedTest:
    """The candidates' predictions on data for judging a choice, never for making it. They are closed until then."""

    name: str
    _open_for: tuple[int, ...] = field(default=())

    def unseal(self, chosen: Sequence[Candidate]) -> None:
        """Open the predictions for ``chosen``: the choice is made."""
        self._open_for = tuple(one.trial for one in chosen)

    def of(self, candidate: Candidate) -> dict[str, torch.Tensor]:
        """Return a candidate's predictions.

        Raises:
            ReadTooSoon: Before it was chosen.
            UserError: For a bad file.
        """
        if candidate.trial not in self._open_for:
            raise ReadTooSoon(f"{self.name} of trial {candidate.trial} was asked for before the choice was made")
        return candidate.read(self.name)
