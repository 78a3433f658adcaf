"""An ensemble of a study's trials: selected on one data set, explained, and judged on unseen data.

It is explained by how much the members differ, how certain the ensemble is, and what each member contributes.
``EnsembleModel`` is the same ensemble as one module: the outputs of its members, mixed by their weights.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from math import comb, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.journal.records import SingleScore
from elastune.train.predictions import HELD_OUT
from elastune.tuning.reuse.kept_models import (
    Candidate,
    LazyPredictions,
    SealedTest,
    check_chosen_by,
    library,
    numbers_in,
)
from elastune.tuning.reuse.predictions import (
    LEAST,
    SCORES,
    SMOOTH,
    Array,
    Figures,
    Judged,
    Score,
    Task,
    judged,
    score_for,
)
from elastune.tuning.search.objective import Direction
from elastune.tuning.study.results import Study

# Which candidates an ensemble takes and with what weights: greedy selection with replacement, or stacking.
#
# Selection follows Caruana, Niculescu-Mizil, Crew, Ksikes 2004, "Ensemble Selection from Libraries of Models". It
# adds the member that improves the mean most, again and again. How often a member was added is its weight. The first
# steps of an empty ensemble rest on few members and overfit, so selection begins with the best single members (their
# "sorted ensemble initialization"). Bags, which each see a random half of the candidates, decide which candidates may
# be members at all.
#
# Stacking finds non-negative weights with sum 1 that minimise the loss of the mean: the log loss of the mixture for
# probabilities, the squared error for values. Both are convex, so the best loss does not depend on the start.

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


# An ensemble of a study's trials: chosen on one data set, explained, and judged on unseen data.

METHODS = ("greedy", "stacking", "uniform")
MEMBERS = 8
MOST_EXACT = 10  # members whose every coalition is evaluated: 1,024 coalitions
ORDERS = 400  # random orders of more members
LEAST_PROBABILITY = 1e-12


# --- why an ensemble works: diversity, uncertainty, contributions ---
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

    For probabilities (nats), ``aleatoric`` is the mean entropy of the members. ``epistemic`` is the entropy of their
    mean less that, and comes from disagreement (Houlsby et al. 2011). For values (squared), ``epistemic`` is the
    members' variance. ``aleatoric`` is the squared error of the mean, which holds noise and common errors.
    """

    aleatoric: float
    epistemic: float
    unit: str


@dataclass(frozen=True)
class MemberWorth:
    """By how much a member improves the score of its ensemble.

    Attributes:
        left_out: The improvement over the ensemble without the member.
        shapley: The mean improvement over all orders in which members may be added (Shapley value).
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
        named = judged.outputs.argmax(-1)
        errors = (named != judged.right).astype(float)
        apart = [float((named[a] != named[b]).mean()) for a, b in combinations(range(judged.members), 2)]
    else:
        errors = (judged.outputs - judged.right).reshape(judged.members, -1)
        scale = float(np.std(judged.right)) or 1.0
        flat = judged.outputs.reshape(judged.members, -1)
        apart = [float(np.abs(flat[a] - flat[b]).mean()) / scale for a, b in combinations(range(judged.members), 2)]
    correlations = [c for a, b in combinations(errors, 2) if (c := _correlation(a, b)) is not None]
    return Diversity(float(np.mean(apart)), float(np.mean(correlations)) if correlations else None)


def uncertainty(judged: Judged, weights: Figures) -> Uncertainty:
    """Return the uncertainty of the mean with these ``weights``, which add up to 1."""
    mean = mixed(judged.outputs, weights)
    if judged.task.kind == "classification":
        own_entropy = float(weights @ _entropy(judged.outputs).mean(-1))
        return Uncertainty(own_entropy, max(0.0, float(_entropy(mean).mean()) - own_entropy), "nats")
    spread = float(weights @ ((judged.outputs - mean) ** 2).mean((1, 2)))
    return Uncertainty(float(((mean - judged.right) ** 2).mean()), spread, "squared")


def contributions(
    judged: Judged, weights: Figures, score: Score, *, players: Sequence[Sequence[int]] | None = None, seed: int = 0
) -> list[MemberWorth]:
    """Return the contribution of each member, or of ``players``.

    A player is a sequence of the members that need it. A member takes part if all players that it needs do. Without
    some members, the others keep their weights, in proportion. Without any member, the answer is the mean of the right
    values, or the frequency of each class.
    """
    sides = [[at] for at in range(judged.members)] if players is None else players
    needs = [{player for player, side in enumerate(sides) if at in side} for at in range(judged.members)]
    count, cache = len(sides), dict[frozenset[int], float]()
    nobody = float(score.gain(_prior(judged), judged.right))

    def worth(coalition: frozenset[int]) -> float:
        if coalition not in cache:
            present = np.array([w if needs[at] <= coalition else 0.0 for at, w in enumerate(weights)])
            whole = present.sum()
            mean = mixed(judged.outputs, present / whole) if whole > 0 else None
            cache[coalition] = nobody if mean is None else float(score.gain(mean, judged.right))
        return cache[coalition]

    everyone = frozenset(range(count))
    left_out = [worth(everyone) - worth(everyone - {at}) for at in range(count)]
    if count <= MOST_EXACT:
        return [MemberWorth(left_out[at], _shapley(at, count, worth), 0.0) for at in range(count)]
    values, errors = _sampled_shapley(count, worth, seed)
    return [MemberWorth(left_out[at], values[at], errors[at]) for at in range(count)]


def mixed(outputs: Array, weights: Figures) -> Array:
    """Return the members' weighted mean."""
    return np.asarray(np.tensordot(weights, outputs, 1))


def _shapley(member: int, count: int, worth: Callable[[frozenset[int]], float]) -> float:
    """The mean over every coalition of the other members, weighted by the number of orders that begin with it."""
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


def _entropy(probabilities: Array) -> Array:
    return np.asarray(-(probabilities * np.log(np.maximum(probabilities, LEAST))).sum(-1))


def _correlation(a: Array, b: Array) -> float | None:
    """The correlation; None if one of them never varies."""
    if not a.std() or not b.std():
        return None
    return float(np.corrcoef(a, b)[0, 1])


# --- choosing an ensemble ---
@dataclass(frozen=True)
class Member:
    """A trial in an ensemble.

    Attributes:
        trial: The number of the trial.
        weight: Its weight in the mean.
        alone: Its score by itself, on the data of the choice.
        parameters: The number of parameters that one inference uses.
        worker_seconds: The worker-seconds of its training.
        contribution: By how much it improves the score.
        config: Its settings.
    """

    trial: int
    weight: float
    alone: float
    parameters: int
    worker_seconds: float
    contribution: MemberWorth
    config: dict[str, Any]


@dataclass(frozen=True)
class SettingWorth:
    """By how much the members with one ``value`` of a setting improve the score together.

    If the values of the setting are lists, such as the views of a model, ``value`` is one element. The
    members are those that need that element.
    """

    value: Any
    trials: tuple[int, ...]
    contribution: MemberWorth


@dataclass(frozen=True)
class HeldOutFigures:
    """The scores of an ensemble on data that no choice rests on.

    Attributes:
        data: The name of the data set.
        rows: How many rows it has.
        ensemble: The score of the ensemble.
        best_single: The score of the trial that was best by itself on the data of the choice.
    """

    data: str
    rows: int
    ensemble: float
    best_single: float


@dataclass(frozen=True)
class Ensemble:
    """An ensemble of a study's trials, with the reasons for its choice.

    Attributes:
        study: The folder of the study.
        task: The kind of problem.
        method: How the weights were found.
        data: The name of the predictions on which the choice rests, and their ``rows``.
        objective: The score that the choice improves, and its better ``direction``.
        candidates: The number of trials to choose from.
        members: The chosen trials, the greatest weight first.
        score: The score of the ensemble on ``data``. Like ``best_single``, it is on the data of the choice.
        single: The trial that is best by itself on ``data``.
        best_single: The score of ``single``.
        inference: The members' parameters together, over those of the best single trial.
        diversity: How much the members differ.
        uncertainty: How sure the ensemble is.
        test: Scores on other data; None if some member has no predictions on such data.
        singles: The score of each candidate by itself on ``data``.
        by: The setting whose values ``settings`` is about; None: not asked for.
        settings: What the members with each value of ``by`` contribute.
    """

    study: Path
    task: Task
    method: str
    data: str
    rows: int
    objective: str
    direction: Direction
    candidates: int
    members: tuple[Member, ...]
    score: float
    single: int
    best_single: float
    inference: float
    diversity: Diversity
    uncertainty: Uncertainty
    test: HeldOutFigures | None
    singles: tuple[SingleScore, ...]
    by: str | None
    settings: tuple[SettingWorth, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "study": str(self.study)}


def ensemble(
    study: Study | str | Path,
    *,
    members: int = MEMBERS,
    objective: str | None = None,
    inference_budget: float | None = None,
    data: str = "validation",
    test: str = "test",
    method: str = "greedy",
    seed: int = 0,
    by: str | None = None,
) -> Ensemble:
    """Choose an ensemble among the kept trials of a study (``--keep``) that have ``session.predictions``.

    Args:
        study: The study, or its folder.
        members: The most different models.
        objective: The score to improve: "accuracy", "log_loss", "brier"; "mse", "rmse", "mae", "r2". None: accuracy or
            mse.
        inference_budget: The most parameters that one answer may use, over those of the best single trial; None: no
            bound.
        data: The name of the predictions on which the choice rests.
        test: The name of the predictions that judge the ensemble; they are not read before the choice is made.
        method: "greedy" (selection with replacement, bagged), "stacking" (weights of least log loss or squared error),
            or "uniform" (the best ones, with equal weights).
        seed: Seeds the bags, and sampled contributions.
        by: A setting of the program, such as "inputs": report also what the members with each of its values contribute
            together. If values are lists of views, report it for each view.

    Returns:
        The ensemble; ``save_ensemble`` makes one file of it.

    Raises:
        UserError: If the study has kept no such predictions, if they are damaged, and for impossible options.

    Example:
        >>> found = elastune.ensemble("out", members=8)
        >>> elastune.save_ensemble(found, "ensemble.safetensors")
    """
    check_choice(members, objective, inference_budget, data, test, method, seed)
    source = library(study)
    candidates = source.with_predictions(data)
    seen = judged(LazyPredictions(candidates, lambda candidate: candidate.predictions(data)))
    score = score_for(objective, seen.task.kind)
    sizes = [parameters_of(candidate) for candidate in candidates]
    single = best_single(seen, score)
    limits = EnsembleLimits(members, math.inf if inference_budget is None else inference_budget * sizes[single])
    weights = _weights(method, seen, score, limits, sizes, seed)
    if not weights.any():
        rule = "an inference budget admits at least one model"
        raise UserError(rule, f"{inference_budget:g}x", f"at least {min(sizes) / sizes[single]:.3g}x is needed")
    order = [at for at in np.argsort(-weights, kind="stable").tolist() if weights[at] > 0]
    chosen, part = [candidates[at] for at in order], Judged(seen.task, seen.outputs[order], seen.right)
    alone = score.of(part.outputs, part.right)
    worths = contributions(part, weights[order], score, seed=seed)
    return Ensemble(
        study=source.out,
        task=seen.task,
        method=method,
        data=data,
        rows=len(seen.right),
        objective=score.name,
        direction=score.direction,
        candidates=len(candidates),
        members=tuple(
            Member(
                candidate.trial,
                float(weights[at]),
                float(alone[nth]),
                sizes[at],
                candidate.worker_seconds,
                worths[nth],
                candidate.config,
            )
            for nth, (at, candidate) in enumerate(zip(order, chosen, strict=True))
        ),
        score=float(score.of(mixed(part.outputs, weights[order]), part.right)),
        single=candidates[single].trial,
        best_single=float(score.of(seen.outputs[single], seen.right)),
        inference=sum(sizes[at] for at in order) / sizes[single],
        diversity=diversity(part),
        uncertainty=uncertainty(part, weights[order]),
        test=_tested(test, chosen, weights[order], candidates[single], seen.task, score),
        singles=tuple(
            SingleScore(candidate.trial, value, size)
            for candidate, value, size in zip(
                candidates, score.of(seen.outputs, seen.right).tolist(), sizes, strict=True
            )
        ),
        by=by,
        settings=() if by is None else _by_setting(by, chosen, part, weights[order], score, seed),
    )


def _by_setting(
    by: str, chosen: Sequence[Candidate], part: Judged, weights: Figures, score: Score, seed: int
) -> tuple[SettingWorth, ...]:
    """The worth of each value of setting ``by``, in the order of the members. Each element of a list is a value."""
    if not any(by in candidate.config for candidate in chosen):
        names = ", ".join(sorted({name for candidate in chosen for name in candidate.config}))
        raise UserError(
            "contributions are reported by a setting of the program", repr(by)[:60], f"such as {names}"[:200]
        )
    values: list[Any] = [candidate.config.get(by) for candidate in chosen]
    parted = all(isinstance(value, list) and value for value in values)
    sides: dict[str, list[int]] = {}
    for at, value in enumerate(values):
        for text in dict.fromkeys(json.dumps(each, sort_keys=True) for each in (value if parted else [value])):
            sides.setdefault(text, []).append(at)
    worths = contributions(part, weights, score, players=list(sides.values()), seed=seed)
    return tuple(
        SettingWorth(json.loads(value), tuple(chosen[at].trial for at in members), worth)
        for (value, members), worth in zip(sides.items(), worths, strict=True)
    )


def check_choice(
    members: int, objective: str | None, budget: float | None, data: str, test: str, method: str, seed: int
) -> None:
    """Raise ``UserError`` for options that are wrong for any study."""
    if isinstance(members, bool) or not isinstance(members, int) or members < 1:
        raise UserError("an ensemble has a whole number of members, at least 1", members, "such as 8")
    if budget is not None and not 0 < budget < math.inf:
        raise UserError("an inference budget is a positive number of times", budget, "such as 4x")
    if method not in METHODS:
        raise UserError("an ensemble's weights are found by a known method", method, f"use {', '.join(METHODS)}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError("a seed is a whole number, at least 0", seed, "such as 0")
    if objective is not None and objective not in SCORES:
        raise UserError("an ensemble is chosen by a known score", repr(objective)[:60], f"use {', '.join(SCORES)}")
    check_chosen_by(data)
    if not test.startswith(HELD_OUT):  # other data may have been used for a choice
        raise UserError(f"data that judge a choice have a name that begins with {HELD_OUT!r}", test, "such as test")


def parse_times(text: str) -> float:
    """Return the number in "4x" or "1.5x". Raises ``UserError``."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)x?", text.strip())
    if match is None or not float(match[1]):
        raise UserError("an inference budget is a positive number of times", repr(text)[:60], "such as 4x")
    return float(match[1])


def parameters_of(candidate: Candidate) -> int:
    """Return the number of parameters of a candidate's model."""
    return numbers_in(candidate.weights())


def _weights(
    method: str, seen: Judged, score: Score, limits: EnsembleLimits, sizes: Sequence[int], seed: int
) -> Figures:
    if method == "greedy":
        return select(seen, score, limits, sizes, seed=seed)
    if method == "stacking":
        return stack(seen, limits, sizes)
    gains = score.gain(seen.outputs, seen.right)
    pool: set[int] = set()
    for at in np.argsort(-gains, kind="stable").tolist():
        if limits.admits({*pool, at}, sizes):
            pool.add(at)
    weights = np.zeros(seen.members)
    weights[sorted(pool)] = 1 / max(1, len(pool))
    return weights


def _tested(
    name: str, chosen: Sequence[Candidate], weights: Figures, single: Candidate, task: Task, score: Score
) -> HeldOutFigures | None:
    """Score the ensemble on test data, after the whole choice was made."""
    everyone = list({candidate.trial: candidate for candidate in (*chosen, single)}.values())
    if any(name not in candidate.artifact.predictions for candidate in everyone):
        return None
    sealed = SealedTest(name)
    sealed.unseal(everyone)
    seen = judged(LazyPredictions(everyone, sealed.of))
    if (seen.task.kind, seen.task.width) != (task.kind, task.width):
        fix = "let the program give the same outputs of both"
        raise UserError(f"predictions on {name} are of the same task as those chosen by", f"{seen.task}", fix)
    best = [candidate.trial for candidate in everyone].index(single.trial)
    return HeldOutFigures(
        name,
        len(seen.right),
        float(score.of(mixed(seen.outputs[: len(chosen)], weights), seen.right)),
        float(score.of(seen.outputs[best], seen.right)),
    )


# --- an ensemble as one module ---
class OutputUncertainty(NamedTuple):
    """For each sample, the output of the ensemble and its uncertainty: see ``Uncertainty``.

    ``aleatoric`` is None for values, because a member does not predict its own noise.
    """

    outputs: torch.Tensor
    aleatoric: torch.Tensor | None
    epistemic: torch.Tensor


class EnsembleModel(nn.Module):
    """The module of an ensemble: the weighted mean of its members' probabilities, or of their values.

    Attributes:
        members: Modules that take the same input.
        task: The kind of the members' outputs; logits become probabilities first.
        weights: The weights of the members; they add up to 1.
    """

    weights: torch.Tensor

    def __init__(self, members: Sequence[nn.Module], weights: Sequence[float], task: Task) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.task = task
        self.register_buffer("weights", torch.tensor(list(weights)))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return probabilities of classes, or values."""
        total: torch.Tensor | None = None
        for weight, member in zip(self.weights, self.members, strict=True):
            part = weight * self._outputs(member, *inputs)
            total = part if total is None else total + part
        assert total is not None
        return total

    def uncertainty_of(self, *inputs: torch.Tensor) -> OutputUncertainty:
        """Return the output of the ensemble for each sample, and its uncertainty.

        Example:
            >>> model = elastune.load_ensemble("ensemble.safetensors", build).eval()
            >>> unsure = model.uncertainty_of(x).epistemic.topk(10).indices
        """
        outputs = torch.stack([self._outputs(member, *inputs) for member in self.members])
        weights = self.weights.reshape(-1, *[1] * (outputs.ndim - 1))
        mean = (weights * outputs).sum(0)
        if self.task.kind == "regression":
            return OutputUncertainty(mean, None, (weights * (outputs - mean) ** 2).sum(0))
        aleatoric = (weights[..., 0] * _tensor_entropy(outputs)).sum(0)
        return OutputUncertainty(mean, aleatoric, (_tensor_entropy(mean) - aleatoric).clamp_min(0))

    def _outputs(self, member: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = member(*inputs)
        return outputs.softmax(-1) if self.task.output_kind == "logits" else outputs


def _tensor_entropy(probabilities: torch.Tensor) -> torch.Tensor:
    return -(probabilities * probabilities.clamp_min(LEAST_PROBABILITY).log()).sum(-1)
