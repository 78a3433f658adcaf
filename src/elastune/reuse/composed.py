"""Models made of several trainings' models. They are judged together with a study's own and stand on its front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from elastune.core.errors import UserError
from elastune.journal.records import SingleScore
from elastune.reuse.candidates import Candidate, library
from elastune.reuse.class_tree import ClassTree
from elastune.reuse.joined import JoinedModel, MadeOf, best_kept, join
from elastune.reuse.model_hooks import hooks_of
from elastune.reuse.scores import Score, score_for
from elastune.reuse.stacked import StackedParts
from elastune.reuse.task import judged, task_of
from elastune.reuse.weights import fill, numbers_in, tensors_of, weights_of
from elastune.search.space.objective import Direction
from elastune.study.results.study import Study
from elastune.train.predictions import HELD_OUT, check_name
from elastune.train.program.guest import as_guest
from elastune.train.program.load import load_functions

Composed = JoinedModel | StackedParts


@dataclass(frozen=True)
class ComposedTest:
    """Scores on data that nothing was chosen by.

    Attributes:
        data: The name of the data set.
        rows: How many rows it has.
        model: The score of the model.
        best_single: The score of the study's trial that is best by itself; None: no trial was judged, or it has no
            predictions on the data.
    """

    data: str
    rows: int
    model: float
    best_single: float | None


@dataclass(frozen=True)
class ComposedModel:
    """A joined or stacked model, judged like the trials of a study.

    Attributes:
        study: The folder of the study whose front the model is to be on.
        model: The model, in evaluation mode.
        made_of: All trials that it was made of, each once.
        data: The predictions of ``study`` that it is judged by.
        objective, direction, score: The score by its name, which way is better, and its value.
        singles: The scores of single kept trials of ``study`` on the same data.
        test: The scores on test data; None where the program knows no such data.
    """

    study: Path
    model: Composed
    made_of: tuple[MadeOf, ...]
    data: str
    objective: str
    direction: Direction
    score: float
    singles: tuple[SingleScore, ...]
    test: ComposedTest | None

    @property
    def form(self) -> Literal["joined", "stacked"]:
        """Whether it is "joined" or "stacked"."""
        return "joined" if isinstance(self.model, JoinedModel) else "stacked"

    @property
    def method(self) -> str:
        """How its parts come together."""
        if isinstance(self.model, StackedParts):
            return "head"
        levels = len(self.model.tree.levels())
        return "gate" if levels == 2 else f"tree of {levels} levels"

    @property
    def parameters(self) -> int:
        """The number of parameters; an answer goes through all parts."""
        return numbers_in(tensors_of(self.model))

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the weights are left out."""
        return {
            "study": str(self.study),
            "form": self.form,
            "method": self.method,
            "made_of": [{"study": str(one.study), "trial": one.trial} for one in self.made_of],
            "data": self.data,
            "objective": self.objective,
            "direction": self.direction,
            "score": self.score,
            "parameters": self.parameters,
            "singles": [{"trial": one.trial, "score": one.score} for one in self.singles],
            "test": None if self.test is None else vars(self.test),
        }


def judge_model(
    model: Composed,
    study: Study | str | Path,
    *,
    objective: str | None = None,
    data: str = "validation",
    test: str = "test",
    program: str | Path | None = None,
) -> ComposedModel:
    """Score a joined or stacked model in the way in which the kept trials of ``study`` are scored.

    The model can then stand on one front with them.

    Args:
        model: A model from ``join`` or ``stacked_parts``; one from ``stacked_parts`` with its trained head: see
            ``composed_of``.
        study: A study that was trained for the whole problem; the ``predict(model, name)`` of its program asks any
            model.
        objective: "accuracy", "log_loss", "brier"; "mse", "rmse", "mae", "r2". None: accuracy or mse.
        data: The data set that the points of the front are judged by.
        test: The data set for the test score; no choice rests on it.
        program: As for ``predict``.

    Returns:
        The scores. ``save_composed`` writes the model, and ``record_asset`` tells the study of it.

    Raises:
        UserError: For a model whose parts are not known, and as ``predict`` does.

    Example:
        >>> found = elastune.judge_model(elastune.join("gate", "parts", build, tree), "flat")
        >>> elastune.record_asset(found, elastune.save_composed(found.model, "joined.safetensors"))
    """
    for name in (data, test):
        check_name(name)
    if data.startswith(HELD_OUT):
        raise UserError(f"nothing is chosen by data whose name begins with {HELD_OUT!r}", data, "name others")
    if not test.startswith(HELD_OUT):
        raise UserError(f"data that judge a choice have a name that begins with {HELD_OUT!r}", test, "such as test")
    if not isinstance(model, JoinedModel | StackedParts) or not model.made_of:
        rule = "a model on a front is made of trials: by join or stacked_parts"
        raise UserError(rule, type(model).__name__, "build it by one of these")
    found = library(study)
    with hooks_of(found, None if program is None else Path(program)) as hooks:
        own = hooks.known(model.eval(), data)
        score = score_for(objective, task_of(own["outputs"], own["targets"]).kind)
        singles = []
        for one in found.candidates:
            if data in one.artifact.predictions:
                said = one.predictions(data)
                if not torch.equal(said["targets"], own["targets"]):
                    rule, fix = "models on one front are judged by the same samples", "see predict(model, name)"
                    raise UserError(rule, f"trial {one.trial} has other targets on {data}", fix)
                alone = SingleScore(one.trial, _scored(score, said), numbers_in(one.weights()))
                singles.append(alone)
        tested = hooks.said(model, test)
        told = None if tested is None else _tested(score, test, tested, singles, found.candidates)
    made_of = tuple({(one.study.resolve(), one.trial): one for one in model.made_of}.values())
    value = _scored(score, own)
    return ComposedModel(found.out, model, made_of, data, score.name, score.direction, value, tuple(singles), told)


def composed_of(
    studies: Sequence[str | Path], tree: ClassTree | None = None, *, program: str | Path | None = None
) -> Composed:
    """Return the model that kept trials of ``studies`` make together, built by their program's ``build(config)``.

    Args:
        studies: With a ``tree``: the study of its gate, then the studies of its parts, or the one study of
            ``train_tree``. Without a tree: one study whose trials train heads over parts; ``build`` gives what
            ``stacked_parts`` makes.
        tree: The groups of classes.
        program: The file with ``build``; None: the last study's.

    Raises:
        UserError: As ``join`` does, and where ``build`` makes something else.
    """
    known = [library(one) for one in studies]
    if not known or (tree is None and len(known) != 1):
        rule = "a model is made of a gate's study and its parts', with their tree, or of one study of heads"
        raise UserError(rule, f"{len(known)} studies, {'no' if tree is None else 'a'} tree", "see docs/transfer.md")
    path = Path(known[-1].study.program if program is None else program)
    with as_guest():
        build = load_functions(path, ["build"])["build"]
        if build is None:
            raise UserError("a program whose kept models are used has build", path, "def build(config): return model")
        if tree is not None:
            return join(known[0].study, [found.study for found in known[1:] or known], build, tree)
        best = best_kept([(known[0], one) for one in known[0].candidates], "the head", known[0])[1]
        model = build(dict(best.config))
    if not isinstance(model, StackedParts):
        rule = "build(config) of a study of heads gives what stacked_parts makes"
        raise UserError(rule, type(model).__name__, "or name a tree, with the studies of its gate and parts")
    fill(model, weights_of(best), f"of trial {best.trial}")
    model.made_of = (*model.made_of, MadeOf(known[0].out, best.trial, best.config))
    return model.eval()


def _scored(score: Score, said: dict[str, torch.Tensor]) -> float:
    seen = judged({0: said})
    return float(score.of(seen.said[0], seen.right))


def _tested(
    score: Score,
    name: str,
    tested: dict[str, torch.Tensor],
    singles: Sequence[SingleScore],
    candidates: Sequence[Candidate],
) -> ComposedTest:
    best = max(singles, key=lambda one: one.score if score.direction == "max" else -one.score, default=None)
    alone = next((one for one in candidates if best is not None and one.trial == best.trial), None)
    there = alone is not None and name in alone.artifact.predictions
    value = _scored(score, alone.read(name)) if alone is not None and there else None
    return ComposedTest(name, len(tested["targets"]), _scored(score, tested), value)
