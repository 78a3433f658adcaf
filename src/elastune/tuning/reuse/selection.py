"""Which candidates an ensemble takes and with what weights: greedy selection with replacement, or stacking.

Selection follows Caruana, Niculescu-Mizil, Crew, Ksikes 2004, "Ensemble Selection from Libraries of Models". It adds
the member that improves the mean most, again and again. How often a member was added is its weight. The first steps
of an empty ensemble rest on few members and overfit, so selection begins with the best single members (their "sorted
ensemble initialization"). Bags, which each see a random half of the candidates, decide which candidates may be
members at all.

Stacking finds non-negative weights with sum 1 that minimise the loss of the mean: the log loss of the mixture for
probabilities, the squared error for values. Both are convex, so the best loss does not depend on the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastune.tuning.reuse.predictions import LEAST, SMOOTH, Array, Figures, Judged, Score

BAGS = 20
ROUNDS = 50  # the most additions of a member
WARM_SHARE = 0.5  # the largest part of the members at the start: later steps fill the other places
BAG_SHARE = 0.5
STEPS = 20_000  # of stacking
PRECISION = 1e-12
SMALLEST = 1e-3  # smaller weights of stacking are left out: a member costs its inference, whatever its weight


# --- greedy selection with replacement ---


@dataclass(frozen=True)
class EnsembleLimits:
    """The limits of an ensemble.

    Attributes:
        members: The most different members.
        cost: The most that inference by all of them together may cost.
    """

    members: int
    cost: float = float("inf")

    def admits(self, chosen: set[int], costs: Sequence[float]) -> bool:
        """Return whether these members are within the limits."""
        return len(chosen) <= self.members and sum(costs[at] for at in chosen) <= self.cost * (1 + 1e-9)


def greedy(
    judged: Judged,
    score: Score,
    limits: EnsembleLimits,
    costs: Sequence[float],
    *,
    among: Sequence[int] | None = None,
    rounds: int = ROUNDS,
    warm: int | None = 1,
) -> list[int]:
    """Return the members in the order of adding, until the mean is best; of equally good means, the shortest.

    Args:
        judged: The candidates' predictions.
        score: The score to improve; between equals the smooth score decides, then the order of candidates.
        limits: The limits of the ensemble.
        costs: The cost of inference by each candidate.
        among: The candidates that may be chosen; by default all.
        rounds: The most additions.
        warm: Begin with so many of the best single candidates, as far as the limits admit them; None: as many as are
            best together, up to half of the allowed members.

    Returns:
        Places in ``judged``; empty if the limits admit no candidate.
    """
    free = list(range(judged.members)) if among is None else list(among)
    chosen = _begin(judged, score, limits, costs, free, warm)
    total = judged.outputs[chosen].sum(0) if chosen else np.zeros(judged.outputs.shape[1:])
    best, best_rank = list(chosen), _rank(total / max(1, len(chosen)), judged, score) if chosen else (-np.inf, -np.inf)
    while len(chosen) < rounds:
        admitted = [at for at in free if limits.admits({*chosen, at}, costs)]
        if not admitted:
            break
        ranks = _ranks((total + judged.outputs[admitted]) / (len(chosen) + 1), judged, score)
        place = max(range(len(admitted)), key=lambda at: (*ranks[at], -at))
        chosen.append(admitted[place])
        total = total + judged.outputs[admitted[place]]
        if ranks[place] > best_rank:
            best, best_rank = list(chosen), ranks[place]
    return best


def _begin(
    judged: Judged, score: Score, limits: EnsembleLimits, costs: Sequence[float], free: Sequence[int], warm: int | None
) -> list[int]:
    """The first members: the ``warm`` best single candidates; None: as many as have the best mean, at best few."""
    singles = _ranks(judged.outputs[list(free)], judged, score) if free else []
    most = max(1, int(min(limits.members, judged.members) * WARM_SHARE)) if warm is None else warm
    chosen: list[int] = []
    for at in sorted(range(len(free)), key=lambda at: singles[at], reverse=True):
        if len(chosen) < most and limits.admits({*chosen, free[at]}, costs):
            chosen.append(free[at])
    if warm is not None:
        return chosen
    means = [judged.outputs[chosen[: size + 1]].mean(0) for size in range(len(chosen))]
    ranks = [_rank(mean, judged, score) for mean in means]
    return chosen[: 1 + max(range(len(chosen)), key=lambda at: (*ranks[at], -at))] if chosen else []


def select(
    judged: Judged, score: Score, limits: EnsembleLimits, costs: Sequence[float], *, seed: int = 0, bags: int = BAGS
) -> Figures:
    """Return the members' weights, adding up to 1, by bagged greedy selection.

    All weights are 0 if the limits admit no candidate. The function tries a start with several candidates and a start
    with the best one, and takes the better result.
    """
    pool = _of_bags(judged, score, limits, costs, seed, bags)
    tried = [greedy(judged, score, limits, costs, among=pool, warm=warm) for warm in (1, None)]
    chosen = max(tried, key=lambda chosen: _rank(judged.outputs[chosen].mean(0), judged, score)) if tried[0] else []
    weights = np.zeros(judged.members)
    for at, times in Counter(chosen).items():
        weights[at] = times / len(chosen)
    return weights


def _of_bags(
    judged: Judged, score: Score, limits: EnsembleLimits, costs: Sequence[float], seed: int, bags: int
) -> list[int] | None:
    """The candidates that bags chose most, within the limits, and the best single one; None, without bags: all."""
    size = round(judged.members * BAG_SHARE)
    if bags < 1 or size < 2:
        return None
    random, votes = np.random.default_rng(seed), np.zeros(judged.members)
    for _ in range(bags):
        bag = sorted(random.choice(judged.members, size, replace=False).tolist())
        chosen = greedy(judged, score, limits, costs, among=bag)
        for at, times in Counter(chosen).items():
            votes[at] += times / len(chosen)
    pool = set(greedy(judged, score, limits, costs, rounds=1))  # the best that is admitted
    for at in np.argsort(-votes, kind="stable").tolist():
        if votes[at] > 0 and limits.admits({*pool, at}, costs):
            pool.add(at)
    return sorted(pool)


def best_single(judged: Judged, score: Score) -> int:
    """Return the place of the best candidate; among equals, as ``greedy``."""
    ranks = _ranks(judged.outputs, judged, score)
    return max(range(judged.members), key=lambda at: (*ranks[at], -at))


def _ranks(outputs: Array, judged: Judged, score: Score) -> list[tuple[float, float]]:
    """The gain of each by the score, and by the smooth score, which decides between equals."""
    gains, smooth = score.gain(outputs, judged.right), SMOOTH[judged.task.kind].gain(outputs, judged.right)
    return list(zip(gains.tolist(), smooth.tolist(), strict=True))


def _rank(outputs: Array, judged: Judged, score: Score) -> tuple[float, float]:
    return _ranks(outputs[None], judged, score)[0]


# --- stacking ---


def stack(judged: Judged, limits: EnsembleLimits, costs: Sequence[float]) -> Figures:
    """Return the best weights of at most as many members as ``limits`` admit; all 0 if they admit none."""
    first = simplex_weights(judged)
    pool: set[int] = set()
    for at in np.argsort(-first, kind="stable").tolist():
        if (first[at] >= SMALLEST or not pool) and limits.admits({*pool, at}, costs):
            pool.add(at)
    weights = np.zeros(judged.members)
    if pool:
        chosen = sorted(pool)
        weights[chosen] = simplex_weights(Judged(judged.task, judged.outputs[chosen], judged.right))
    return weights


def simplex_weights(judged: Judged) -> Figures:
    """Return the best weights of all members."""
    if judged.members == 1:
        return np.ones(1)
    if judged.task.kind == "classification":
        return _mixture(judged.outputs[:, np.arange(len(judged.right)), judged.right])
    return _least_squares(judged.outputs, np.asarray(judged.right, dtype=float))


def _mixture(hits: Array) -> Figures:
    """Weights by expectation maximisation. ``hits``: each member's probability of the right class, (members, rows)."""
    hits = np.maximum(hits, LEAST)
    weights = np.full(len(hits), 1 / len(hits))
    for _ in range(STEPS):
        growth = (hits / (weights @ hits)).mean(1)
        weights = weights * growth
        weights /= weights.sum()
        if growth.max() - 1 < 1e-8:  # no member would improve the mixture: this is the optimum
            break
    return weights


def _least_squares(outputs: Array, right: Array) -> Figures:
    """Weights by projected gradients with Nesterov's momentum, which restarts when it overshoots."""
    rows = outputs.reshape(len(outputs), -1)
    gram, pull = rows @ rows.T / rows.shape[1], rows @ right.reshape(-1) / rows.shape[1]
    step = 1 / max(float(np.linalg.eigvalsh(gram)[-1]), LEAST)
    weights = ahead = np.full(len(outputs), 1 / len(outputs))
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
