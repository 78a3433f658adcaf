"""The reasons why an ensemble works: how much its members differ, how sure it is, and what each of them contributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb, sqrt

import numpy as np

from elastune.reuse.scores import LEAST, Figures, Score
from elastune.reuse.task import Array, Judged

MOST_EXACT = 10  # members of which every coalition is looked at: 1,024 of them
ORDERS = 400  # random ones, beyond


@dataclass(frozen=True)
class Diversity:
    """Means over pairs of members; None for a single member.

    Attributes:
        disagreement: For classes, the share of rows that two members name differently. For values, their mean distance,
            in standard deviations of the right values.
        error_correlation: The correlation of two members' errors. 1: they make the same errors, and a mean of them
            gains nothing.
    """

    disagreement: float | None
    error_correlation: float | None


@dataclass(frozen=True)
class Uncertainty:
    """The mean uncertainty over rows; both parts are in ``unit``.

    For probabilities (nats): ``aleatoric`` is the members' own mean entropy; ``epistemic`` is what the mean's entropy
    has beyond it, which is what members disagree about (Houlsby et al. 2011). For values (squared): ``epistemic`` is
    the members' variance; ``aleatoric`` is the mean's squared error, which holds both noise and what all members get
    wrong.
    """

    aleatoric: float
    epistemic: float
    unit: str


@dataclass(frozen=True)
class MemberWorth:
    """By how much the score is better with a member.

    Attributes:
        left_out: Compared with the ensemble without it, the others as they are.
        shapley: In the mean over all orders in which members may come.
        shapley_error: The standard error of sampled orders; 0: all orders were counted.
    """

    left_out: float
    shapley: float
    shapley_error: float


def diversity(judged: Judged) -> Diversity:
    """Return the diversity of all members, whatever their weights."""
    if judged.members < 2:
        return Diversity(None, None)
    if judged.task.kind == "classification":
        named = judged.said.argmax(-1)
        errors = (named != judged.right).astype(float)
        apart = [float((named[a] != named[b]).mean()) for a, b in combinations(range(judged.members), 2)]
    else:
        errors = (judged.said - judged.right).reshape(judged.members, -1)
        scale = float(np.std(judged.right)) or 1.0
        flat = judged.said.reshape(judged.members, -1)
        apart = [float(np.abs(flat[a] - flat[b]).mean()) / scale for a, b in combinations(range(judged.members), 2)]
    known = [c for a, b in combinations(errors, 2) if (c := _correlation(a, b)) is not None]
    return Diversity(float(np.mean(apart)), float(np.mean(known)) if known else None)


def uncertainty(judged: Judged, weights: Figures) -> Uncertainty:
    """Return the uncertainty of the mean with these ``weights``, which add up to 1."""
    mean = mixed(judged.said, weights)
    if judged.task.kind == "classification":
        own = float(weights @ _entropy(judged.said).mean(-1))
        return Uncertainty(own, max(0.0, float(_entropy(mean).mean()) - own), "nats")
    spread = float(weights @ ((judged.said - mean) ** 2).mean((1, 2)))
    return Uncertainty(float(((mean - judged.right) ** 2).mean()), spread, "squared")


def contributions(
    judged: Judged, weights: Figures, score: Score, *, players: Sequence[Sequence[int]] | None = None, seed: int = 0
) -> list[MemberWorth]:
    """Return the contribution of each member, or of ``players``.

    A player is given by the members that need it; a member takes part once all that it needs is there. Without some
    members the others keep their weights, in proportion. Without any, the answer is the mean of the right values, or
    the frequency of each class.
    """
    sides = [[at] for at in range(judged.members)] if players is None else players
    needs = [{player for player, side in enumerate(sides) if at in side} for at in range(judged.members)]
    count, known = len(sides), dict[frozenset[int], float]()
    nobody = float(score.gain(_prior(judged), judged.right))

    def worth(coalition: frozenset[int]) -> float:
        if coalition not in known:
            there = np.array([w if needs[at] <= coalition else 0.0 for at, w in enumerate(weights)])
            whole = there.sum()
            mean = mixed(judged.said, there / whole) if whole > 0 else None
            known[coalition] = nobody if mean is None else float(score.gain(mean, judged.right))
        return known[coalition]

    everyone = frozenset(range(count))
    left_out = [worth(everyone) - worth(everyone - {at}) for at in range(count)]
    if count <= MOST_EXACT:
        return [MemberWorth(left_out[at], _shapley(at, count, worth), 0.0) for at in range(count)]
    values, errors = _sampled_shapley(count, worth, seed)
    return [MemberWorth(left_out[at], values[at], errors[at]) for at in range(count)]


def mixed(said: Array, weights: Figures) -> Array:
    """Return the members' weighted mean."""
    return np.asarray(np.tensordot(weights, said, 1))


def _shapley(member: int, count: int, worth: Callable[[frozenset[int]], float]) -> float:
    """Every coalition of the others, weighed by how many orders it begins."""
    others = [at for at in range(count) if at != member]
    total = 0.0
    for size in range(count):
        share = 1 / (count * comb(count - 1, size))
        for coalition in map(frozenset, combinations(others, size)):
            total += share * (worth(coalition | {member}) - worth(coalition))
    return total


def _sampled_shapley(
    count: int, worth: Callable[[frozenset[int]], float], seed: int
) -> tuple[Sequence[float], Sequence[float]]:
    """Means over random orders, and their standard errors."""
    random, gains = np.random.default_rng(seed), np.zeros((ORDERS, count))
    for row in gains:
        order = random.permutation(count).tolist()
        steps = [frozenset(order[:size]) for size in range(count + 1)]
        for member, (before, after) in zip(order, pairwise(steps), strict=True):
            row[member] = worth(after) - worth(before)
    return gains.mean(0).tolist(), (gains.std(0, ddof=1) / sqrt(ORDERS)).tolist()


def _prior(judged: Judged) -> Array:
    if judged.task.kind == "regression":
        return np.broadcast_to(judged.right.mean(0), judged.right.shape)
    shares = np.bincount(judged.right.astype(int), minlength=judged.task.width) / len(judged.right)
    return np.broadcast_to(shares, (len(judged.right), judged.task.width))


def _entropy(said: Array) -> Array:
    return np.asarray(-(said * np.log(np.maximum(said, LEAST))).sum(-1))


def _correlation(a: Array, b: Array) -> float | None:
    """None where one of them never varies."""
    if not a.std() or not b.std():
        return None
    return float(np.corrcoef(a, b)[0, 1])
