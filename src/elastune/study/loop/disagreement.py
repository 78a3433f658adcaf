"""By how much two kept trials' predictions differ: what ensembles live on, and a retention rule can go by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.journal.records import ArtifactKept
from elastune.train.predictions import HELD_OUT, file_of, read_predictions

ROWS = 10_000  # of one data set that are compared: an even sample of more


class Disagreements:
    """Of trials whose predictions lie in the ``folder`` of each, as their artifacts tell. A file is read once.

    Test data are left out: what stays is a choice, too.
    """

    def __init__(self, folder: Callable[[int], Path]) -> None:
        self._folder = folder
        self._read: dict[tuple[int, str], NDArray[Any] | None] = {}

    def between(self, one: ArtifactKept, other: ArtifactKept) -> float | None:
        """The share of samples of which they name other classes, or the mean distance of values in standard
        deviations of what is right; None where they have no predictions of the same data."""
        for name in sorted(set(one.predictions) & set(other.predictions)):
            parts = [self._said(kept, name) for kept in (one, other)]
            if parts[0] is not None and parts[1] is not None and parts[0].shape == parts[1].shape:
                return apart(parts[0], parts[1])
        return None

    def forget(self, there: Mapping[int, ArtifactKept]) -> None:
        """All but what is ``there``: memory is for what is kept."""
        known = {(kept.trial, digest) for kept in there.values() for digest in kept.predictions.values()}
        self._read = {key: said for key, said in self._read.items() if key in known}

    def _said(self, kept: ArtifactKept, name: str) -> NDArray[Any] | None:
        if name.startswith(HELD_OUT):
            return None
        key = kept.trial, kept.predictions[name]
        if key not in self._read:
            try:
                found = read_predictions(file_of(self._folder(kept.trial), name), key[1])
            except UserError:  # damaged since: it is told where they are used, and no reason to end a study
                self._read[key] = None
            else:
                self._read[key] = _comparable(found["outputs"], found["targets"])
        return self._read[key]


def apart(one: NDArray[Any], other: NDArray[Any]) -> float:
    """How much two differ: classes, integers, or values."""
    return float((one != other).mean() if one.dtype.kind == "i" else np.abs(one - other).mean())


def _comparable(outputs: torch.Tensor, targets: torch.Tensor) -> NDArray[Any]:
    """An even sample: classes, or values over the standard deviation of what is right in their column."""
    few = outputs[:: max(1, -(-len(outputs) // ROWS))]
    if not targets.is_floating_point():
        return np.asarray(few.argmax(-1).numpy())
    spread = targets.double().reshape(len(targets), -1).std(0, correction=0)
    values = few.double().reshape(len(few), -1) / torch.where(spread > 0, spread, 1)
    return np.asarray(values.numpy())
