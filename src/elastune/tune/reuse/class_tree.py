"""Classes in groups: one model tells the groups apart, and a specialist for each group tells its classes apart.

A tree has any depth. It is given, or learnt from what a trained model confuses (as in HD-CNN, Yan et al. 2015).
Each inner node has a model of its own, which tells its groups apart, or the classes of the last group.
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
from elastune.tune.reuse.predictions import Array

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

    A node is named by the way to it: "" is the root, whose model tells the group; "1" is group 1; "1.0" is its first
    part.

    Attributes:
        groups: The classes of each group.
        below: For each group, how it is divided further; None where it is not.

    Example:
        >>> tree = elastune.class_tree(session.config["tree"])      # [[0, 2], [1, 3]]
        >>> loss = F.cross_entropy(gate(x), tree.coarse(y))         # which group
        >>> rows = tree.rows(data.targets, group)                   # the samples of one group, for a Subset
        >>> loss = F.cross_entropy(part(x), tree.within(y))         # which class of its group
        >>> loss = F.cross_entropy(model(x), tree.labels(y, "1.0"))  # what the model of a deeper node tells
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
        """Return what the model of ``node`` must tell for each class: which of its groups or classes.

        Classes that are not below the node get -1.
        """
        return self._look_up(targets, {one: at for at, side in enumerate(self._sides(node)) for one in side})

    def coarse(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the group of each class in ``targets``."""
        return self.labels(targets, ROOT)

    def within(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the place of each class in its group, or the part of the group that it is in."""
        names = range(len(self.groups))
        places = [{one: at for at, side in enumerate(self._sides(name)) for one in side} for name in names]
        return self._look_up(targets, {one: at for each in places for one, at in each.items()})

    def rows(self, targets: torch.Tensor, node: str | int) -> torch.Tensor:
        """Return which samples have a class of ``node``, such as a group's number."""
        inside = self._look_up(targets, {one: 1 for side in self._sides(node) for one in side})
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
            raise UserError("a gate tells groups, and each part its own classes", shapes, f"for {self.to_json()}"[:200])
        return self.chained({ROOT: gate, **{str(at): part for at, part in enumerate(parts)}})

    def chained(self, said: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return probabilities of all classes of a tree of any depth.

        Args:
            said: The probabilities that the models of ``nodes`` give, by name.

        Raises:
            UserError: Where a node is missing, or has another number of probabilities.
        """
        for name in self.nodes():
            if name not in said or said[name].shape[-1] != self.outputs(name):
                shape = "none" if name not in said else str(said[name].shape[-1])
                raise UserError(f"the model of {told(name)} tells {self.outputs(name)} numbers", shape, "train it")
        whole = torch.ones_like(said[ROOT][..., :1])
        there = list(self._leaves(said, ROOT, whole))
        order = torch.tensor([one for one, _ in there], device=whole.device).argsort()
        return torch.cat([probability for _, probability in there], -1)[..., order]

    def to_json(self) -> list[Any]:
        """Return the tree as plain data, for a program's config."""
        pairs = zip(self.groups, self.below, strict=True)
        return [list(group) if below is None else below.to_json() for group, below in pairs]

    def _named(self, name: str = ROOT) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
        """Each node, and what it tells apart."""
        yield name, self.groups
        for at, (group, below) in enumerate(zip(self.groups, self.below, strict=True)):
            own = f"{name}.{at}" if name else str(at)
            if below is not None:
                yield from below._named(own)
            elif len(group) > 1:
                yield own, tuple((one,) for one in group)

    def _sides(self, node: str | int) -> tuple[tuple[int, ...], ...]:
        here: ClassTree | None = self
        group: tuple[int, ...] = ()
        for step in [] if node == ROOT else str(node).split("."):
            if here is None or not step.isdecimal() or int(step) >= len(here.groups):
                known = ", ".join(name for name in self.nodes() if name)
                raise UserError("a node of a tree of classes is one that it has", repr(node)[:40], f"use {known}"[:200])
            group, here = here.groups[int(step)], here.below[int(step)]
        return tuple((one,) for one in group) if here is None else here.groups

    def _leaves(
        self, said: Mapping[str, torch.Tensor], name: str, before: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Each class and its probability (..., 1). ``before``: that of being here."""
        for at, (group, below) in enumerate(zip(self.groups, self.below, strict=True)):
            own, here = f"{name}.{at}" if name else str(at), before * said[name][..., at : at + 1]
            if below is not None:
                yield from below._leaves(said, own, here)
                continue
            for place, one in enumerate(group):
                yield one, here * said[own][..., place : place + 1] if len(group) > 1 else here

    def _look_up(self, targets: torch.Tensor, places: Mapping[int, int]) -> torch.Tensor:
        table = torch.full((self.classes,), -1)
        for one, place in places.items():
            table[one] = place
        return table.to(targets.device)[targets]


def told(node: str) -> str:
    """Return the name of a node in words."""
    return f"group {node}" if node else "the gate"


def _depth(node: str) -> int:
    return node.count(".") + 1 if node else 0


def class_tree(groups: Sequence[Any]) -> ClassTree:
    """Return the tree that plain data describe.

    Args:
        groups: Lists of lists of classes, such as ``[[0, 2], [1, 3]]``.

    Raises:
        UserError: For anything that is no tree.
    """
    found = _tree(groups, 0)
    flat = sorted(one for group in found.groups for one in group) if found is not None else []
    if found is None or len(flat) > MOST_CLASSES or flat != list(range(len(flat))):
        raise UserError(_RULE, repr(groups)[:80], _FIX)
    return found


def _tree(groups: Any, depth: int) -> ClassTree | None:
    """None: it is none. Whether each class is there once is not looked at."""
    if not isinstance(groups, list | tuple) or len(groups) < 2 or depth > DEEPEST:
        return None
    classes: list[tuple[int, ...]] = []
    below: list[ClassTree | None] = []
    for group in groups:
        if not isinstance(group, list | tuple) or not group:
            return None
        if all(isinstance(one, int) and not isinstance(one, bool) for one in group):
            classes.append(tuple(group))
            below.append(None)
        elif (found := _tree(group, depth + 1)) is not None:
            classes.append(tuple(one for side in found.groups for one in side))
            below.append(found)
        else:
            return None
    return ClassTree(tuple(classes), tuple(below))


def confusions(said: Array, right: NDArray[Any]) -> Array:
    """Return the mean probability of each class (columns) for the samples of each class (rows).

    A class without samples has 0.
    """
    classes = said.shape[-1]
    found = np.zeros((classes, classes))
    np.add.at(found, right.astype(int), said)
    counts = np.bincount(right.astype(int), minlength=classes)
    return found / np.maximum(counts, 1)[:, None]


def learnt_tree(confused: Array, groups: int | Sequence[int]) -> ClassTree:
    """Return a tree in which the classes that are confused most are together (average linkage).

    Args:
        confused: How much each class is taken for each other.
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
    """``classes`` in the groups of the first of ``cuts`` that divides them, each of these in those of the next one."""
    for at, labels in enumerate(cuts):
        sides: dict[int, list[int]] = {}
        for one in classes:
            sides.setdefault(labels[one], []).append(one)
        if len(sides) > 1:
            return [_divided(side, cuts[at + 1 :]) for side in sides.values()]
    return classes
