"""How much each parameter decides an objective, alone and together with others, and how sure that is.

A random forest learns the objective from the parameters of the trials that have it. Its predictions over the whole
space are split into parts by functional analysis of variance (Hutter, Hoos, Leyton-Brown, "An efficient approach for
assessing hyperparameter importance", ICML 2014): the share of the variance that a parameter causes alone, that it
causes at all, and that two cause only together. Shares of one parameter are Sobol' indices, first-order and total
(Saltelli et al. 2010, by SciPy); those of two are the numerator of Friedman's H-statistic (Friedman and Popescu 2008,
eq. 44) over the variance of all. The same again on trials drawn with replacement says how far to trust them.

Optuna's fANOVA computes the first of these exactly, at fifty times the time of one forest, so that no resampling could
be afforded; it leaves out parameters that some trials lack, and sees a rate on a log scale as if on a linear one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from elastune.search.space.objective import Floats, Objective
from elastune.search.space.space import from_json

FEWEST = 10  # trials below which no forest says anything
FEWEST_PER_PARAMETER = 2
MOST = 500  # trials that are looked at, evenly spread over the study: more cost time and change little
TREES, RESAMPLED_TREES, RESAMPLES = 64, 32, 10
DRAWS, RESAMPLED_DRAWS = 1024, 256  # of the space, powers of 2
LEADING = 4  # parameters whose pairs are looked at
GRID, BEHIND = 10, 32  # values of each of a pair, and draws of all other parameters behind them
_INACTIVE = 0.5  # in the middle of its range: there it tells nothing from what was active


@dataclass(frozen=True)
class Tried:
    """A trial: what the search chose, out of what (Optuna's JSON), and the objectives' values that it reached."""

    params: Mapping[str, Any]
    distributions: Mapping[str, str]
    values: Mapping[str, float]


@dataclass(frozen=True)
class Share:
    """What parameter ``name`` causes of an objective's variance over the space, ``alone`` and at all (``total``).

    ``spread``: standard error of ``total``, over resampled trials.
    """

    name: str
    alone: float
    total: float
    spread: float


@dataclass(frozen=True)
class Pair:
    """What two parameters cause of the variance only together, beyond what each does alone; its standard error."""

    first: str
    second: str
    share: float
    spread: float


@dataclass(frozen=True)
class Importance:
    """Of one objective, learnt from ``trials``: its parameters and pairs, the most important first.

    ``explained``: the part of the variance among trials that the forest predicts for those it was not fitted to (the
    out-of-bag R^2). ``why_not``: in words, why there are no figures; empty where there are.
    """

    objective: str
    trials: int
    parameters: tuple[Share, ...] = ()
    pairs: tuple[Pair, ...] = ()
    explained: float = 0.0
    why_not: str = ""


def importance(tried: Sequence[Tried], objectives: Sequence[Objective]) -> tuple[Importance, ...]:
    """One ``Importance`` an objective, in their order. The same trials give the same figures.

    Parameters that only some trials have count as at the middle of their range in the others. System parameters that
    the search chose count like all others.
    """
    return tuple(_importance(tried, objective.name) for objective in objectives)


def _importance(tried: Sequence[Tried], name: str) -> Importance:
    valued = [trial for trial in tried if math.isfinite(trial.values.get(name, math.nan)) and trial.params]
    n = len(valued)
    if not valued:
        return Importance(name, n, why_not="no trial has a value of it")
    if n > MOST:
        valued = [valued[i] for i in np.linspace(0, n - 1, MOST).astype(int)]
    ranges = _ranges(valued)
    if not ranges:
        return Importance(name, n, why_not="no parameter was searched")
    fewest = max(FEWEST, FEWEST_PER_PARAMETER * len(ranges))
    if n < fewest:
        return Importance(name, n, why_not=f"{n} trials are too few for {len(ranges)} parameters, {fewest} are needed")
    x = np.array([[_coded(trial.params, param, ranges[param]) for param in ranges] for trial in valued])
    y = np.array([trial.values[name] for trial in valued])
    if np.ptp(y) == 0:
        return Importance(name, n, why_not="all trials reached the same")
    return _split(name, list(ranges), x, y, n)


def _split(name: str, params: list[str], x: Floats, y: Floats, n: int) -> Importance:
    forest = _fit(x, y, TREES, seed=0, oob=True)
    explained = float(forest.oob_score_)
    if explained <= 0:
        why = "the parameters do not predict it: a forest fitted to some of the trials guesses the others no better"
        return Importance(name, n, explained=explained, why_not=f"{why} than their mean does")
    alone, total = _sobol(forest, len(params), DRAWS)
    order = np.argsort(-total, kind="stable")
    pairs = list(combinations(order[:LEADING].tolist(), 2))
    shares = _together(forest, len(params), pairs)
    draw = np.random.default_rng(0)
    totals, togethers = [], []
    for seed in range(1, RESAMPLES + 1):
        rows = draw.integers(0, len(y), len(y))
        if np.ptp(y[rows]) == 0:
            continue
        again = _fit(x[rows], y[rows], RESAMPLED_TREES, seed)
        totals.append(_sobol(again, len(params), RESAMPLED_DRAWS)[1])
        togethers.append(_together(again, len(params), pairs))
    spread, spreads = np.std(totals, axis=0), np.std(togethers, axis=0)
    found = sorted(zip(pairs, shares, spreads, strict=True), key=lambda each: -each[1]) if pairs else []
    return Importance(
        name,
        n,
        tuple(Share(params[i], float(alone[i]), float(total[i]), float(spread[i])) for i in order),
        tuple(Pair(params[i], params[j], float(share), float(error)) for (i, j), share, error in found),
        explained,
    )


def _ranges(tried: Sequence[Tried]) -> dict[str, BaseDistribution]:
    """Every parameter that has more than one value, over the whole of its ranges if these differ between trials."""
    found: dict[str, BaseDistribution] = {}
    kinds: dict[tuple[str, str], BaseDistribution] = {}
    for trial in tried:
        for name, text in trial.distributions.items():
            if name in trial.params and (name, text) not in kinds:
                own = kinds[name, text] = from_json({name: text})[name]
                found[name] = _joined(found[name], own) if name in found else own
    return {name: found[name] for name in sorted(found) if not found[name].single()}


def _joined(one: BaseDistribution, other: BaseDistribution) -> BaseDistribution:
    if isinstance(one, CategoricalDistribution) and isinstance(other, CategoricalDistribution):
        return CategoricalDistribution([*one.choices, *(c for c in other.choices if c not in one.choices)])
    if isinstance(one, IntDistribution) and isinstance(other, IntDistribution):
        return IntDistribution(min(one.low, other.low), max(one.high, other.high), log=one.log and other.log)
    if isinstance(one, FloatDistribution) and isinstance(other, FloatDistribution):
        return FloatDistribution(min(one.low, other.low), max(one.high, other.high), log=one.log and other.log)
    return one  # Optuna refuses such a space


def _coded(params: Mapping[str, Any], name: str, range_: BaseDistribution) -> float:
    """A parameter's value as a place in [0, 1], so that a uniform draw means the range, on its own scale."""
    if name not in params:
        return _INACTIVE
    value = params[name]
    if isinstance(range_, CategoricalDistribution):
        return (range_.choices.index(value) + 0.5) / len(range_.choices)
    if not isinstance(range_, (FloatDistribution, IntDistribution)):
        raise TypeError(f"unknown distribution of {name}: {range_}")
    half = 0.5 if isinstance(range_, IntDistribution) else 0.0
    low, high = range_.low - half, range_.high + half
    if range_.log:
        return float((math.log(value) - math.log(low)) / (math.log(high) - math.log(low)))
    return float((value - low) / (high - low))


def _fit(x: Floats, y: Floats, trees: int, seed: int, oob: bool = False) -> Any:
    from sklearn.ensemble import RandomForestRegressor  # takes a second, and most studies' reports need none

    return RandomForestRegressor(trees, random_state=seed, oob_score=oob, n_jobs=1).fit(x, y)


def _sobol(forest: Any, k: int, draws: int) -> tuple[Floats, Floats]:
    """First-order and total indices, shape (k,) each, in [0, 1]."""
    from scipy.stats import sobol_indices, uniform

    if k == 1:
        return np.ones(1), np.ones(1)  # SciPy has no answer for one dimension

    def predicted(points: Floats) -> Floats:
        return np.asarray(forest.predict(points.T), dtype=float)

    found = sobol_indices(func=predicted, n=draws, dists=[uniform()] * k, random_state=np.random.default_rng(0))
    alone, total = np.nan_to_num(found.first_order), np.nan_to_num(found.total_order)
    alone = np.clip(alone, 0.0, 1.0)
    return alone, np.maximum(np.clip(total, 0.0, 1.0), alone)


def _together(forest: Any, k: int, pairs: Sequence[tuple[int, int]]) -> Floats:
    """The share of each pair's interaction in the variance: what is left of their joint partial dependence, on a grid,
    once that of each alone is taken away."""
    if not pairs:
        return np.zeros(0)
    behind = np.random.default_rng(0).random((BEHIND, k))
    whole = float(np.var(forest.predict(np.random.default_rng(1).random((DRAWS, k)))))
    places = (np.arange(GRID) + 0.5) / GRID
    a, b = (axis.ravel() for axis in np.meshgrid(places, places, indexing="ij"))
    points: NDArray[np.float64] = np.tile(behind, (len(pairs), GRID * GRID, 1, 1)).reshape(len(pairs), -1, BEHIND, k)
    for p, (i, j) in enumerate(pairs):
        points[p, :, :, i], points[p, :, :, j] = a[:, None], b[:, None]
    joint = forest.predict(points.reshape(-1, k)).reshape(len(pairs), GRID, GRID, BEHIND).mean(axis=3)
    rest = joint - joint.mean(axis=1, keepdims=True) - joint.mean(axis=2, keepdims=True)
    rest = rest + joint.mean(axis=(1, 2), keepdims=True)
    shares: Floats = np.mean(rest**2, axis=(1, 2)) / whole if whole > 0 else np.zeros(len(pairs))
    return shares
