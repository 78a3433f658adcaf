"""Classes in groups: one model distinguishes the groups, and a specialist for each group distinguishes its classes.

A tree has any depth. It is given, or learnt from what a trained model confuses (as in HD-CNN, Yan et al. 2015).
Each inner node has a model of its own, which distinguishes its groups, or the classes of the last group.
The probability of a class is the product along its path: P(class) = P(group) P(class | group).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.tuning.reuse.predictions import Array

MOST_CLASSES = 10_000
DEEPEST = 50
_RULE, _FIX = (
    "a tree of classes has each class from 0 on in one group, and two groups at least",
    "such as [[0, 2], [1]], or [[[0, 2], [1]], [[3, 4], [5]]]",
)
ROOT = ""


@dataclass(frozen=True)
class ClassTree:
    """A tree of classes.

    A node is named by its path: "" is the root, whose model gives the group; "1" is group 1; "1.0" is its first part.

    Attributes:
        groups: The classes of each group.
        below: For each group, the tree that divides it further; None if it is not divided.

    Example:
        >>> tree = elastune.class_tree(session.config["tree"])      # [[0, 2], [1, 3]]
        >>> loss = F.cross_entropy(gate(x), tree.coarse(y))         # which group
        >>> rows = tree.rows(data.targets, group)                   # the samples of one group, for a Subset
        >>> loss = F.cross_entropy(part(x), tree.within(y))         # which class of its group
        >>> loss = F.cross_entropy(model(x), tree.labels(y, "1.0"))  # the labels of a deeper node
    """

    groups: tuple[tuple[int, ...], ...]
    below: tuple[ClassTree | None, ...]

    @property
    def classes(self) -> int:
        """The number of classes."""
        return sum(map(len, self.groups))

    def nodes(self) -> list[str]:
        """Return the names of all nodes that have a model, level by level. A group of one class has none."""
        return [name for level in self.levels() for name in level]

    def levels(self) -> list[list[str]]:
        """Return the same names, in one list for each distance from the root."""
        named = list(self._named())
        deepest = max(_depth(name) for name, _ in named)
        return [[name for name, _ in named if _depth(name) == depth] for depth in range(deepest + 1)]

    def outputs(self, node: str | int) -> int:
        """Return how many numbers the model of ``node`` gives."""
        return len(self._sides(node))

    def labels(self, targets: torch.Tensor, node: str | int) -> torch.Tensor:
        """Return the label that the model of ``node`` must give for each class: one of its groups or classes.

        Classes that are not below the node get -1.
        """
        return self._look_up(targets, {label: at for at, side in enumerate(self._sides(node)) for label in side})

    def coarse(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the group of each class in ``targets``."""
        return self.labels(targets, ROOT)

    def within(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the place of each class within its group, or the part of the group that holds it."""
        names = range(len(self.groups))
        places = [{label: at for at, side in enumerate(self._sides(name)) for label in side} for name in names]
        return self._look_up(targets, {label: at for each in places for label, at in each.items()})

    def rows(self, targets: torch.Tensor, node: str | int) -> torch.Tensor:
        """Return the indices of samples whose class is below ``node``, such as a group's number."""
        inside = self._look_up(targets, {label: 1 for side in self._sides(node) for label in side})
        return (inside == 1).nonzero().flatten()

    def joined(self, gate: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return probabilities of all classes, from those of the groups and those within each group.

        Args:
            gate: Probabilities of the groups, of shape (..., groups).
            parts: For each group, probabilities of its own classes.
        """
        widths = [self.outputs(group) for group in range(len(self.groups))]
        if gate.shape[-1] != len(self.groups) or [part.shape[-1] for part in parts] != widths:
            shapes = f"{gate.shape[-1]} and {[part.shape[-1] for part in parts]}"
            raise UserError("a gate gives groups, and each part its own classes", shapes, f"for {self.to_json()}"[:200])
        return self.chained({ROOT: gate, **{str(at): part for at, part in enumerate(parts)}})

    def chained(self, probabilities: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return probabilities of all classes of a tree of any depth.

        Args:
            probabilities: The probabilities that the models of ``nodes`` give, by the name of the node.

        Raises:
            UserError: If a node is missing, or has another number of probabilities.
        """
        for name in self.nodes():
            if name not in probabilities or probabilities[name].shape[-1] != self.outputs(name):
                shape = "none" if name not in probabilities else str(probabilities[name].shape[-1])
                raise UserError(f"the model of {node_text(name)} gives {self.outputs(name)} numbers", shape, "train it")
        whole = torch.ones_like(probabilities[ROOT][..., :1])
        leaves = list(self._leaves(probabilities, ROOT, whole))
        order = torch.tensor([label for label, _ in leaves], device=whole.device).argsort()
        return torch.cat([probability for _, probability in leaves], -1)[..., order]

    def to_json(self) -> list[Any]:
        """Return the tree as plain data, for a program's config."""
        pairs = zip(self.groups, self.below, strict=True)
        return [list(group) if below is None else below.to_json() for group, below in pairs]

    def _named(self, name: str = ROOT) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
        """Each node with the groups of classes between which its model decides."""
        yield name, self.groups
        for at, (group, below) in enumerate(zip(self.groups, self.below, strict=True)):
            child = f"{name}.{at}" if name else str(at)
            if below is not None:
                yield from below._named(child)
            elif len(group) > 1:
                yield child, tuple((label,) for label in group)

    def _sides(self, node: str | int) -> tuple[tuple[int, ...], ...]:
        subtree: ClassTree | None = self
        group: tuple[int, ...] = ()
        for step in [] if node == ROOT else str(node).split("."):
            if subtree is None or not step.isdecimal() or int(step) >= len(subtree.groups):
                names = ", ".join(name for name in self.nodes() if name)
                raise UserError("a node of a tree of classes is one that it has", repr(node)[:40], f"use {names}"[:200])
            group, subtree = subtree.groups[int(step)], subtree.below[int(step)]
        return tuple((label,) for label in group) if subtree is None else subtree.groups

    def _leaves(
        self, probabilities: Mapping[str, torch.Tensor], name: str, before: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Each class with its probability (..., 1). ``before``: the probability of node ``name``."""
        for at, (group, below) in enumerate(zip(self.groups, self.below, strict=True)):
            child, reached = f"{name}.{at}" if name else str(at), before * probabilities[name][..., at : at + 1]
            if below is not None:
                yield from below._leaves(probabilities, child, reached)
                continue
            for place, label in enumerate(group):
                yield label, reached * probabilities[child][..., place : place + 1] if len(group) > 1 else reached

    def _look_up(self, targets: torch.Tensor, places: Mapping[int, int]) -> torch.Tensor:
        table = torch.full((self.classes,), -1)
        for label, place in places.items():
            table[label] = place
        return table.to(targets.device)[targets]


def node_text(node: str) -> str:
    """Return the node in words, for messages."""
    return f"group {node}" if node else "the gate"


def _depth(node: str) -> int:
    return node.count(".") + 1 if node else 0


def class_tree(groups: Sequence[Any]) -> ClassTree:
    """Build the tree that plain data describe.

    Args:
        groups: Lists of lists of classes, such as ``[[0, 2], [1, 3]]``.

    Raises:
        UserError: If ``groups`` is no tree.
    """
    tree = _tree(groups, 0)
    flat = sorted(label for group in tree.groups for label in group) if tree is not None else []
    if tree is None or len(flat) > MOST_CLASSES or flat != list(range(len(flat))):
        raise UserError(_RULE, repr(groups)[:80], _FIX)
    return tree


def _tree(groups: Any, depth: int) -> ClassTree | None:
    """The tree that ``groups`` describe, or None if they describe none. The classes are not checked."""
    if not isinstance(groups, list | tuple) or len(groups) < 2 or depth > DEEPEST:
        return None
    classes: list[tuple[int, ...]] = []
    below: list[ClassTree | None] = []
    for group in groups:
        if not isinstance(group, list | tuple) or not group:
            return None
        if all(isinstance(label, int) and not isinstance(label, bool) for label in group):
            classes.append(tuple(group))
            below.append(None)
        elif (subtree := _tree(group, depth + 1)) is not None:
            classes.append(tuple(label for side in subtree.groups for label in side))
            below.append(subtree)
        else:
            return None
    return ClassTree(tuple(classes), tuple(below))


def confusions(probabilities: Array, right: NDArray[Any]) -> Array:
    """Return the mean probability of each class (columns) for the samples of each class (rows).

    A class without samples has 0.
    """
    classes = probabilities.shape[-1]
    confused = np.zeros((classes, classes))
    np.add.at(confused, right.astype(int), probabilities)
    counts = np.bincount(right.astype(int), minlength=classes)
    return confused / np.maximum(counts, 1)[:, None]


def learnt_tree(confused: Array, groups: int | Sequence[int]) -> ClassTree:
    """Return a tree in which the classes that are confused most are together (average linkage).

    Args:
        confused: How often each class is taken for each other class.
        groups: How many groups to cut the linkage into. Of several ascending numbers, the next one divides the groups
            of each cut, so the tree is one level deeper.

    Raises:
        UserError: For impossible numbers of groups.
    """
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    classes = len(confused)
    cuts = [groups] if isinstance(groups, int | str) else list(groups)
    whole = all(isinstance(cut, int) and not isinstance(cut, bool) for cut in cuts)
    if not cuts or not whole or cuts[0] < 2 or cuts[-1] >= classes or sorted(set(cuts)) != cuts:
        rule = "a tree has from two groups to one fewer than classes, on each level more than on the one above"
        raise UserError(rule, groups, f"there are {classes} classes")
    alike = (confused + confused.T) / 2
    apart = np.maximum(1 - alike, 0.0)
    np.fill_diagonal(apart, 0.0)
    labels = cut_tree(linkage(squareform(apart, checks=False), "average"), n_clusters=cuts)
    return class_tree(_divided(list(range(classes)), labels.T.tolist()))


def _divided(classes: list[int], cuts: Sequence[Sequence[int]]) -> list[Any]:
    """``classes`` divided by the first of ``cuts`` that divides them, and each group by the cuts after it."""
    for at, labels in enumerate(cuts):
        sides: dict[int, list[int]] = {}
        for label in classes:
            sides.setdefault(labels[label], []).append(label)
        if len(sides) > 1:
            return [_divided(side, cuts[at + 1 :]) for side in sides.values()]
    return classes
