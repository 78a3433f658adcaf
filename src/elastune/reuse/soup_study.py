"""A soup that is judged by the program itself: ``elastune soup``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.core.errors import Diverged, UserError
from elastune.journal.records import SingleScore
from elastune.reuse.batch_norm import fresh_statistics
from elastune.reuse.candidates import library
from elastune.reuse.model_hooks import hooks_of
from elastune.reuse.scores import Score, score_for
from elastune.reuse.soup import HOW, Kitchen, Soup, cooked
from elastune.reuse.task import judged, task_of
from elastune.reuse.weights import numbers_in, tensors_of
from elastune.search.space.objective import Direction
from elastune.study.results.study import Study
from elastune.train.predictions import HELD_OUT, check_name


@dataclass(frozen=True)
class SoupTest:
    """Scores on data that no choice has seen.

    Attributes:
        data: The name of the data set.
        rows: How many rows it has.
        soup: The score of the soup.
        best_single: The score of the trial that was best by itself where the choice was made.
    """

    data: str
    rows: int
    soup: float
    best_single: float


@dataclass(frozen=True)
class StudySoup:
    """A soup, the predictions that it was chosen by, and its score on others.

    Attributes:
        single: The trial that is best by itself on ``data``.
        test: Scores on test data; None where the program knows no such data.
    """

    study: Path
    how: str
    data: str
    objective: str
    direction: Direction
    soup: Soup
    single: int
    test: SoupTest | None

    @property
    def parameters(self) -> int:
        """The number of parameters of the soup; each of its trials has as many."""
        return numbers_in(tensors_of(self.soup.model))

    @property
    def singles(self) -> list[SingleScore]:
        """The scores of single trials, without those whose score is no number."""
        found = {trial: score for trial, score in self.soup.singles.items() if not isnan(score)}
        return [SingleScore(trial, score, self.parameters) for trial, score in found.items()]

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the weights are left out."""
        soup = self.soup
        return {
            "study": str(self.study),
            "how": self.how,
            "data": self.data,
            "objective": self.objective,
            "direction": self.direction,
            "trials": list(soup.trials),
            "ancestor": soup.ancestor,
            "score": soup.score,
            "singles": [{"trial": one.trial, "score": one.score} for one in self.singles],
            "parameters": self.parameters,
            "single": self.single,
            "test": None if self.test is None else vars(self.test),
        }


def soup_of_study(
    study: Study | str | Path,
    *,
    how: str = "greedy",
    objective: str | None = None,
    data: str = "validation",
    test: str = "test",
    statistics: str = "train",
    trials: Sequence[int] | None = None,
    program: str | Path | None = None,
) -> StudySoup:
    """Average the weights of kept trials that began with the same weights, judged by the program's ``predict``.

    Args:
        study: The study, or its folder.
        how: "greedy" (from the best on, each that does no harm) or "uniform" (all).
        objective: "accuracy", "log_loss", "brier"; "mse", "rmse", "mae", "r2". None: accuracy or mse.
        data: The data set that the choice is made by.
        test: The data set that judges it; the program is asked about it after the choice.
        statistics: The data set by which BatchNorm statistics are estimated again, where there are any.
        trials: The trials to look at; None: all that were kept.
        program: As for ``predict``.

    Returns:
        The soup and its scores; ``.soup.save(FILE)`` writes the weights.

    Raises:
        UserError: As ``soup`` and ``predict`` do.

    Example:
        >>> elastune.Study.load("out").soup().soup.save("soup.safetensors")
    """
    if how not in HOW:
        raise UserError("a soup is greedy or uniform", how, f"use {' or '.join(HOW)}")
    for name in (data, test, statistics):
        check_name(name)
    for name in (data, statistics):
        if name.startswith(HELD_OUT):
            raise UserError(f"nothing is chosen by data whose name begins with {HELD_OUT!r}", name, "name others")
    if not test.startswith(HELD_OUT):
        raise UserError(f"data that judge a choice have a name that begins with {HELD_OUT!r}", test, "such as test")
    found = library(study)
    asked = found.asked(trials)
    with hooks_of(found, None if program is None else Path(program)) as hooks:
        first = hooks.known(hooks.model_of(asked[0]), data)
        score = score_for(objective, task_of(first["outputs"], first["targets"]).kind)

        def evaluate(model: nn.Module) -> float:
            try:
                return _scored(score, hooks.known(model, data))
            except Diverged:
                return float("nan")

        def estimate(model: nn.Module) -> None:
            with fresh_statistics(model):
                hooks.known(model, statistics)

        made = cooked(found, Kitchen(hooks.made, evaluate, score.direction, estimate), how, trials)
        best = max if score.direction == "max" else min
        single = best((t for t, alone in made.singles.items() if not isnan(alone)), key=lambda t: made.singles[t])
        tested = hooks.said(made.model, test)
        told = None
        if tested is not None:
            alone = hooks.known(hooks.model_of(next(one for one in asked if one.trial == single)), test)
            told = SoupTest(test, len(tested["targets"]), _scored(score, tested), _scored(score, alone))
    return StudySoup(found.out, how, data, score.name, score.direction, made, single, told)


def _scored(score: Score, found: dict[str, torch.Tensor]) -> float:
    seen = judged({0: found})
    return float(score.of(seen.said[0], seen.right))
