"""What trials are worth against a new one, by how far they were let and by their place on the front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from elastune.search.front import nondominated

ETA = 3
SAME = 1e-9
LAYERS = 8  # fronts behind the first that are told apart


def standing(points: Mapping[int, Sequence[float]], epochs: Mapping[int, int]) -> dict[int, float]:
    """Trial -> worth, a new one's being 1: 1 + completed epochs over the number of its front.

    Early stopping lets a trial on to epoch e as the best of some e others (successive halving's rungs, Li et al., "A
    System for Massively Parallel Hyperparameter Tuning", MLSys 2020), which is what its samples are worth more than a
    new one's. Of equals, who would end on the first of the non-dominated fronts (Deb et al., NSGA-II, 2002) deserves
    more than who would on the second. ``points``: what each trial ends with or is expected to, smaller is better;
    those of ``epochs`` are told, others (the finished) only compete.
    """
    trials = list(points)
    if not trials:
        return {trial: 1.0 + done for trial, done in epochs.items()}
    values = np.array([points[trial] for trial in trials], dtype=float)
    layer = np.full(len(trials), LAYERS)
    left = np.arange(len(trials))
    for number in range(1, LAYERS):
        first = nondominated(values[left])
        layer[left[first]] = number
        left = left[~first]
        if not len(left):
            break
    place = dict(zip(trials, layer.tolist(), strict=True))
    return {trial: 1.0 + _power(done) / place.get(trial, 1) for trial, done in epochs.items()}


def _power(epochs: int) -> int:
    """The largest power of ``ETA`` that is not more: worth goes in steps, so that it moves nobody at every report."""
    return 0 if epochs < 1 else ETA ** int(math.log(epochs, ETA) + SAME)
