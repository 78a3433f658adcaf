"""A gate and its parts, trained separately, as one model for a tree of classes of any depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.reuse.candidates import Candidate, Library, library
from elastune.reuse.class_tree import ROOT, ClassTree, class_tree, told
from elastune.reuse.weights import Build, built, fill, weights_of
from elastune.search.space.objective import oriented
from elastune.study.results.eligible import GROUP, NODE, TREE
from elastune.study.results.study import Study


@dataclass(frozen=True)
class MadeOf:
    """A trial of ``study`` that is a part of a model, and its settings."""

    study: Path
    trial: int
    config: dict[str, Any]


class JoinedModel(nn.Module):
    """A model that gives probabilities of all classes: for each, the product of what the models along its way say.

    All of its models give logits.

    Attributes:
        models: By the names of the tree's nodes, with "gate" for the root and "_" for each ".".
        tree: The groups of classes.
        made_of: The trial of each node, in the order of the tree's nodes; empty where it is not known.
    """

    def __init__(self, models: Mapping[str, nn.Module], tree: ClassTree, made_of: Sequence[MadeOf] = ()) -> None:
        super().__init__()
        self.models = nn.ModuleDict({key_of(name): models[name] for name in tree.nodes()})
        self.tree, self.made_of = tree, tuple(made_of)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return probabilities of classes, of shape (..., classes)."""
        said = {name: self.models[key_of(name)](*inputs).softmax(-1) for name in self.tree.nodes()}
        return self.tree.chained(said)


def key_of(node: str) -> str:
    """Return the name of a node as that of a module."""
    return node.replace(".", "_") or "gate"


def join(
    gate: Study | str | Path, parts: Study | str | Path | Sequence[Study | str | Path], build: Build, tree: ClassTree
) -> JoinedModel:
    """Return one model of the best kept trial of the study ``gate`` and, for each group, the best one of ``parts``.

    Args:
        gate: A study whose models tell the group. For ``train_tree``, its one study, given as ``parts``, too.
        parts: A study whose trials have the number of their group in their settings, as ``group``, or the name of their
            node, as ``node``; several studies for a deeper tree. Its models tell the class, or the group, within that.
            Trials whose settings have another ``tree``, by which they tell other classes there, are left out.
        build: Makes the program's model from the settings of a trial.
        tree: The groups. A group of a single class needs no part.

    Returns:
        A module that gives probabilities of all classes, in evaluation mode.

    Raises:
        UserError: Where a group has no kept trial, or ``build`` makes other models.

    Example:
        >>> model = elastune.join("gate", "parts", build, elastune.class_tree([[0, 2], [1, 3]]))
    """
    first = library(gate)
    rest = [library(one) for one in ([parts] if isinstance(parts, Study | str | Path) else parts)]
    gates = [one for one in first.candidates if one.config.get(NODE, ROOT) == ROOT]
    roots = [(first, one) for one in gates if _tells_alike(one, ROOT, tree)]
    chosen = [best_kept(roots, told(ROOT), first)]
    for node in tree.nodes()[1:]:
        of_it = [(found, one) for found in rest for one in found.candidates if _is_of(one, node)]
        own = [(found, one) for found, one in of_it if _tells_alike(one, node, tree)]
        chosen.append(best_kept(own, told(node), rest[-1] if rest else first))
    models = {node: model_of(one, build) for node, (_, one) in zip(tree.nodes(), chosen, strict=True)}
    return JoinedModel(models, tree, [MadeOf(found.out, one.trial, one.config) for found, one in chosen]).eval()


def _is_of(one: Candidate, node: str) -> bool:
    return one.config.get(NODE) == node or (node.isdecimal() and one.config.get(GROUP) == int(node))


def _tells_alike(one: Candidate, node: str, tree: ClassTree) -> bool:
    """Whether its model tells what that of ``node`` is to, if its settings have the tree that it was trained by."""
    try:
        own = class_tree(one.config.get(TREE, ()))
    except UserError:
        return True  # it has none, or one of another meaning
    every = torch.arange(tree.classes)
    try:
        return own.classes == tree.classes and torch.equal(own.labels(every, node), tree.labels(every, node))
    except UserError:
        return False  # no such node there


def best_kept(known: Sequence[tuple[Library, Candidate]], what: str, where: Library) -> tuple[Library, Candidate]:
    """Return the best kept trial, by the studies' objectives in their order.

    Raises:
        UserError: Where ``where`` has none for ``what``.
    """
    ranked = []
    for found, one in known:
        values = {trial.number: trial.values for trial in found.study.complete}
        if one.trial in values:
            ranked.append((tuple(oriented(values[one.trial], found.study.objectives)), (found, one)))
    if not ranked:
        rule, fix = (
            "a joined model has a kept trial for the gate and for each group",
            "tune with --keep all, by the same tree",
        )
        raise UserError(rule, f"none for {what} in {where.out}", fix)
    return min(ranked, key=lambda pair: pair[0])[1]


def model_of(one: Candidate, build: Build) -> nn.Module:
    """Return the model that a trial has left. Raises ``UserError`` where ``build`` makes another."""
    model = built(build, one.config, f"of trial {one.trial}")
    fill(model, weights_of(one), f"of trial {one.trial}")
    return model
