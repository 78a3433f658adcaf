"""One model whose weights are the mean of several: it costs one model's inference.

Wortsman et al. 2022, "Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing
inference time". *uniform*: the mean of all. *greedy*: from the best on, each model that does not make it worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from elastune.core.errors import UserError
from elastune.job.output_dir import JOURNAL
from elastune.journal.atomic import atomic_write
from elastune.journal.reader import read
from elastune.reuse.batch_norm import estimate_batch_norm, has_batch_norm
from elastune.reuse.candidates import Candidate, Library, library
from elastune.reuse.lineage import ancestor
from elastune.reuse.weights import Build, built, check_alike, check_file, fill, tensors_of, weights_of
from elastune.study.results.study import Study

Evaluate = Callable[[nn.Module], float]
HOW = ("greedy", "uniform")


@dataclass(frozen=True)
class Soup:
    """A model whose weights are the mean of several.

    Attributes:
        model: The model with the mean weights, in evaluation mode.
        trials: The trials whose weights are in it, in the order in which they were added.
        ancestor: What all of them began with.
        score: The score of the model by ``evaluate``; the soup was chosen by it.
        singles: The score of each trial that was looked at, by itself; NaN where it was no finite number.
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
        direction: "max" or "min": the better way of the score.
        trials: The trials to look at; None: all that were kept.
        batches: Gives the inputs of training batches. Models with BatchNorm are refused without it: their running
            statistics are estimated again, because a mean of statistics is not that of the mean's activations.

    Returns:
        The soup. With "greedy" its score is no worse than that of the best trial by itself.

    Raises:
        UserError: Where the trials have no common ancestor, their models have different shapes, nothing was kept, or
            the soup's score is no finite number.

    Example:
        >>> found = elastune.soup("out", build, lambda model: accuracy(model, data.validation))
        >>> found.save("soup.safetensors")
    """
    if how not in HOW or direction not in ("max", "min"):
        raise UserError("a soup is greedy or uniform, its score max or min", f"{how}, {direction}", "how='greedy'")
    kitchen = Kitchen(
        build, evaluate, direction, None if batches is None else lambda m: estimate_batch_norm(m, batches())
    )
    return cooked(library(study), kitchen, how, trials)


@dataclass(frozen=True)
class Kitchen:
    """How models are made and judged.

    Attributes:
        build: ``build(config)`` makes a model.
        evaluate: ``evaluate(model)`` gives its score.
        direction: "max" or "min": the better way of the score.
        estimate: Estimates the BatchNorm statistics of a mixed model; None: models with such layers are refused.
    """

    build: Build
    evaluate: Evaluate
    direction: str
    estimate: Callable[[nn.Module], None] | None


def cooked(found: Library, kitchen: Kitchen, how: str, trials: Sequence[int] | None = None) -> Soup:
    """Do what ``soup`` does, for a study that was read already."""
    known = found.asked(trials)
    common = ancestor(found.table, read(found.out / JOURNAL), [one.trial for one in known])
    pot = _Pot(known, kitchen)
    gains = {at: pot.gain([at]) for at in range(len(known))}
    order = sorted(gains, key=lambda at: (-gains[at], at))
    chosen, best = (order, pot.gain(order)) if how == "uniform" else (order[:1], gains[order[0]])
    for at in order[1:] if how == "greedy" else ():
        if (gain := pot.gain([*chosen, at])) >= best:
            chosen, best = [*chosen, at], gain
    if best == -math.inf:
        what = "every trial's" if max(gains.values()) == -math.inf else "that of the mean of all"
        raise UserError("a soup's score is a finite number", f"{what} is not", "see evaluate, or choose other trials")
    sign = pot.sign
    singles = {known[at].trial: sign * gain if gain > -math.inf else math.nan for at, gain in gains.items()}
    return Soup(pot.mixed(chosen), tuple(known[at].trial for at in chosen), common, sign * best, singles)


@dataclass(frozen=True)
class _Pot:
    """Mixes candidates and judges the mixtures. One set of weights is read at a time, and a mean of them held."""

    candidates: Sequence[Candidate]
    kitchen: Kitchen

    @property
    def sign(self) -> float:
        return 1.0 if self.kitchen.direction == "max" else -1.0

    def gain(self, chosen: Sequence[int]) -> float:
        """How good the mean of ``chosen`` is; higher is better, and what is no finite number is worst."""
        with torch.no_grad():
            value = float(self.kitchen.evaluate(self.mixed(chosen)))
        return self.sign * value if math.isfinite(value) else -math.inf

    def mixed(self, chosen: Sequence[int]) -> nn.Module:
        """A model with the mean weights, in evaluation mode. Raises ``UserError`` where the models differ in shape."""
        first = self.candidates[chosen[0]]
        model = built(self.kitchen.build, first.config, f"of trial {first.trial}")
        own = tensors_of(model)
        total: dict[str, torch.Tensor] = {}
        for one in (self.candidates[at] for at in chosen):
            weights = weights_of(one)
            check_alike(own, weights, f"of trial {one.trial}")
            for name, tensor in weights.items():
                if name not in total:
                    total[name] = tensor.double() if tensor.is_floating_point() else tensor
                elif tensor.is_floating_point():
                    total[name] += tensor
        means = {n: (t / len(chosen) if t.is_floating_point() else t).to(own[n].dtype) for n, t in total.items()}
        fill(model, means, "mixed")
        if len(chosen) > 1 and has_batch_norm(model):
            if self.kitchen.estimate is None:
                rule = "statistics of BatchNorm are estimated anew for a mean of weights"
                raise UserError(rule, "no batches", "give batches=..., which gives inputs of training batches")
            self.kitchen.estimate(model)
        return model.eval()
