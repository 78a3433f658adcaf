"""Groups of classes, learnt from what the best kept trial of a study confuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elastune.core.errors import UserError
from elastune.reuse.candidates import ReadOnDemand, library
from elastune.reuse.class_tree import ClassTree, confusions, learnt_tree
from elastune.reuse.scores import score_for
from elastune.reuse.selection import best_single
from elastune.reuse.task import judged
from elastune.study.results.study import Study


@dataclass(frozen=True)
class LearntClasses:
    """A learnt tree of classes.

    Attributes:
        tree: The tree.
        trial: The trial whose predictions it was learnt from.
        data: The name of these predictions.
        between: The mean probability that a sample's group, one of the root's, is mistaken for another.
        within: The mean probability that its class is, inside of the right group.
    """

    tree: ClassTree
    trial: int
    data: str
    between: float
    within: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**vars(self), "tree": self.tree.to_json()}


def learn_classes(
    study: Study | str | Path, groups: int | Sequence[int], *, data: str = "validation", trial: int | None = None
) -> LearntClasses:
    """Group classes so that the classes which a trained model confuses are together.

    Args:
        study: A study with kept predictions of a classification.
        groups: The number of groups; several numbers, such as (2, 5), for a deeper tree: the groups on each level.
        data: The name of the predictions to read; no test data.
        trial: The trial to read; None: the most accurate one.

    Returns:
        The tree, and how much is confused between its groups and within them.

    Raises:
        UserError: Where there are no such predictions, or not so many classes.

    Example:
        >>> elastune.learn_classes("out", 3).tree.to_json()
    """
    known = library(study).having(data)
    if trial is not None:
        known = [one for one in known if one.trial == trial]
        if not known:
            raise UserError("a trial that is asked has kept predictions", f"trial {trial}", "leave --trial out")
    seen = judged(ReadOnDemand(known, lambda one: one.predictions(data)))
    if seen.task.kind != "classification":
        raise UserError("classes are learnt from a classification", seen.task.kind, "name its predictions: --data")
    best = best_single(seen, score_for("accuracy", seen.task.kind))
    said, right = seen.said[best], seen.right
    tree = learnt_tree(confusions(said, right), groups)
    group = tree.coarse(torch.arange(tree.classes)).numpy()
    in_group = float((said * (group[None] == group[right][:, None])).sum(1).mean())
    hit = float(said[np.arange(len(right)), right].mean())
    return LearntClasses(tree, known[best].trial, data, 1 - in_group, in_group - hit)
