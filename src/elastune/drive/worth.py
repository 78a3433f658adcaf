"""What trials are worth against a new one, by how far they were let and by their place on the front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from elastune.search.front import nondominated

ETA = 3
RUNGS = (1 / 9, 1 / 3)  # where early stopping compares, if it is not told otherwise
SAME = 1e-9
LAYERS = 8  # fronts behind the first that are told apart


def standing(points: Mapping[int, Sequence[float]], done: Mapping[int, float]) -> dict[int, float]:
    """Trial -> worth, a new one's being 1: 1 + eta^(rungs passed) over the number of its front, once it has passed one.

    Who is past k rungs of successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning",
    MLSys 2020) is the best of some eta^k others, which is what its samples are worth more than a new one's; before
    the first nobody was chosen for anything. Of equals, who would end on the first of the non-dominated fronts (Deb et
    al., NSGA-II, 2002) deserves more than who would on the second. ``points``: what each trial ends with or is expected
    to, smaller is better; those of ``done`` are told (the part of its training that is over), others (the finished)
    only compete.
    """
    trials = list(points)
    if not trials:
        return {trial: 1.0 + _chosen(part) for trial, part in done.items()}
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
    return {trial: 1.0 + _chosen(part) / place.get(trial, 1) for trial, part in done.items()}


def _chosen(part: float) -> int:
    """Of how many a trial is the best, after ``part`` of its training; 0 before anybody was compared.

    It goes in steps, so that it moves nobody at every report.
    """
    passed = sum(part >= rung - SAME for rung in RUNGS)
    return ETA**passed if passed else 0
