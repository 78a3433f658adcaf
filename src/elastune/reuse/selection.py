"""Greedy selection with replacement, bagged and warm-started.

Caruana, Niculescu-Mizil, Crew, Ksikes 2004, "Ensemble Selection from Libraries of Models": add the member that improves
the mean most, the same one again where that is best; how often a member was added is its weight. From an empty start,
the first steps rest on few members and fit the samples that they see. So the selection begins with the best single
members, as many as are best together (their "sorted ensemble initialization"). Bags (each sees a random half of the
candidates) decide which candidates may be members at all, so that no candidate owes its place to chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastune.reuse.scores import SMOOTH, Figures, Score
from elastune.reuse.task import Array, Judged

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
