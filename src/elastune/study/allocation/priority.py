"""What trials are worth against a new one, by how far they were let and by their place on the front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from elastune.search.analysis.front import nondominated
from elastune.search.stopping.rungs import levels

ETA = 3
LAYERS = 8  # fronts after the first that are told apart


def rungs_passed(epoch: int, epochs: int) -> int:
    """The rungs of default halving that a trial has passed after ``epoch`` of ``epochs``."""
    return sum(rung <= epoch for rung in levels(max(1, round(epochs / ETA**2)), ETA, epochs))


def trial_priority(points: Mapping[int, Sequence[float]], rungs: Mapping[int, int]) -> dict[int, float]:
    """Trial -> worth, a new one's being 1: 1 + eta^(rungs passed) over the number of its front, once it has passed one.

    Who is past k rungs of successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning",
    MLSys 2020) is the best of some eta^k others, which is what its samples are worth more than a new one's; before
    the first nobody was chosen for anything. Of equals, who would end on the first of the non-dominated fronts (Deb et
    al., NSGA-II, 2002) deserves more than who would on the second. ``points``: what each trial ends with or is expected
    to, smaller is better; those of ``rungs`` (rungs passed) are told, others (the finished) only compete.
    """
    trials = list(points)
    if not trials:
        return {trial: 1.0 + _chosen(passed) for trial, passed in rungs.items()}
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
    return {trial: 1.0 + _chosen(passed) / place.get(trial, 1) for trial, passed in rungs.items()}


def _chosen(passed: int) -> int:
    """Of how many a trial is the best, having passed so many rungs; 0 before anybody was compared."""
    return ETA**passed if passed else 0
