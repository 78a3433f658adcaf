"""The trials of a study that kept predictions and weights, and models filled with these weights.

Test data stay sealed until everything is chosen: ``Candidate.predictions`` refuses them, ``SealedTest`` opens them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.folds import TrialTable, fold
from elastune.core.journal.records import ArtifactKept, StudyStarted
from elastune.parallel.mechanisms.tensor_storage import whole
from elastune.runtime.job.output import JOURNAL
from elastune.train.checkpoints.checkpoint import load, seal_of
from elastune.train.predictions import HELD_OUT, check_name, file_of, read_predictions
from elastune.train.program.errors import cause_of
from elastune.tuning.study.results import Study

KEEP = "tune with --keep all (or front, best:8, ...), and let the program call session.predictions"
ASK = "elastune predict asks kept trials about other data"


class SealedTestError(RuntimeError):
    """Test data were requested before the choice was complete. This is an error of elastune, never of its user."""


@dataclass(frozen=True)
class Candidate:
    """A trial that kept its weights (at ``checkpoint``) and predictions (in ``folder``), as ``artifact`` records.

    Candidates can become members of ensembles and soups, and parts of composed models.
    """

    trial: int
    config: dict[str, Any]
    folder: Path
    checkpoint: Path
    artifact: ArtifactKept
    worker_seconds: float

    def predictions(self, name: str) -> dict[str, torch.Tensor]:
        """Return the predictions on the data set ``name``.

        Raises:
            SealedTestError: For data that no choice may rest on: see ``SealedTest``.
            UserError: If they differ from the journal's record.
        """
        if name.startswith(HELD_OUT):
            raise SealedTestError(f"{name} of trial {self.trial} was asked for where something is chosen")
        return self.read(name)

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Return the predictions on any data set, for use after the choice."""
        check_name(name)  # the name may come from a foreign journal, and it becomes a file name
        return read_predictions(file_of(self.folder, name), self.artifact.predictions[name])

    def weights(self) -> Mapping[str, Any]:
        """Return the model's state by name: tensors that are read on demand.

        Raises:
            UserError: If they are damaged, or differ from the journal's record.
        """
        wanted = self.artifact.seal
        if wanted and seal_of(self.checkpoint) not in ("", wanted):  # "": no file, which loading reports
            rule = f"the weights of trial {self.trial} are those that the study has kept"
            raise UserError(rule, f"others in {self.checkpoint}", "restore them, or leave the trial out")
        state: Mapping[str, Any] = load(self.checkpoint, "train the trial again", whole_parts=False).states["model"]
        return state


@dataclass(frozen=True)
class Library:
    """All kept trials of the study in ``out`` (``candidates``), with its trial table.

    Attributes:
        settings: The settings that the study was begun with.
    """

    out: Path
    study: Study
    table: TrialTable
    candidates: tuple[Candidate, ...]
    settings: dict[str, Any]

    def selected(self, trials: Sequence[int] | None) -> list[Candidate]:
        """Return the candidates of these ``trials``, or all.

        Raises:
            UserError: If one of ``trials`` was not kept, or no trial was.
        """
        by_trial = {candidate.trial: candidate for candidate in self.candidates}
        if not by_trial:
            raise UserError("kept trials are used", f"none in {self.out}", KEEP)
        if trials is None:
            return list(self.candidates)
        if missing := [trial for trial in trials if trial not in by_trial]:
            kept = ", ".join(map(str, by_trial))
            raise UserError("trials that are used were kept", f"trial {missing[0]}", f"choose among {kept}")
        if not trials:
            raise UserError("at least one trial is used", "none", "name some, or leave trials out")
        return [by_trial[trial] for trial in dict.fromkeys(trials)]

    def with_predictions(self, data: str) -> list[Candidate]:
        """Return the candidates with predictions on ``data``, which a choice may rest on.

        Raises:
            UserError: If there are none.
        """
        check_chosen_by(data)
        fitting = [candidate for candidate in self.candidates if data in candidate.artifact.predictions]
        if not fitting:
            names = sorted({name for candidate in self.candidates for name in candidate.artifact.predictions})
            named = ", ".join(name for name in names if not name.startswith(HELD_OUT))
            fix = f"use --data with {named}" if named else ASK if self.candidates else KEEP
            raise UserError(f"an ensemble needs trials with predictions on {data}", f"none in {self.out}", fix)
        return fitting


def check_chosen_by(data: str) -> None:
    """Raise ``UserError`` for data on which no choice may rest."""
    if data.startswith(HELD_OUT):
        rule = f"nothing is chosen by data whose name begins with {HELD_OUT!r}"
        raise UserError(rule, data, "name the predictions on a validation set, such as --data validation")


def library(study: Study | str | Path) -> Library:
    """Return the kept trials of a study, or of the study in that folder. Raises ``UserError`` if there is no study."""
    out = study.out if isinstance(study, Study) else Path(study)
    entries = read(out / JOURNAL)
    table = fold(entries)
    candidates = []
    for number, artifact in sorted(table.artifacts.items()):
        life = table.trials.get(number)
        if life is None or life.finished is None or life.finished.state != "complete":
            continue
        checkpoint = _inside(out, artifact.path)
        folder = checkpoint.parents[1]
        candidates.append(Candidate(number, life.started.config, folder, checkpoint, artifact, life.worker_seconds))
    study = Study.of(out, entries)
    settings = next(entry.record.settings for entry in entries if isinstance(entry.record, StudyStarted))
    return Library(out, study, table, tuple(candidates), settings)


def _inside(out: Path, path: str) -> Path:
    """The path of a kept checkpoint. A foreign journal must not name a path outside its own folder."""
    parts = Path(path).parts
    if len(parts) != 4 or ".." in parts or Path(path).is_absolute():
        fix = "restore the journal"
        raise UserError("what a study has kept lies in its folder, as trials/N/checkpoints/step-N", path[:100], fix)
    return out / path


@dataclass(frozen=True)
class LazyPredictions(Mapping[int, dict[str, torch.Tensor]]):
    """The candidates' predictions, by trial.

    Each is ``read`` when it is asked for: all at once may not fit in memory.
    """

    candidates: Sequence[Candidate]
    read: Callable[[Candidate], dict[str, torch.Tensor]]

    def __getitem__(self, trial: int) -> dict[str, torch.Tensor]:
        return self.read(next(candidate for candidate in self.candidates if candidate.trial == trial))

    def __iter__(self) -> Iterator[int]:
        return iter(candidate.trial for candidate in self.candidates)

    def __len__(self) -> int:
        return len(self.candidates)


@dataclass
class SealedTest:
    """The candidates' predictions on test data, which are closed until the choice is made."""

    name: str
    _open_for: tuple[int, ...] = field(default=())

    def unseal(self, chosen: Sequence[Candidate]) -> None:
        """Open the predictions of ``chosen``, after the choice is made."""
        self._open_for = tuple(candidate.trial for candidate in chosen)

    def of(self, candidate: Candidate) -> dict[str, torch.Tensor]:
        """Return a candidate's predictions.

        Raises:
            SealedTestError: If the predictions were not opened for this candidate.
            UserError: If the file is damaged.
        """
        if candidate.trial not in self._open_for:
            raise SealedTestError(f"{self.name} of trial {candidate.trial} was asked for before the choice was made")
        return candidate.read(self.name)


# --- weights, and models filled with them ---

Build = Callable[[dict[str, Any]], nn.Module]
"""Makes a program's model from the settings of a trial."""


def weights_of(candidate: Candidate) -> dict[str, torch.Tensor]:
    """Return all tensors of a candidate's model, without extra state of modules that is no tensor."""
    return {name: whole(stored) for name, stored in candidate.weights().items() if hasattr(stored, "shape")}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors of the state of ``model``."""
    return {name: tensor for name, tensor in model.state_dict().items() if hasattr(tensor, "shape")}


def numbers_in(tensors: Mapping[str, Any]) -> int:
    """Return the number of numbers in a state, at least 1. One inference uses as many, if it uses each once."""
    return max(1, sum(prod(map(int, tensor.shape)) for tensor in tensors.values() if hasattr(tensor, "shape")))


def built(build: Build, config: Mapping[str, Any], whose: str) -> nn.Module:
    """Return the model that ``build`` makes from ``config``. Raises ``UserError`` if it makes none.

    ``whose``: the owner of the settings, for messages.
    """
    try:
        model: object = build(dict(config))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        rule, settings = "build(config) takes the settings of a trial", f"{dict(config)}"[:200]
        fix = "give the build of the program that was trained"
        raise UserError(rule, f"{cause_of(error)} for {settings}, {whose}", fix) from error
    if not isinstance(model, nn.Module):
        raise UserError("build(config) gives a torch.nn.Module", type(model).__name__, "return the model")
    return model


def check_alike(expected: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], whose: str) -> None:
    """Raise ``UserError`` if built and stored tensors differ in names, shapes or kinds of numbers.

    Precision may differ: a model that was trained in bfloat16 may be built in float32.
    """
    for name in {**expected, **stored}:
        shapes = [tuple(of[name].shape) if name in of else None for of in (expected, stored)]
        if shapes[0] != shapes[1]:
            rule = "build(config) makes the model that the weights are of, tensor for tensor"
            raise UserError(rule, f"{name}: {shapes[0]} built, {shapes[1]} {whose}", "build it as the program did")
        expected_dtype, stored_dtype = expected[name].dtype, stored[name].dtype
        if expected_dtype != stored_dtype and not (expected_dtype.is_floating_point and stored_dtype.is_floating_point):
            rule = "build(config) makes the model that the weights are of, with the same kinds of numbers"
            raise UserError(
                rule, f"{name}: {expected_dtype} built, {stored_dtype} {whose}", "build it as the program did"
            )


def fill(model: nn.Module, tensors: dict[str, torch.Tensor], whose: str) -> None:
    """Load ``tensors`` into ``model``. Raises ``UserError`` as ``check_alike``."""
    check_alike(tensors_of(model), tensors, whose)
    model.load_state_dict(tensors, strict=False)  # names are equal; build sets the extra state of modules


def check_file(path: Path) -> None:
    """Raise ``UserError`` if no model could be written to ``path``. Call it before a model is chosen."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError("a model is written to a file in a folder that is there", path, "name another one")
