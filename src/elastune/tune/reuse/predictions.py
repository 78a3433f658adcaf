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
from elastune.tune.search.objective import Direction

# [task] The kind of problem that predictions belong to, found from their shapes and types; members' outputs as one array.

Array = NDArray[np.float64]
Kind = Literal["classification", "regression"]
OutputKind = Literal["logits", "probabilities", "values"]
IGNORED = -100
"""Of an integer target, as torch's ``cross_entropy`` has it: the row counts for nothing, such as one of padding."""
LARGEST_BYTES = 8 << 30
_SUM_ERROR = 1e-3
_REGRESSION = "targets and outputs of a regression have the same shape"
_CLASSES = "outputs of a classification have one number a class more than its targets: (samples, ..., classes)"


@dataclass(frozen=True)
class Task:
    """A kind of problem.

    Attributes:
        says: What members' outputs are.
        width: The number of classes or of values.
    """

    kind: Kind
    says: OutputKind
    width: int


@dataclass(frozen=True)
class Judged:
    """What members predict for the same samples, and the right answers.

    Attributes:
        task: The kind of problem.
        said: Probabilities or values, of shape (members, rows, width); a row is a sample, or a token of one.
        right: The class of each row, or its values of shape (rows, width).
    """

    task: Task
    said: Array
    right: NDArray[np.int64] | Array

    @property
    def members(self) -> int:
        """The number of members."""
        return len(self.said)


def task_of(outputs: torch.Tensor, targets: torch.Tensor) -> Task:
    """Return the task of these outputs and targets. Raises ``UserError`` where they fit none."""
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
    """Return all members' predictions, by trial, as one array, in that order. Each is read once, and not held.

    Raises:
        UserError: Where they are not for the same samples of one task, or too many to hold.
    """
    trials = list(predictions)
    first, kind, width, logits = trials[0], "", 0, False
    targets, said = torch.empty(0), np.empty((0, 0, 0))
    for place, trial in enumerate(trials):
        found = predictions[trial]
        task = task_of(found["outputs"], found["targets"])
        if not place:
            kind, width, targets = task.kind, task.width, found["targets"]
            _check_size(len(trials), found["outputs"].numel())
            said = np.empty((len(trials), found["outputs"].numel() // width, width))
        elif not torch.equal(found["targets"], targets):
            rule, fix = "members' predictions are of the same samples", "let all trials predict the same data set"
            raise UserError(rule, f"trials {first} and {trial} have other targets", fix)
        elif (task.kind, task.width) != (kind, width):
            rule, fix = "members solve the same task", "take trials of one study"
            raise UserError(rule, f"{kind} of {width}, and trial {trial}: {task.kind} of {task.width}", fix)
        said[place] = found["outputs"].double().reshape(-1, width).numpy()
        # Where one trial's are no probabilities, none are: logits of another may add up to 1 by chance.
        logits = logits or task.says == "logits"
    if kind == "regression":
        values = targets.double().reshape(len(targets), -1).numpy()
        return Judged(Task("regression", "values", width), said, values)
    for place, rows in enumerate(said):
        said[place] = _softmax(rows) if logits else rows / rows.sum(-1, keepdims=True)
    flat = targets.reshape(-1).long().numpy()
    counts = flat != IGNORED
    kept = said if counts.all() else said[:, counts]
    return Judged(Task("classification", "logits" if logits else "probabilities", width), kept, flat[counts])


def _check_size(members: int, numbers: int) -> None:
    """As soon as the first trial's are known: before the others are read."""
    size = 8 * members * numbers
    if size > LARGEST_BYTES:
        rule = f"members' predictions together have at most {LARGEST_BYTES >> 30} GiB"
        raise UserError(rule, f"{size / (1 << 30):.1f} GiB of {members} trials", "keep fewer trials, or fewer samples")


def _softmax(rows: Array) -> Array:
    return np.asarray(torch.from_numpy(rows).softmax(-1).numpy())


# [scores] The scores that models are judged by: numbers computed from predictions and right answers.

LEAST = 1e-12  # a probability below it counts as this much: one member's certainty must not decide all
Figures = NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """A score.

    Attributes:
        of: Computes it: ``of(said, right)``. ``said`` may have any leading axes before (rows, width); the result has
            them, too.
    """

    name: str
    kind: Kind
    direction: Direction
    of: Callable[[Array, NDArray[Any]], Figures]

    def gain(self, said: Array, right: NDArray[Any]) -> Figures:
        """Return the score with the sign for which a higher value is always better."""
        return self.of(said, right) if self.direction == "max" else -self.of(said, right)


def _accuracy(said: Array, right: NDArray[Any]) -> Figures:
    return np.asarray((said.argmax(-1) == right).mean(-1))


def _log_loss(said: Array, right: NDArray[Any]) -> Figures:
    hit = said[..., np.arange(len(right)), right]
    return np.asarray(-np.log(np.maximum(hit, LEAST)).mean(-1))


def _brier(said: Array, right: NDArray[Any]) -> Figures:
    hit = said[..., np.arange(len(right)), right]
    return np.asarray(((said**2).sum(-1) - 2 * hit + 1).mean(-1))


def _mse(said: Array, right: NDArray[Any]) -> Figures:
    return np.asarray(((said - right) ** 2).mean((-2, -1)))


def _mae(said: Array, right: NDArray[Any]) -> Figures:
    return np.asarray(np.abs(said - right).mean((-2, -1)))


def _r2(said: Array, right: NDArray[Any]) -> Figures:
    around = ((right - right.mean(0)) ** 2).mean()
    return np.asarray(1 - _mse(said, right) / around) if around > 0 else np.asarray(-_mse(said, right))


SCORES = {
    score.name: score
    for score in (
        Score("accuracy", "classification", "max", _accuracy),
        Score("log_loss", "classification", "min", _log_loss),
        Score("brier", "classification", "min", _brier),
        Score("mse", "regression", "min", _mse),
        Score("rmse", "regression", "min", lambda said, right: np.sqrt(_mse(said, right))),
        Score("mae", "regression", "min", _mae),
        Score("r2", "regression", "max", _r2),
    )
}
SMOOTH = {"classification": SCORES["log_loss"], "regression": SCORES["mse"]}
"""What decides between equals, and what weights are fitted by."""
_DEFAULT = {"classification": "accuracy", "regression": "mse"}


def score_for(name: str | None, kind: Kind) -> Score:
    """Return the score ``name``, or the usual one for tasks of this kind. Raises ``UserError`` for an unknown one."""
    found = SCORES.get(name or _DEFAULT[kind])
    if found is None or found.kind != kind:
        known = ", ".join(score.name for score in SCORES.values() if score.kind == kind)
        raise UserError(f"an ensemble of a {kind} is chosen by one of its scores", repr(name), f"use {known}")
    return found
