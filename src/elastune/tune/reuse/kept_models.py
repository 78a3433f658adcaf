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
from elastune.core.journal.records import ArtifactKept, StudyStarted
from elastune.core.journal.trials import TrialTable, fold
from elastune.parallel.mechanisms.tensor_storage import whole
from elastune.runtime.job.output import JOURNAL
from elastune.train.checkpoints.checkpoint import load, seal_of
from elastune.train.predictions import HELD_OUT, check_name, file_of, read_predictions
from elastune.train.program.errors import cause_of
from elastune.tune.study.results import Study

# [candidates] The trials of a study that can become members: those that have left predictions and weights, as its journal tells.

KEEP = "tune with --keep all (or front, best:8, ...), and let the program call session.predictions"
ASK = "elastune predict asks kept trials about other data"


class TestDataAccessError(RuntimeError):
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
            TestDataAccessError: For data that no choice may rest on: see ``SealedTest``.
            UserError: Where they are not what the journal says.
        """
        if name.startswith(HELD_OUT):
            raise TestDataAccessError(f"{name} of trial {self.trial} was asked for where something is chosen")
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

    def with_predictions(self, data: str) -> list[Candidate]:
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
class LazyPredictions(Mapping[int, dict[str, torch.Tensor]]):
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
            TestDataAccessError: Before it was chosen.
            UserError: For a bad file.
        """
        if candidate.trial not in self._open_for:
            raise TestDataAccessError(
                f"{self.name} of trial {candidate.trial} was asked for before the choice was made"
            )
        return candidate.read(self.name)


# [weights] The weights that trials have left, as tensors, and models that are filled with them.

Build = Callable[[dict[str, Any]], nn.Module]
"""Makes a program's model from the settings of a trial."""


def weights_of(candidate: Candidate) -> dict[str, torch.Tensor]:
    """Return all tensors of the state of a candidate's model, without what is no tensor (a module's extra state)."""
    return {name: whole(stored) for name, stored in candidate.weights().items() if hasattr(stored, "shape")}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors of the state of ``model``."""
    return {name: tensor for name, tensor in model.state_dict().items() if hasattr(tensor, "shape")}


def numbers_in(tensors: Mapping[str, Any]) -> int:
    """Return how many numbers a state has, at least 1: what one inference uses, if each is used once."""
    return max(1, sum(prod(map(int, one.shape)) for one in tensors.values() if hasattr(one, "shape")))


def built(build: Build, config: Mapping[str, Any], whose: str) -> nn.Module:
    """Return the model that ``build`` makes of the settings ``whose``. Raises ``UserError`` where it makes none."""
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


def check_alike(own: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], whose: str) -> None:
    """Raise ``UserError`` where built tensors and those of ``whose`` differ in names, shapes or kinds of numbers.

    Precision may differ: a model that was trained in bfloat16 may be built in float32.
    """
    for name in {**own, **found}:
        shapes = [tuple(of[name].shape) if name in of else None for of in (own, found)]
        if shapes[0] != shapes[1]:
            rule = "build(config) makes the model that the weights are of, tensor for tensor"
            raise UserError(rule, f"{name}: {shapes[0]} built, {shapes[1]} {whose}", "build it as the program did")
        here, there = own[name].dtype, found[name].dtype
        if here != there and not (here.is_floating_point and there.is_floating_point):
            rule = "build(config) makes the model that the weights are of, with the same kinds of numbers"
            raise UserError(rule, f"{name}: {here} built, {there} {whose}", "build it as the program did")


def fill(model: nn.Module, found: dict[str, torch.Tensor], whose: str) -> None:
    """Load ``found`` into ``model``. Raises ``UserError`` as ``check_alike``."""
    check_alike(tensors_of(model), found, whose)
    model.load_state_dict(found, strict=False)  # names were compared; a module's extra state is build's


def check_file(path: Path) -> None:
    """Raise ``UserError`` where no model could be written to ``path``; for use before a model is chosen."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError("a model is written to a file in a folder that is there", path, "name another one")
