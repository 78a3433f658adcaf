"""One model whose weights are the mean of several (a model soup): it costs one model's inference.

Wortsman et al. 2022, "Model soups: averaging weights of multiple fine-tuned models improves accuracy without
increasing inference time". *uniform*: the mean of all. *greedy*: starts from the best model and adds each model that
does not make it worse. Only models that began with the same weights may be averaged; the journal records which did.
BatchNorm statistics are estimated again, because a mean of weights has other activations than its parts.
``soup_of_study`` judges a soup by the program's own ``predict`` (``elastune soup``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from elastune.core.errors import Diverged, UserError
from elastune.core.journal.files import atomic_write, read
from elastune.core.journal.folds import TrialTable
from elastune.core.journal.records import Entry, SingleScore, StudyStarted
from elastune.runtime.job.output import JOURNAL
from elastune.train.predictions import HELD_OUT, check_name
from elastune.tuning.reuse.kept_models import (
    Build,
    Candidate,
    Library,
    built,
    check_alike,
    check_file,
    fill,
    library,
    numbers_in,
    tensors_of,
    weights_of,
)
from elastune.tuning.reuse.predictions import Score, hooks_of, judged, score_for, task_of
from elastune.tuning.search.objective import Direction
from elastune.tuning.study.results import Study

Evaluate = Callable[[nn.Module], float]
"""Gives the score of a model."""
HOW = ("greedy", "uniform")


# --- which models may be averaged ---


def ancestor(table: TrialTable, entries: Sequence[Entry], trials: Sequence[int]) -> str:
    """Return the model whose weights all of ``trials`` began with, in words.

    Models that were trained from different initial values lie in different valleys of the loss. Between valleys is a
    ridge, so the mean of such weights is useless (Frankle et al. 2020; Wortsman et al. 2022).

    Raises:
        UserError: If the trials have no common ancestor in the journal, or parts of each began fresh.
    """
    firsts = sorted({_root(table, trial) for trial in trials})
    if len(firsts) == 1:
        return f"trial {firsts[0]}"
    source = next((e.record.settings.get("start_from") for e in entries if isinstance(e.record, StudyStarted)), None)
    beginnings = {trial: _beginning(table, trial, source if isinstance(source, dict) else {}) for trial in firsts}
    first = beginnings[firsts[0]]
    if first.weights and all(beginning.weights == first.weights for beginning in beginnings.values()):
        return first.source
    rule, which = "weights are averaged where training began with the same ones", ", ".join(map(str, firsts[:6]))
    if first.source and all(beginning.source == first.source for beginning in beginnings.values()):
        fresh = next(iter(first.fresh), "what is fresh")
        value = f"trials {which} took what fits of {first.source}, and began with {fresh} of their own"
        fix = "train that first, and tune with --start-from what comes of it; or take elastune ensemble"
        raise UserError(rule, value, fix)
    value = f"trials {which} began with initial values of their own"
    raise UserError(rule, value, "tune with --start-from, or --stopping pbt; or take elastune ensemble")


@dataclass(frozen=True)
class _Beginning:
    """The weights that a trial began with.

    ``weights``: a digest of all of them; "" if the journal does not record it. ``source``: the trained part of them,
    in words; ``fresh``: the tensors that were not trained before.
    """

    weights: str = ""
    source: str = ""
    fresh: tuple[str, ...] = ()


def _beginning(table: TrialTable, trial: int, settings: Mapping[str, Any]) -> _Beginning:
    starts = table.trials[trial].initial_weights if trial in table.trials else ()
    if starts:
        source = ", ".join(f"{start.source} ({start.sha256[:12]})" for start in starts)
        recorded = all(start.begins for start in starts)
        fresh = tuple(name for start in starts for name in start.fresh)
        return _Beginning(" ".join(start.begins for start in starts) if recorded else "", source, fresh)
    digest = str(settings.get("sha256") or "")
    if not digest:
        return _Beginning()
    fresh = tuple(map(str, settings.get("fresh") or ()))  # older studies record it in their settings
    return _Beginning("" if fresh else digest, f"{settings.get('source')} ({digest[:12]})", fresh)


def _root(table: TrialTable, trial: int) -> int:
    """The oldest ancestor of a trial that the journal records."""
    seen = {trial}
    while trial in table.trials and (parent := table.trials[trial].started.parent) is not None and parent not in seen:
        seen.add(parent)
        trial = parent
    return trial


# --- BatchNorm statistics ---


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a layer of the model keeps running statistics of batches."""
    return bool(_layers(model))


def estimate_batch_norm(model: nn.Module, batches: Iterable[Any]) -> None:
    """Set the running statistics of the BatchNorm layers to those of ``batches`` (inputs), with equal weights.

    Every other layer is in evaluation mode meanwhile.

    Raises:
        UserError: If there is no batch.
    """
    with fresh_statistics(model):
        for batch in batches:
            model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def fresh_statistics(model: nn.Module) -> Iterator[None]:
    """Estimate BatchNorm statistics from the batches that go through ``model`` inside of the block, with equal weights.

    Batches from before do not count, and no other layer trains.

    Raises:
        UserError: If no batch went through.
    """
    layers, counted = _layers(model), 0
    model.eval()

    def trains(layer: nn.Module, inputs: object) -> None:
        nonlocal counted
        counted += 1
        layer.training = True  # the caller may have set another mode

    with ExitStack() as stack, torch.no_grad():
        for layer in layers:
            stack.callback(setattr, layer, "momentum", layer.momentum)
            layer.reset_running_stats()
            layer.momentum = None  # torch: the plain mean of all batches
            stack.callback(layer.register_forward_pre_hook(trains).remove)
        yield
    model.eval()
    if layers and not counted:
        raise UserError("statistics of BatchNorm need at least one batch", "none", "let there be training inputs")


def _layers(model: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]


# --- mixing models ---


@dataclass(frozen=True)
class Soup:
    """A model whose weights are the mean of several.

    Attributes:
        model: The model with the mean weights, in evaluation mode.
        trials: The trials whose weights are in it, in the order in which they were added.
        ancestor: The model that all of them began with, in words.
        score: The score of the model by ``evaluate``; the soup was chosen by it.
        singles: The score of each candidate by itself; NaN if it was no finite number.
    """

    model: nn.Module
    trials: tuple[int, ...]
    ancestor: str
    score: float
    singles: dict[int, float]

    def save(self, file: str | Path) -> Path:
        """Write the weights as one safetensors file, which ``--start-from`` reads. Raises ``UserError``."""
        path = Path(file)
        check_file(path)
        named: dict[int, str] = {}
        tensors = {}
        for name, tensor in self.model.state_dict().items():
            if not hasattr(tensor, "shape"):  # a module's extra state
                continue
            if named.setdefault(tensor.data_ptr() or id(tensor), name) == name:  # tied ones once
                tensors[name] = tensor.contiguous()
        try:
            atomic_write(path, save(tensors, {"format": "pt"}))
        except OSError as error:
            raise UserError("a soup must be writable", error, "name a file in a folder that is there") from None
        return path


def soup(
    study: Study | str | Path,
    build: Build,
    evaluate: Evaluate,
    *,
    how: str = "greedy",
    direction: str = "max",
    trials: Sequence[int] | None = None,
    batches: Callable[[], Iterable[Any]] | None = None,
) -> Soup:
    """Average the weights of a study's trials that began with the same weights.

    Args:
        study: The study, or its folder; its trials were kept (``--keep``).
        build: Makes the program's model from the settings of a trial.
        evaluate: Gives the score of a model on a validation set. The soup is chosen by it, so use no test set.
        how: "greedy" or "uniform".
        direction: "max" or "min": the better direction of the score.
        trials: The candidates; None: all trials that were kept.
        batches: Gives the inputs of training batches. Models with BatchNorm are refused without it: their running
            statistics are estimated again, because a mean of statistics is not that of the mean's activations.

    Returns:
        The soup. With "greedy" its score is no worse than that of the best trial by itself.

    Raises:
        UserError: If the trials have no common ancestor, their models have different shapes, nothing was kept, or
            the soup's score is no finite number.

    Example:
        >>> found = elastune.soup("out", build, lambda model: accuracy(model, data.validation))
        >>> found.save("soup.safetensors")
    """
    if how not in HOW or direction not in ("max", "min"):
        raise UserError("a soup is greedy or uniform, its score max or min", f"{how}, {direction}", "how='greedy'")
    functions = SoupFunctions(
        build, evaluate, direction, None if batches is None else lambda m: estimate_batch_norm(m, batches())
    )
    return make_soup(library(study), functions, how, trials)


@dataclass(frozen=True)
class SoupFunctions:
    """How models are made and judged.

    Attributes:
        build: ``build(config)`` makes a model.
        evaluate: ``evaluate(model)`` gives its score.
        direction: "max" or "min": the better direction of the score.
        estimate: Estimates the BatchNorm statistics of a mixed model; None: models with such layers are refused.
    """

    build: Build
    evaluate: Evaluate
    direction: str
    estimate: Callable[[nn.Module], None] | None


def make_soup(source: Library, functions: SoupFunctions, how: str, trials: Sequence[int] | None = None) -> Soup:
    """Make a soup as ``soup`` does, from a study that was read already."""
    candidates = source.selected(trials)
    if trials is not None and len(candidates) < 2:
        raise UserError("a soup is the mean of several trials", f"trial {trials[0]} alone", "name more --trials")
    common = ancestor(source.table, read(source.out / JOURNAL), [candidate.trial for candidate in candidates])
    pot = _SoupMixer(candidates, functions)
    gains = {at: pot.gain([at]) for at in range(len(candidates))}
    order = sorted(gains, key=lambda at: (-gains[at], at))
    chosen, best = (order, pot.gain(order)) if how == "uniform" else (order[:1], gains[order[0]])
    for at in order[1:] if how == "greedy" else ():
        if (gain := pot.gain([*chosen, at])) >= best:
            chosen, best = [*chosen, at], gain
    if best == -math.inf:
        what = "every trial's" if max(gains.values()) == -math.inf else "that of the mean of all"
        raise UserError("a soup's score is a finite number", f"{what} is not", "see evaluate, or choose other trials")
    sign = pot.sign
    singles = {candidates[at].trial: sign * gain if gain > -math.inf else math.nan for at, gain in gains.items()}
    return Soup(pot.mixed(chosen), tuple(candidates[at].trial for at in chosen), common, sign * best, singles)


@dataclass(frozen=True)
class _SoupMixer:
    """Mixes candidates and judges the mixtures. It holds one set of weights and their sum at a time."""

    candidates: Sequence[Candidate]
    functions: SoupFunctions

    @property
    def sign(self) -> float:
        return 1.0 if self.functions.direction == "max" else -1.0

    def gain(self, chosen: Sequence[int]) -> float:
        """The score of the mean of ``chosen``; higher is better, and a value that is not finite counts as -inf."""
        with torch.no_grad():
            value = float(self.functions.evaluate(self.mixed(chosen)))
        return self.sign * value if math.isfinite(value) else -math.inf

    def mixed(self, chosen: Sequence[int]) -> nn.Module:
        """A model with the mean weights, in evaluation mode. Raises ``UserError`` if the models differ in shape."""
        first = self.candidates[chosen[0]]
        model = built(self.functions.build, first.config, f"of trial {first.trial}")
        expected = tensors_of(model)
        total: dict[str, torch.Tensor] = {}
        for candidate in (self.candidates[at] for at in chosen):
            weights = weights_of(candidate)
            check_alike(expected, weights, f"of trial {candidate.trial}")
            for name, tensor in weights.items():
                if name not in total:
                    total[name] = tensor.double() if tensor.is_floating_point() else tensor
                elif tensor.is_floating_point():
                    total[name] += tensor
        averages = {
            n: (t / len(chosen) if t.is_floating_point() else t).to(expected[n].dtype) for n, t in total.items()
        }
        fill(model, averages, "mixed")
        if len(chosen) > 1 and has_batch_norm(model):
            if self.functions.estimate is None:
                rule = "statistics of BatchNorm are estimated anew for a mean of weights"
                raise UserError(rule, "no batches", "give batches=..., which gives inputs of training batches")
            self.functions.estimate(model)
        return model.eval()


# --- a soup judged by the program's own ``predict`` ---


@dataclass(frozen=True)
class SoupTest:
    """The scores of a soup on data that no choice rests on.

    Attributes:
        data: The name of the data set.
        rows: How many rows it has.
        soup: The score of the soup.
        best_single: The score of the trial that was best by itself on the data of the choice.
    """

    data: str
    rows: int
    soup: float
    best_single: float


@dataclass(frozen=True)
class StudySoup:
    """A soup of a study's trials, with the predictions of its choice and its test scores.

    Attributes:
        single: The trial that is best by itself on ``data``.
        test: Scores on test data; None if the program knows no such data.
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
        finite = {trial: score for trial, score in self.soup.singles.items() if not isnan(score)}
        return [SingleScore(trial, score, self.parameters) for trial, score in finite.items()]

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
            "singles": [{"trial": single.trial, "score": single.score} for single in self.singles],
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
        how: "greedy" (the best, then each that does no harm) or "uniform" (all).
        objective: "accuracy", "log_loss", "brier"; "mse", "rmse", "mae", "r2". None: accuracy or mse.
        data: The data set on which the choice rests.
        test: The data set that judges the soup; it is read after the choice.
        statistics: The data set from which BatchNorm statistics are estimated again, if the model has any.
        trials: The candidates; None: all trials that were kept.
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
    source = library(study)
    selected = source.selected(trials)
    with hooks_of(source, None if program is None else Path(program)) as hooks:
        first = hooks.known_predictions(hooks.model_of(selected[0]), data)
        score = score_for(objective, task_of(first["outputs"], first["targets"]).kind)

        def evaluate(model: nn.Module) -> float:
            try:
                return _scored(score, hooks.known_predictions(model, data))
            except Diverged:
                return float("nan")

        def estimate(model: nn.Module) -> None:
            with fresh_statistics(model):
                hooks.known_predictions(model, statistics)

        made = make_soup(source, SoupFunctions(hooks.made, evaluate, score.direction, estimate), how, trials)
        best = max if score.direction == "max" else min
        single = best((t for t, alone in made.singles.items() if not isnan(alone)), key=lambda t: made.singles[t])
        tested = hooks.predictions(made.model, test)
        test_scores = None
        if tested is not None:
            alone = hooks.known_predictions(
                hooks.model_of(next(candidate for candidate in selected if candidate.trial == single)), test
            )
            test_scores = SoupTest(test, len(tested["targets"]), _scored(score, tested), _scored(score, alone))
    return StudySoup(source.out, how, data, score.name, score.direction, made, single, test_scores)


def _scored(score: Score, predictions: dict[str, torch.Tensor]) -> float:
    seen = judged({0: predictions})
    return float(score.of(seen.outputs[0], seen.right))
