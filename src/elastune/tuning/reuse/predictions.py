"""Predictions of kept trials on any data set, the kind of problem they belong to, and the scores that judge them.

The kind (classification or regression) is found from shapes and types of outputs and targets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
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
from elastune.tuning.search.objective import Direction
from elastune.tuning.study.results import Study

# Predictions of trials as arrays, the kind of problem they belong to, and the scores that judge them.

Array = NDArray[np.float64]
Kind = Literal["classification", "regression"]
OutputKind = Literal["logits", "probabilities", "values"]
IGNORED = -100
"""The integer target of rows that do not count, such as padding; torch's ``cross_entropy`` has the same value."""
LARGEST_BYTES = 8 << 30
"""The most bytes that all members' predictions may take in memory."""
_SUM_ERROR = 1e-3
_REGRESSION = "targets and outputs of a regression have the same shape"
_CLASSES = "outputs of a classification have one number a class more than its targets: (samples, ..., classes)"


@dataclass(frozen=True)
class Task:
    """The kind of problem that predictions belong to.

    Attributes:
        kind: "classification" or "regression".
        output_kind: The kind of outputs: logits, probabilities or values.
        width: The number of classes or of values.
    """

    kind: Kind
    output_kind: OutputKind
    width: int


@dataclass(frozen=True)
class Judged:
    """The predictions of several members for the same samples, with the right answers.

    Attributes:
        task: The kind of problem.
        outputs: Probabilities or values, of shape (members, rows, width); a row is a sample, or a token of one.
        right: The class of each row, or its values of shape (rows, width).
    """

    task: Task
    outputs: Array
    right: NDArray[np.int64] | Array

    @property
    def members(self) -> int:
        """The number of members."""
        return len(self.outputs)


def task_of(outputs: torch.Tensor, targets: torch.Tensor) -> Task:
    """Return the task of these outputs and targets. Raises ``UserError`` if they fit none."""
    if targets.is_floating_point():
        if outputs.shape != targets.shape and outputs.shape != (*targets.shape, 1):
            raise UserError(_REGRESSION, f"{tuple(outputs.shape)} and {tuple(targets.shape)}", "reshape one of them")
        return Task("regression", "values", int(np.prod(targets.shape[1:], dtype=int)))
    if outputs.ndim != targets.ndim + 1 or outputs.shape[:-1] != targets.shape or outputs.shape[-1] < 2:
        shapes = f"{tuple(outputs.shape)} and {tuple(targets.shape)}"
        raise UserError(_CLASSES, shapes, "for two classes give both their logits, or float targets")
    counted = targets[targets != IGNORED]
    if not len(counted) or int(counted.min()) < 0 or int(counted.max()) >= outputs.shape[-1]:
        rule = "targets of a classification are the numbers of classes"
        span = f"from {int(targets.min())} to {int(targets.max())} of {outputs.shape[-1]} classes"
        raise UserError(rule, span, f"from 0, or {IGNORED} for rows that do not count")
    sums = outputs.double().sum(-1)
    likely = bool((outputs >= 0).all() and ((sums - 1).abs() <= _SUM_ERROR).all())
    return Task("classification", "probabilities" if likely else "logits", int(outputs.shape[-1]))


def judged(predictions: Mapping[int, Mapping[str, torch.Tensor]]) -> Judged:
    """Return all members' predictions as one array, in the order of ``predictions``. Each is read only once.

    Raises:
        UserError: If they are not for the same samples of one task, or do not fit into memory.
    """
    trials = list(predictions)
    first, kind, width, logits = trials[0], "", 0, False
    targets, outputs = torch.empty(0), np.empty((0, 0, 0))
    for place, trial in enumerate(trials):
        predicted = predictions[trial]
        task = task_of(predicted["outputs"], predicted["targets"])
        if not place:
            kind, width, targets = task.kind, task.width, predicted["targets"]
            _check_size(len(trials), predicted["outputs"].numel())
            outputs = np.empty((len(trials), predicted["outputs"].numel() // width, width))
        elif not torch.equal(predicted["targets"], targets):
            rule, fix = "members' predictions are of the same samples", "let all trials predict the same data set"
            raise UserError(rule, f"trials {first} and {trial} have other targets", fix)
        elif (task.kind, task.width) != (kind, width):
            rule, fix = "members solve the same task", "take trials of one study"
            raise UserError(rule, f"{kind} of {width}, and trial {trial}: {task.kind} of {task.width}", fix)
        outputs[place] = predicted["outputs"].double().reshape(-1, width).numpy()
        # If one trial gives logits, all do: the logits of another trial may add up to 1 by chance.
        logits = logits or task.output_kind == "logits"
    if kind == "regression":
        values = targets.double().reshape(len(targets), -1).numpy()
        return Judged(Task("regression", "values", width), outputs, values)
    for place, rows in enumerate(outputs):
        outputs[place] = _softmax(rows) if logits else rows / rows.sum(-1, keepdims=True)
    flat = targets.reshape(-1).long().numpy()
    counts = flat != IGNORED
    kept = outputs if counts.all() else outputs[:, counts]
    return Judged(Task("classification", "logits" if logits else "probabilities", width), kept, flat[counts])


def _check_size(members: int, numbers: int) -> None:
    """Raise ``UserError`` if all predictions would be too large. The size of the first ones is enough to know it."""
    size = 8 * members * numbers
    if size > LARGEST_BYTES:
        rule = f"members' predictions together have at most {LARGEST_BYTES >> 30} GiB"
        raise UserError(rule, f"{size / (1 << 30):.1f} GiB of {members} trials", "keep fewer trials, or fewer samples")


def _softmax(rows: Array) -> Array:
    return np.asarray(torch.from_numpy(rows).softmax(-1).numpy())


# --- scores ---
LEAST = 1e-12  # smaller probabilities count as this much: the certainty of one member must not decide all
Figures = NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """A score by which models are judged, computed from predictions and right answers.

    Attributes:
        kind: The kind of problem that it is for.
        direction: Its better direction.
        of: Computes it: ``of(outputs, right)``. ``outputs`` may have any leading axes before (rows, width); the result
            has them, too.
    """

    name: str
    kind: Kind
    direction: Direction
    of: Callable[[Array, NDArray[Any]], Figures]

    def gain(self, outputs: Array, right: NDArray[Any]) -> Figures:
        """Return the score with the sign for which a higher value is always better."""
        return self.of(outputs, right) if self.direction == "max" else -self.of(outputs, right)


def _accuracy(outputs: Array, right: NDArray[Any]) -> Figures:
    return np.asarray((outputs.argmax(-1) == right).mean(-1))


def _log_loss(outputs: Array, right: NDArray[Any]) -> Figures:
    hit = outputs[..., np.arange(len(right)), right]
    return np.asarray(-np.log(np.maximum(hit, LEAST)).mean(-1))


def _brier(outputs: Array, right: NDArray[Any]) -> Figures:
    hit = outputs[..., np.arange(len(right)), right]
    return np.asarray(((outputs**2).sum(-1) - 2 * hit + 1).mean(-1))


def _mse(outputs: Array, right: NDArray[Any]) -> Figures:
    return np.asarray(((outputs - right) ** 2).mean((-2, -1)))


def _mae(outputs: Array, right: NDArray[Any]) -> Figures:
    return np.asarray(np.abs(outputs - right).mean((-2, -1)))


def _r2(outputs: Array, right: NDArray[Any]) -> Figures:
    around = ((right - right.mean(0)) ** 2).mean()
    return np.asarray(1 - _mse(outputs, right) / around) if around > 0 else np.asarray(-_mse(outputs, right))


SCORES = {
    score.name: score
    for score in (
        Score("accuracy", "classification", "max", _accuracy),
        Score("log_loss", "classification", "min", _log_loss),
        Score("brier", "classification", "min", _brier),
        Score("mse", "regression", "min", _mse),
        Score("rmse", "regression", "min", lambda outputs, right: np.sqrt(_mse(outputs, right))),
        Score("mae", "regression", "min", _mae),
        Score("r2", "regression", "max", _r2),
    )
}
SMOOTH = {"classification": SCORES["log_loss"], "regression": SCORES["mse"]}
"""The score that decides between equally good members, and by which weights are fitted."""
_DEFAULT = {"classification": "accuracy", "regression": "mse"}


def score_for(name: str | None, kind: Kind) -> Score:
    """Return the score ``name``, or the usual one for tasks of this kind. Raises ``UserError`` for an unknown one."""
    score = SCORES.get(name or _DEFAULT[kind])
    if score is None or score.kind != kind:
        names = ", ".join(score.name for score in SCORES.values() if score.kind == kind)
        raise UserError(f"an ensemble of a {kind} is chosen by one of its scores", repr(name), f"use {names}")
    return score


# Predictions of kept trials on any data set, without training, by the program's ``build`` and ``predict``.

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
