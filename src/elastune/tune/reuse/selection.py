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

from elastune.tune.reuse.predictions import LEAST, SMOOTH, Array, Figures, Judged, Score

# [selection] Greedy selection with replacement, bagged and warm-started.
#
# Caruana, Niculescu-Mizil, Crew, Ksikes 2004, "Ensemble Selection from Libraries of Models": add the member that improves
# the mean most, the same one again where that is best; how often a member was added is its weight. From an empty start,
# the first steps rest on few members and fit the samples that they see. So the selection begins with the best single
# members, as many as are best together (their "sorted ensemble initialization"). Bags (each sees a random half of the
# candidates) decide which candidates may be members at all, so that no candidate owes its place to chance.

BAGS = 20
ROUNDS = 50  # how often a member is added at most
WARM_SHARE = 0.5  # of the members that there may be begin at most: places stay for those that steps find
BAG_SHARE = 0.5


@dataclass(frozen=True)
class EnsembleLimits:
    """What an ensemble may have.

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
        score: The score that is to become better; of equals the smooth score decides, then the order of candidates.
        limits: The limits of the ensemble.
        costs: The cost of inference by each candidate.
        among: The candidates that may be chosen; by default all.
        rounds: The most additions.
        warm: Begin with so many of the best single candidates, as far as the limits admit them; None: as many as are
            best together, up to half of the allowed members.

    Returns:
        Places in ``judged``; empty where the limits admit no candidate.
    """
    free = list(range(judged.members)) if among is None else list(among)
    chosen = _begin(judged, score, limits, costs, free, warm)
    total = judged.said[chosen].sum(0) if chosen else np.zeros(judged.said.shape[1:])
    best, best_rank = list(chosen), _rank(total / max(1, len(chosen)), judged, score) if chosen else (-np.inf, -np.inf)
    while len(chosen) < rounds:
        admitted = [at for at in free if limits.admits({*chosen, at}, costs)]
        if not admitted:
            break
        ranks = _ranks((total + judged.said[admitted]) / (len(chosen) + 1), judged, score)
        found = max(range(len(admitted)), key=lambda at: (*ranks[at], -at))
        chosen.append(admitted[found])
        total = total + judged.said[admitted[found]]
        if ranks[found] > best_rank:
            best, best_rank = list(chosen), ranks[found]
    return best


def _begin(
    judged: Judged, score: Score, limits: EnsembleLimits, costs: Sequence[float], free: Sequence[int], warm: int | None
) -> list[int]:
    """The best by themselves, ``warm`` of them, or of all numbers the one whose mean is best; of equals the fewest."""
    singles = _ranks(judged.said[list(free)], judged, score) if free else []
    most = max(1, int(min(limits.members, judged.members) * WARM_SHARE)) if warm is None else warm
    begun: list[int] = []
    for at in sorted(range(len(free)), key=lambda at: singles[at], reverse=True):
        if len(begun) < most and limits.admits({*begun, free[at]}, costs):
            begun.append(free[at])
    if warm is not None:
        return begun
    means = [judged.said[begun[: size + 1]].mean(0) for size in range(len(begun))]
    ranks = [_rank(mean, judged, score) for mean in means]
    return begun[: 1 + max(range(len(begun)), key=lambda at: (*ranks[at], -at))] if begun else []


def select(
    judged: Judged, score: Score, limits: EnsembleLimits, costs: Sequence[float], *, seed: int = 0, bags: int = BAGS
) -> Figures:
    """Return the members' weights, adding up to 1, by bagged greedy selection.

    All are 0 where the limits admit no candidate. It tries a start with several candidates and one with the best alone,
    and takes the better result.
    """
    pool = _of_bags(judged, score, limits, costs, seed, bags)
    tried = [greedy(judged, score, limits, costs, among=pool, warm=warm) for warm in (1, None)]
    chosen = max(tried, key=lambda chosen: _rank(judged.said[chosen].mean(0), judged, score)) if tried[0] else []
    weights = np.zeros(judged.members)
    for at, times in Counter(chosen).items():
        weights[at] = times / len(chosen)
    return weights


def _of_bags(
    judged: Judged, score: Score, limits: EnsembleLimits, costs: Sequence[float], seed: int, bags: int
) -> list[int] | None:
    """Those that bags chose most, as many as may stand together, and the best by itself; None: all, without bags."""
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
    ranks = _ranks(judged.said, judged, score)
    return max(range(judged.members), key=lambda at: (*ranks[at], -at))


def _ranks(said: Array, judged: Judged, score: Score) -> list[tuple[float, float]]:
    """How good each is: by the score, and by what decides between equals."""
    gains, smooth = score.gain(said, judged.right), SMOOTH[judged.task.kind].gain(said, judged.right)
    return list(zip(gains.tolist(), smooth.tolist(), strict=True))


def _rank(said: Array, judged: Judged, score: Score) -> tuple[float, float]:
    return _ranks(said[None], judged, score)[0]


# [stacking] Weights of members, none negative and adding up to 1, that make the loss of the mean smallest.
#
# For probabilities that is the log loss of the mixture, for values the squared error. Both are convex, so there is one
# best loss, whatever the start.

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
