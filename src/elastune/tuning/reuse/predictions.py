"""Predictions of trials as arrays, the kind of problem they belong to, and the scores that judge them.

The kind (classification or regression) is found from shapes and types of outputs and targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.tuning.search.objective import Direction

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
