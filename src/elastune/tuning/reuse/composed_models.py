"""Models made of the models of several trainings: joined by a class tree, or stacked under one head.

They are judged together with the study's own models and stand on its front.

A *joined* model is a gate and its parts, trained separately, for a class tree of any depth. A *stacked* model puts
models of sub-problems under one head (stacked generalisation, Wolpert 1992); only the head is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.journal.records import SingleScore
from elastune.core.run import Program
from elastune.train.predictions import HELD_OUT, check_name
from elastune.train.program.load import load_functions, process_restored
from elastune.tuning.reuse.class_tree import ROOT, ClassTree, class_tree, node_text
from elastune.tuning.reuse.kept_models import (
    Build,
    Candidate,
    Library,
    built,
    fill,
    library,
    numbers_in,
    tensors_of,
    weights_of,
)
from elastune.tuning.reuse.predictions import Score, hooks_of, judged, score_for, task_of
from elastune.tuning.search.objective import Direction, oriented
from elastune.tuning.study.results import Study
from elastune.tuning.study.trials import GROUP, NODE, TREE

# --- joined models ---


@dataclass(frozen=True)
class SourceTrial:
    """A trial of ``study`` whose model is a part of a larger model, with its settings."""

    study: Path
    trial: int
    config: dict[str, Any]


class JoinedModel(nn.Module):
    """A model for a tree of classes, made of one model for each node.

    The probability of a class is the product of the probabilities along its path. All models give logits.

    Attributes:
        models: The models by the names of the tree's nodes, with "gate" for the root and "_" for each ".".
        tree: The groups of classes.
        source_trials: The trial of each node, in the order of the tree's nodes; empty if it is not known.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], tree: ClassTree, source_trials: Sequence[SourceTrial] = ()
    ) -> None:
        super().__init__()
        self.models = nn.ModuleDict({key_of(name): models[name] for name in tree.nodes()})
        self.tree, self.source_trials = tree, tuple(source_trials)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return probabilities of classes, of shape (..., classes)."""
        probabilities = {name: self.models[key_of(name)](*inputs).softmax(-1) for name in self.tree.nodes()}
        return self.tree.chained(probabilities)


def key_of(node: str) -> str:
    """Return the name of the module for a node."""
    return node.replace(".", "_") or "gate"


def join(
    gate: Study | str | Path, parts: Study | str | Path | Sequence[Study | str | Path], build: Build, tree: ClassTree
) -> JoinedModel:
    """Return one model of the best kept trial of the study ``gate`` and, for each group, the best one of ``parts``.

    Args:
        gate: A study whose models give the group. For ``train_tree``, its one study, which ``parts`` names, too.
        parts: A study whose trials have the number of their group in their settings, as ``group``, or the name of their
            node, as ``node``; several studies for a deeper tree. Its models give the class, or the group, within that.
            Trials whose settings have another ``tree``, with other classes at that node, are left out.
        build: Makes the program's model from the settings of a trial.
        tree: The groups. A group of a single class needs no part.

    Returns:
        A module that gives probabilities of all classes, in evaluation mode.

    Raises:
        UserError: If a group has no kept trial, or ``build`` makes other models.

    Example:
        >>> model = elastune.join("gate", "parts", build, elastune.class_tree([[0, 2], [1, 3]]))
    """
    first = library(gate)
    rest = [library(each) for each in ([parts] if isinstance(parts, Study | str | Path) else parts)]
    gates = [candidate for candidate in first.candidates if candidate.config.get(NODE, ROOT) == ROOT]
    roots = [(first, candidate) for candidate in gates if _has_same_labels(candidate, ROOT, tree)]
    chosen = [best_kept(roots, node_text(ROOT), first)]
    for node in tree.nodes()[1:]:
        of_it = [(source, candidate) for source in rest for candidate in source.candidates if _is_of(candidate, node)]
        alike = [(source, candidate) for source, candidate in of_it if _has_same_labels(candidate, node, tree)]
        chosen.append(best_kept(alike, node_text(node), rest[-1] if rest else first))
    models = {node: model_of(candidate, build) for node, (_, candidate) in zip(tree.nodes(), chosen, strict=True)}
    return JoinedModel(
        models, tree, [SourceTrial(source.out, candidate.trial, candidate.config) for source, candidate in chosen]
    ).eval()


def _is_of(candidate: Candidate, node: str) -> bool:
    return candidate.config.get(NODE) == node or (node.isdecimal() and candidate.config.get(GROUP) == int(node))


def _has_same_labels(candidate: Candidate, node: str, tree: ClassTree) -> bool:
    """Whether the candidate's model has the labels of ``node``. True if its settings have no tree of classes."""
    try:
        own_tree = class_tree(candidate.config.get(TREE, ()))
    except UserError:
        return True  # the setting is missing, or it is not a tree of classes
    every = torch.arange(tree.classes)
    try:
        return own_tree.classes == tree.classes and torch.equal(own_tree.labels(every, node), tree.labels(every, node))
    except UserError:
        return False  # its tree has no such node


def best_kept(candidates: Sequence[tuple[Library, Candidate]], what: str, where: Library) -> tuple[Library, Candidate]:
    """Return the best kept trial, by the studies' objectives in their order.

    Raises:
        UserError: If there is no kept trial for ``what`` in the study ``where``.
    """
    ranked = []
    for source, candidate in candidates:
        values = {trial.number: trial.values for trial in source.study.complete}
        if candidate.trial in values:
            ranked.append((tuple(oriented(values[candidate.trial], source.study.objectives)), (source, candidate)))
    if not ranked:
        rule, fix = (
            "a joined model has a kept trial for the gate and for each group",
            "tune with --keep all, by the same tree",
        )
        raise UserError(rule, f"none for {what} in {where.out}", fix)
    return min(ranked, key=lambda pair: pair[0])[1]


def model_of(candidate: Candidate, build: Build) -> nn.Module:
    """Return the model of a kept trial. Raises ``UserError`` if ``build`` makes another model."""
    model = built(build, candidate.config, f"of trial {candidate.trial}")
    fill(model, weights_of(candidate), f"of trial {candidate.trial}")
    return model


# --- stacked models ---

View = Callable[[dict[str, Any], torch.Tensor], torch.Tensor]
"""Gives the inputs of a part: ``view(config, inputs)``, with the settings of the part."""


def whole_input(config: dict[str, Any], inputs: torch.Tensor) -> torch.Tensor:
    """Return all inputs: the view of a part that sees everything."""
    return inputs


class StackedParts(nn.Module):
    """A linear ``head`` over the outputs of its ``parts``. The parts stay as they are, in evaluation mode.

    Attributes:
        source_trials: The trials of its parts and, once it is trained, of its head; empty if they are not known.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        configs: Sequence[dict[str, Any]],
        view: View,
        head: nn.Linear,
        source_trials: Sequence[SourceTrial] = (),
    ) -> None:
        super().__init__()
        self.source_trials = tuple(source_trials)
        self.parts, self.head = nn.ModuleList(parts), head
        self._configs, self._view = list(configs), view
        self.parts.requires_grad_(False)

    def train(self, mode: bool = True) -> StackedParts:
        """Set the training mode of the head; the parts stay in evaluation mode."""
        super().train(mode)
        self.parts.eval()
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the head's output for the outputs of the parts."""
        return self.head(outputs_of_parts(self.parts, self._configs, self._view, inputs))  # type: ignore[no-any-return]


def outputs_of_parts(parts: Any, configs: Sequence[dict[str, Any]], view: View, inputs: torch.Tensor) -> torch.Tensor:
    """Return the outputs of the parts for ``inputs``, each for its own view, side by side: (samples, numbers)."""
    with torch.no_grad():
        outputs = [part(view(config, inputs)) for part, config in zip(parts, configs, strict=True)]
    return torch.cat([output.reshape(len(inputs), -1) for output in outputs], -1)


def stacked_parts(
    study: Study | str | Path,
    build: Build,
    *,
    outputs: int,
    example: torch.Tensor,
    trials: Sequence[int] | None = None,
    view: View = whole_input,
) -> StackedParts:
    """Put kept trials of a study under a new head, to be trained like any model. Call this in ``train(session)``.

    The parts may have been trained on classes, regions or views of their own, in parallel, as one study. Train the head
    on other data than the parts: they know their own training data too well.

    Args:
        study: The study whose trials are parts, in a folder that every worker can read.
        build: Makes the program's model from the settings of a trial.
        outputs: Numbers that the head gives, such as the number of classes.
        example: One sample or more, of the shape that the model will get; it shows how many numbers the parts give.
        trials: The trials to take; None: all that were kept.
        view: The part of the inputs that a part sees, by its settings; by default all.

    Returns:
        The model; only its head trains.

    Raises:
        UserError: If nothing was kept, ``build`` makes other models, or parts do not take the example.

    Example:
        >>> model = elastune.stacked_parts("parts", build, outputs=10, example=data.train[0][0][None])
        >>> model, optimizer = session.prepare(model, torch.optim.Adam(model.head.parameters()))
    """
    if isinstance(outputs, bool) or not isinstance(outputs, int) or outputs < 1:
        raise UserError("a head gives a whole number of outputs, at least 1", outputs, "such as the number of classes")
    source = library(study)
    selected = source.selected(trials)
    parts, configs = (
        [model_of(candidate, build).eval() for candidate in selected],
        [dict(candidate.config) for candidate in selected],
    )
    try:
        width = outputs_of_parts(parts, configs, view, example).shape[-1]
    except (RuntimeError, TypeError, IndexError) as error:
        rule, fix = "parts take the example that they are shown", "give one of the right shape, or view=..."
        raise UserError(rule, str(error).split("\n")[0][:200], fix) from None
    source_trials = [SourceTrial(source.out, candidate.trial, candidate.config) for candidate in selected]
    return StackedParts(parts, configs, view, nn.Linear(width, outputs), source_trials).train()


# --- judging them like the trials of a study ---

Composed = JoinedModel | StackedParts


@dataclass(frozen=True)
class ComposedTest:
    """The scores of a composed model on data that no choice rests on.

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
        source_trials: All trials that it was made of, each once.
        data: The predictions of ``study`` that it is judged by.
        objective, direction, score: The score's name, its better direction, and its value.
        singles: The scores of single kept trials of ``study`` on the same data.
        test: The scores on test data; None if the program knows no such data.
    """

    study: Path
    model: Composed
    source_trials: tuple[SourceTrial, ...]
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
        """How its parts are combined."""
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
            "source_trials": [{"study": str(each.study), "trial": each.trial} for each in self.source_trials],
            "data": self.data,
            "objective": self.objective,
            "direction": self.direction,
            "score": self.score,
            "parameters": self.parameters,
            "singles": [{"trial": each.trial, "score": each.score} for each in self.singles],
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
    """Score a joined or stacked model as the kept trials of ``study`` are scored, so that all stand on one front.

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
        The scores. ``save_composed`` writes the model, and ``record_asset`` records it in the study.

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
    if not isinstance(model, JoinedModel | StackedParts) or not model.source_trials:
        rule = "a model on a front is made of trials: by join or stacked_parts"
        raise UserError(rule, type(model).__name__, "build it by one of these")
    source = library(study)
    with hooks_of(source, None if program is None else Path(program)) as hooks:
        predictions = hooks.known_predictions(model.eval(), data)
        score = score_for(objective, task_of(predictions["outputs"], predictions["targets"]).kind)
        singles = []
        for candidate in source.candidates:
            if data in candidate.artifact.predictions:
                single_predictions = candidate.predictions(data)
                if not torch.equal(single_predictions["targets"], predictions["targets"]):
                    rule, fix = "models on one front are judged by the same samples", "see predict(model, name)"
                    raise UserError(rule, f"trial {candidate.trial} has other targets on {data}", fix)
                alone = SingleScore(
                    candidate.trial, _scored(score, single_predictions), numbers_in(candidate.weights())
                )
                singles.append(alone)
        tested = hooks.predictions(model, test)
        test_scores = None if tested is None else _tested(score, test, tested, singles, source.candidates)
    source_trials = tuple({(each.study.resolve(), each.trial): each for each in model.source_trials}.values())
    value = _scored(score, predictions)
    return ComposedModel(
        source.out, model, source_trials, data, score.name, score.direction, value, tuple(singles), test_scores
    )


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
        UserError: As ``join`` does, and if ``build`` makes another kind of model.
    """
    sources = [library(each) for each in studies]
    if not sources or (tree is None and len(sources) != 1):
        rule = "a model is made of a gate's study and its parts', with their tree, or of one study of heads"
        raise UserError(rule, f"{len(sources)} studies, {'no' if tree is None else 'a'} tree", "see docs/transfer.md")
    path, settings = Path(sources[-1].study.program if program is None else program), sources[-1].settings
    recorded_program = Program(path, arguments=tuple(settings.get("arguments", ())))
    with process_restored():
        build = load_functions(recorded_program, ["build"], int(settings.get("seed", 0)))["build"]
        if build is None:
            raise UserError("a program whose kept models are used has build", path, "def build(config): return model")
        if tree is not None:
            return join(sources[0].study, [source.study for source in sources[1:] or sources], build, tree)
        best = best_kept([(sources[0], candidate) for candidate in sources[0].candidates], "the head", sources[0])[1]
        model = build(dict(best.config))
    if not isinstance(model, StackedParts):
        rule = "build(config) of a study of heads gives what stacked_parts makes"
        raise UserError(rule, type(model).__name__, "or name a tree, with the studies of its gate and parts")
    fill(model, weights_of(best), f"of trial {best.trial}")
    model.source_trials = (*model.source_trials, SourceTrial(sources[0].out, best.trial, best.config))
    return model.eval()


def _scored(score: Score, predictions: dict[str, torch.Tensor]) -> float:
    seen = judged({0: predictions})
    return float(score.of(seen.outputs[0], seen.right))


def _tested(
    score: Score,
    name: str,
    tested: dict[str, torch.Tensor],
    singles: Sequence[SingleScore],
    candidates: Sequence[Candidate],
) -> ComposedTest:
    best = max(singles, key=lambda each: each.score if score.direction == "max" else -each.score, default=None)
    alone = next((each for each in candidates if best is not None and each.trial == best.trial), None)
    has_data = alone is not None and name in alone.artifact.predictions
    value = _scored(score, alone.read(name)) if alone is not None and has_data else None
    return ComposedTest(name, len(tested["targets"]), _scored(score, tested), value)
