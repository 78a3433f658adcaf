"""The digits as rows of 64 numbers, for programs whose networks see no pictures."""

from __future__ import annotations

from torch.utils.data import TensorDataset

from elastune.recipes.datasets import digits


def digit_rows(count: int, unseen: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """The first ``count`` to train on, and ``unseen`` others (None: all) to evaluate."""
    found = digits()
    (images, labels), (others, names) = found.train[:count], found.validation[:unseen]
    return TensorDataset(images.flatten(1), labels), TensorDataset(others.flatten(1), names)
