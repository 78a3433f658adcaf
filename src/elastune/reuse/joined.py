"""A gate and its parts, trained apart, as one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.reuse.candidates import Candidate, Library, library
from elastune.reuse.class_tree import ClassTree
from elastune.reuse.weights import fill, weights_of
from elastune.search.space.objective import oriented
from elastune.study.results.study import Study

Build = Callable[[dict[str, Any]], nn.Module]
GROUP = "group"


class JoinedModel(nn.Module):
    """Probabilities of all classes: the gate's of the groups times each part's of its own classes; all give logits."""

    def __init__(self, gate: nn.Module, parts: Sequence[nn.Module], tree: ClassTree) -> None:
        super().__init__()
        self.gate, self.parts, self.tree = gate, nn.ModuleList(parts), tree

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Probabilities of classes."""
        return self.tree.joined(self.gate(*inputs).softmax(-1), [part(*inputs).softmax(-1) for part in self.parts])


def join(gate: Study | str | Path, parts: Study | str | Path, build: Build, tree: ClassTree) -> JoinedModel:
    """The best kept trial of the study ``gate``, and for each group the best one of ``parts``, as one model.

    Args:
        gate: A study whose models tell the group.
        parts: A study whose trials have the number of their group in their settings, as ``group``; models tell the
            class within it.
        build: Makes the program's model of a trial's settings.
        tree: The groups.

    Returns:
        A module that gives probabilities of all classes, in evaluation mode.

    Raises:
        UserError: Where a group has no kept trial, or ``build`` makes other models.

    Example:
        >>> model = elastune.join("gate", "parts", build, elastune.class_tree([[0, 2], [1, 3]]))
    """
    first, rest = library(gate), library(parts)
    chosen = [_best(first, list(first.candidates), "the gate")]
    for group in range(len(tree.groups)):
        own = [one for one in rest.candidates if one.config.get(GROUP) == group]
        chosen.append(_best(rest, own, f"group {group}"))
    models = [model_of(one, build) for one in chosen]
    return JoinedModel(models[0], models[1:], tree).eval()


def _best(found: Library, candidates: Sequence[Candidate], what: str) -> Candidate:
    """By the study's objectives in their order."""
    values = {trial.number: trial.values for trial in found.study.complete}
    known = [one for one in candidates if one.trial in values]
    if not known:
        rule, fix = "a joined model has a kept trial for the gate and for each group", "tune with --keep all"
        raise UserError(rule, f"none for {what} in {found.out}", fix)
    return min(known, key=lambda one: tuple(oriented(values[one.trial], found.study.objectives)))


def model_of(one: Candidate, build: Build) -> nn.Module:
    """The model that a trial has left. Raises ``UserError`` where ``build`` makes another."""
    model = build(dict(one.config))
    if not isinstance(model, nn.Module):
        raise UserError("build(config) gives a torch.nn.Module", type(model).__name__, "return the model")
    fill(model, weights_of(one), f"of trial {one.trial}")
    return model
