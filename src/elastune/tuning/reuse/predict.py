"""Predictions of kept trials on any data set, without training, by the program's ``build`` and ``predict``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.core.errors import Diverged, UserError
from elastune.core.journal.files import JournalWriter
from elastune.core.journal.records import PredictionsAdded
from elastune.core.run import Program
from elastune.runtime.clusters.base import LocalFiles
from elastune.runtime.job.output import JOURNAL
from elastune.train.checkpoints.out_folder import OutFolder
from elastune.train.predictions import check_name, complete_rows, file_of, keep
from elastune.train.program.errors import cause_of
from elastune.train.program.load import load_functions, process_restored
from elastune.train.program.source import program_digest
from elastune.tuning.reuse.kept_models import Candidate, Library, fill, library, weights_of
from elastune.tuning.study.results import Study

_HOOKS = {
    "build": "def build(config): return the model that train makes of these settings",
    "predict": "def predict(model, name): return outputs, targets; None for a data set it does not know",
}


@dataclass(frozen=True)
class ModelHooks:
    """The functions ``build`` and ``predict`` of the program in ``path``, which use its kept models."""

    path: Path
    build: Callable[[dict[str, Any]], nn.Module]
    predict: Callable[[nn.Module, str], Any]

    def made(self, config: dict[str, Any]) -> nn.Module:
        """Return a model with these settings. Raises ``UserError``."""
        try:
            model: object = self.build(dict(config))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's function may raise anything
            raise self._broken("build(config)", error) from None
        if not isinstance(model, nn.Module):
            raise UserError("build(config) gives a torch.nn.Module", type(model).__name__, "return the model")
        return model

    def model_of(self, candidate: Candidate) -> nn.Module:
        """Return the model of a kept trial, in evaluation mode. Raises ``UserError``."""
        model = self.made(candidate.config)
        fill(model, weights_of(candidate), f"of trial {candidate.trial}")
        return model.eval()

    def predictions(self, model: nn.Module, name: str) -> dict[str, torch.Tensor] | None:
        """Return outputs and targets on the data set ``name``, in the order of its samples.

        The result is None if the program does not know the data set.

        Raises:
            UserError: For a result that is no prediction.
            Diverged: For outputs that are not finite.
        """
        try:
            with torch.no_grad():
                result = self.predict(model, name)
        except (UserError, Diverged):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's function may raise anything
            raise self._broken(f"predict(model, {name!r})", error) from None
        if result is None:
            return None
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise UserError("predict(model, name) gives outputs and targets", type(result).__name__, "return both")
        return complete_rows(result[0], result[1])

    def known_predictions(self, model: nn.Module, name: str) -> dict[str, torch.Tensor]:
        """Return ``predictions`` on data that the program must know. Raises ``UserError`` and ``Diverged``."""
        result = self.predictions(model, name)
        if result is None:
            raise UserError("predict(model, name) knows the data set", name, "return its outputs and targets")
        return result

    def _broken(self, call: str, error: BaseException) -> UserError:
        return UserError(f"{call} of a program ends without an error", cause_of(error, str(self.path)), "mend it")


@contextmanager
def hooks_of(source: Library, program: Path | None = None) -> Iterator[ModelHooks]:
    """Yield the hooks of ``program``, or of the file that the study was begun with, if it has not changed since.

    Changes that the program makes to this process are undone at the end.

    Raises:
        UserError: If the file is missing, lacks a hook, or has changed.
    """
    path = (program or Path(source.study.program)).resolve()
    arguments = tuple(source.settings.get("arguments", ()))
    recorded_program = Program(path, source.settings.get("train", "train"), arguments=arguments)
    if program is None and path.is_file() and program_digest(recorded_program) != source.settings.get("program_digest"):
        fix = "name it if it builds the same models all the same: --program FILE"
        raise UserError("a study's program trains as it did when it began", f"{path} has changed", fix)
    with process_restored():
        if source.study.data and "ELASTUNE_DATA" not in os.environ:
            os.environ["ELASTUNE_DATA"] = source.study.data
        loaded = load_functions(recorded_program, _HOOKS, int(source.settings.get("seed", 0)))
        build, predict = loaded["build"], loaded["predict"]
        if build is None or predict is None:
            lacks = "build" if build is None else "predict"
            raise UserError(f"a program whose kept models are used has {lacks}", path, _HOOKS[lacks])
        yield ModelHooks(path, build, predict)


@dataclass(frozen=True)
class Prediction:
    """The result for one trial and one data set: ``rows`` were written, or 0 for the ``reason``."""

    trial: int
    data: str
    rows: int
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def predict(
    study: Study | str | Path,
    data: Sequence[str],
    *,
    trials: Sequence[int] | None = None,
    program: str | Path | None = None,
    again: bool = False,
) -> list[Prediction]:
    """Compute predictions of a study's kept trials on data sets, and keep them as ``session.predictions`` does.

    The program's ``build(config)`` makes the model of each trial. Its weights are loaded, and ``predict(model, name)``
    gives outputs and targets of all samples. Existing predictions stay as they are, so after an interruption simply
    call this again.

    Args:
        study: The study, or its folder; nothing else may write its journal now.
        data: Names of data sets. A name that begins with "test" is allowed: no choice rests on it.
        trials: The trials to use; None: all that were kept.
        program: The file with ``build`` and ``predict``; None: the file that the study was begun with, if it has not
            changed since.
        again: Whether to replace existing predictions.

    Returns:
        One result for each trial and data set, in the order of trials.

    Raises:
        UserError: For a program that lacks a function, knows no such data or makes another model; for predictions that
            exceed the study's ``--keep-size``; and if the study is running.

    Example:
        >>> elastune.predict("out", ["validation", "test_rotated"])
    """
    names = [data] if isinstance(data, str) else list(dict.fromkeys(data))
    if not names:
        raise UserError("a prediction is of a data set", "none", "name one, such as validation")
    for name in names:
        check_name(name)
    out = library(study).out  # refuses a folder without a study, before anything is written
    with JournalWriter(out / JOURNAL) as journal:
        source = library(out)
        selected, predictions = source.selected(trials), []
        writer = _PredictionWriter(
            journal, out, source.settings.get("keep_bytes"), {a.trial: a.size for a in source.study.kept}
        )
        with hooks_of(source, None if program is None else Path(program)) as hooks:
            for candidate in selected:
                model: nn.Module | None = None
                for name in names:
                    if name in candidate.artifact.predictions and not again:
                        predictions.append(Prediction(candidate.trial, name, 0, "is there already"))
                        continue
                    model = hooks.model_of(candidate) if model is None else model.eval()
                    predictions.append(_predicted(candidate, name, model, hooks, writer))
    return predictions


def _predicted(
    candidate: Candidate, name: str, model: nn.Module, hooks: ModelHooks, writer: _PredictionWriter
) -> Prediction:
    try:
        whole = hooks.known_predictions(model, name)
    except Diverged as error:
        return Prediction(candidate.trial, name, 0, str(error))
    writer.put(candidate, name, whole)
    return Prediction(candidate.trial, name, len(whole["targets"]))


@dataclass
class _PredictionWriter:
    """Writes predictions into the trials' folders and records them. ``sizes``: kept bytes of each trial."""

    journal: JournalWriter
    out: Path
    most_bytes: int | None
    sizes: dict[int, int]

    def put(self, candidate: Candidate, name: str, whole: dict[str, torch.Tensor]) -> None:
        new, old = sum(tensor.nbytes for tensor in whole.values()), file_of(candidate.folder, name)
        kept_bytes = sum(self.sizes.values()) - (
            old.stat().st_size if old.is_file() else 0
        )  # which the new file replaces
        if self.most_bytes is not None and kept_bytes + new > self.most_bytes:
            rule = f"all that a study keeps has at most the {self.most_bytes:,} bytes of its --keep-size"
            raise UserError(
                rule, f"{kept_bytes + new:,} with {name} of trial {candidate.trial}", "ask fewer trials, or other data"
            )
        kept = keep(candidate.folder, OutFolder.at(candidate.folder), name, whole, candidate.artifact.step)
        self.sizes[candidate.trial] = size = LocalFiles().size_bytes(candidate.folder)
        self.journal.write(PredictionsAdded(candidate.trial, name, kept.samples, size, kept.sha256), durable=True)
