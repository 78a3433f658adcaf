"""The scores that models are judged by: numbers computed from predictions and right answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.reuse.task import Array, Kind
from elastune.search.space.objective import Direction

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
