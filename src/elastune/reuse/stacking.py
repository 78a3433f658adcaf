"""Weights of members, none negative and adding up to 1, that make the loss of the mean smallest.

For probabilities that is the log loss of the mixture, for values the squared error. Both are convex, so there is one
best loss, whatever the start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastune.reuse.scores import LEAST, Figures
from elastune.reuse.selection import EnsembleLimits
from elastune.reuse.task import Array, Judged

STEPS = 20_000
PRECISION = 1e-12
SMALLEST = 1e-3  # a weight below it is left out: a member costs its inference, whatever its weight


def stack(judged: Judged, limits: EnsembleLimits, costs: Sequence[float]) -> Figures:
    """Return the best weights of at most as many members as ``limits`` admit; all 0 where they admit none."""
    first = simplex_weights(judged)
    pool: set[int] = set()
    for at in np.argsort(-first, kind="stable").tolist():
        if (first[at] >= SMALLEST or not pool) and limits.admits({*pool, at}, costs):
            pool.add(at)
    weights = np.zeros(judged.members)
    if pool:
        chosen = sorted(pool)
        weights[chosen] = simplex_weights(Judged(judged.task, judged.said[chosen], judged.right))
    return weights


def simplex_weights(judged: Judged) -> Figures:
    """Return the best weights of all members."""
    if judged.members == 1:
        return np.ones(1)
    if judged.task.kind == "classification":
        return _mixture(judged.said[:, np.arange(len(judged.right)), judged.right])
    return _least_squares(judged.said, np.asarray(judged.right, dtype=float))


def _mixture(hits: Array) -> Figures:
    """By expectation and maximisation; ``hits``: each member's probability of what is right, (members, rows)."""
    hits = np.maximum(hits, LEAST)
    weights = np.full(len(hits), 1 / len(hits))
    for _ in range(STEPS):
        growth = (hits / (weights @ hits)).mean(1)
        weights = weights * growth
        weights /= weights.sum()
        if growth.max() - 1 < 1e-8:  # no member would make the mixture better: the condition of the optimum
            break
    return weights


def _least_squares(said: Array, right: Array) -> Figures:
    """By projected gradients with Nesterov's momentum, which begins again where it overshoots."""
    rows = said.reshape(len(said), -1)
    gram, pull = rows @ rows.T / rows.shape[1], rows @ right.reshape(-1) / rows.shape[1]
    step = 1 / max(float(np.linalg.eigvalsh(gram)[-1]), LEAST)
    weights = ahead = np.full(len(said), 1 / len(said))
    speed = 1.0
    for _ in range(STEPS):
        new = onto_simplex(ahead - step * (gram @ ahead - pull))
        if np.abs(new - weights).max() < PRECISION and speed > 1:
            break
        overshot = (ahead - new) @ (new - weights) > 0
        faster = 1.0 if overshot else (1 + np.sqrt(1 + 4 * speed**2)) / 2
        ahead = new if overshot else new + (speed - 1) / faster * (new - weights)
        weights, speed = new, float(faster)
    return weights


def onto_simplex(point: Figures) -> Figures:
    """Return the nearest point of which no coordinate is negative and all add up to 1 (Duchi et al. 2008)."""
    ordered = np.sort(point)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(point) + 1)
    return np.asarray(np.maximum(point - excess[ordered > excess][-1], 0.0))
