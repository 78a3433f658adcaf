"""Classes in groups: what is easily told apart first, what is easily confused by specialists.

A tree of two levels, given or learnt from what a trained model confuses (as in HD-CNN, Yan et al. 2015): a gate tells
the group, a part for each group tells the class within it, and P(class) = P(group) P(class | group).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.reuse.task import Array

MOST_CLASSES = 10_000
_RULE, _FIX = (
    "a tree of classes has each class from 0 on in one group, and two groups at least",
    "such as [[0, 2], [1]]",
)


@dataclass(frozen=True)
class ClassTree:
    """``groups``: the classes of each.

    Example:
        >>> tree = elastune.class_tree(session.config["tree"])      # [[0, 2], [1, 3]]
        >>> loss = F.cross_entropy(gate(x), tree.coarse(y))         # which group
        >>> rows = tree.rows(data.targets, group)                   # the samples of one group, for a Subset
        >>> loss = F.cross_entropy(part(x), tree.within(y))         # which class of its group
    """

    groups: tuple[tuple[int, ...], ...]

    @property
    def classes(self) -> int:
        return sum(map(len, self.groups))

    def coarse(self, targets: torch.Tensor) -> torch.Tensor:
        """The group of each class."""
        return self._table(lambda group, place: group).to(targets.device)[targets]

    def within(self, targets: torch.Tensor) -> torch.Tensor:
        """The place of each class in its group."""
        return self._table(lambda group, place: place).to(targets.device)[targets]

    def rows(self, targets: torch.Tensor, group: int) -> torch.Tensor:
        """Which samples are of the classes of ``group``."""
        return (self.coarse(targets) == group).nonzero().flatten()

    def joined(self, gate: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Probabilities of all classes: ``gate``'s of the groups (..., groups), and each part's of its own classes."""
        if gate.shape[-1] != len(self.groups) or [part.shape[-1] for part in parts] != list(map(len, self.groups)):
            shapes = f"{gate.shape[-1]} and {[part.shape[-1] for part in parts]}"
            raise UserError("a gate tells groups, and each part its own classes", shapes, f"for {self.to_json()}"[:200])
        there = [gate[..., at : at + 1] * part for at, part in enumerate(parts)]
        order = torch.tensor([c for group in self.groups for c in group], device=gate.device).argsort()
        return torch.cat(there, -1)[..., order]

    def to_json(self) -> list[list[int]]:
        """As plain data: for a program's config."""
        return [list(group) for group in self.groups]

    def _table(self, of: Any) -> torch.Tensor:
        found = torch.empty(self.classes, dtype=torch.int64)
        for group, classes in enumerate(self.groups):
            for place, one in enumerate(classes):
                found[one] = of(group, place)
        return found


def class_tree(groups: Sequence[Sequence[int]]) -> ClassTree:
    """The tree that is given as plain data. Raises ``UserError`` for what is none."""
    lists = isinstance(groups, Sequence) and all(isinstance(g, Sequence) and not isinstance(g, str) for g in groups)
    flat = [one for group in groups for one in group] if lists else []
    if not lists or any(isinstance(one, bool) or not isinstance(one, int) for one in flat) or len(flat) > MOST_CLASSES:
        raise UserError(_RULE, repr(groups)[:80], _FIX)
    if len(groups) < 2 or not all(groups) or sorted(flat) != list(range(len(flat))):
        raise UserError(_RULE, repr(groups)[:80], _FIX)
    return ClassTree(tuple(tuple(group) for group in groups))


def confusions(said: Array, right: NDArray[Any]) -> Array:
    """The mean probability of each class (columns) for the samples of each (rows); 0 for a class without samples."""
    classes = said.shape[-1]
    found = np.zeros((classes, classes))
    np.add.at(found, right.astype(int), said)
    counts = np.bincount(right.astype(int), minlength=classes)
    return found / np.maximum(counts, 1)[:, None]


def learnt_tree(confused: Array, groups: int) -> ClassTree:
    """Classes that are confused most come together: average linkage, cut into ``groups``. Raises ``UserError``."""
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    classes = len(confused)
    if isinstance(groups, bool) or not isinstance(groups, int) or not 2 <= groups < classes:
        raise UserError("a tree has from two groups to one fewer than classes", groups, f"there are {classes} classes")
    alike = (confused + confused.T) / 2
    apart = np.maximum(1 - alike, 0.0)
    np.fill_diagonal(apart, 0.0)
    labels = cut_tree(linkage(squareform(apart, checks=False), "average"), n_clusters=groups).flatten()
    found: dict[int, list[int]] = {}
    for one, label in enumerate(labels.tolist()):
        found.setdefault(label, []).append(one)
    return class_tree(list(found.values()))
