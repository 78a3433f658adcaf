"""What a genetic search does to configurations: ranks them, pairs them, crosses them, mutates them. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from elastune.search.analysis.front import nondominated
from elastune.search.space.objective import Floats
from elastune.search.space.space import Sample, draw, nth, size


def best_first(points: Floats, k: int) -> list[int]:
    """Indices of the ``k`` fittest rows of ``points`` (shape (n, objectives), smaller is better), fittest first.

    One objective: by value, the youngest (last) first among equals, so that a plateau is drifted across. Several: by
    non-dominated front, within a front by crowding distance, the loneliest first (NSGA-II, Deb et al. 2002, III.C).
    """
    n = len(points)
    if points.shape[1] == 1:
        return [int(i) for i in np.lexsort((-np.arange(n), points[:, 0]))[:k]]
    chosen: list[int] = []
    left = np.arange(n)
    while len(chosen) < k and len(left):
        on_front = nondominated(points[left])
        if not on_front.any():
            raise ValueError("the values that are ranked must be finite")
        front = left[on_front]
        order = np.lexsort((-front, -crowding(points[front])))
        chosen += [int(i) for i in front[order]][: k - len(chosen)]
        left = left[~on_front]
    return chosen


def crowding(points: Floats) -> Floats:
    """Crowding distance of each row of one front, shape (n,): infinite for the extremes of an objective.

    The sum over the objectives of the distance between a row's two neighbours, in units of the front's range
    (Deb et al. 2002, III.B).
    """
    distance = np.zeros(len(points))
    for column in points.T:
        order = np.argsort(column, kind="stable")
        spread = column[order[-1]] - column[order[0]]
        distance[order[[0, -1]]] = math.inf
        if spread > 0:
            distance[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / spread
    return distance


def tournament(n: int, entrants: int, rng: np.random.Generator) -> int:
    """The best (smallest) of ``entrants`` ranks drawn without repetition out of 0..n-1."""
    drawn: NDArray[np.intp] = rng.choice(n, size=min(entrants, n), replace=False)
    return int(drawn.min())


def cross(first: Sample, second: Sample, share: float, rng: np.random.Generator) -> Sample:
    """``first`` with each gene taken from ``second`` with probability ``share``; ``values`` stay empty.

    A gene that only one parent has comes from that one: whether it is used, the space decides. One that both have out
    of different distributions stays the first's.
    """
    params, distributions = {**second.params, **first.params}, {**second.distributions, **first.distributions}
    for name in sorted(params):
        swapped = rng.random() < share
        if swapped and name in second.params and second.distributions[name] == distributions[name]:
            params[name] = second.params[name]
    return Sample(params, distributions, {})


def mutate(
    child: Mapping[str, Any],
    distributions: Mapping[str, BaseDistribution],
    rate: float,
    step: float,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """``child`` with each gene mutated with probability ``rate``: see ``mutation``."""
    return {
        name: mutation(distributions[name], child[name], step, rng) if rng.random() < rate else child[name]
        for name in sorted(child)
    }


def mutation(distribution: BaseDistribution, value: Any, step: float, rng: np.random.Generator) -> Any:
    """A gene's new value: drawn afresh where ``step`` is 0, else near ``value``.

    Near: a normal step with a standard deviation of ``step`` of the gene's range (on its log scale where it has one),
    to the bound where it would lead beyond, since optima often lie there; at least one place where the values are
    finitely many. Categories are always drawn afresh.
    """
    if step == 0 or distribution.single() or isinstance(distribution, CategoricalDistribution):
        return draw(distribution, rng)
    match distribution:
        case FloatDistribution(log=True, low=low, high=high):
            moved = _moved(math.log(value), math.log(low), math.log(high), step, rng)
            return min(max(math.exp(moved), low), high)
        case FloatDistribution(step=None, low=low, high=high):
            return min(max(_moved(value, low, high, step, rng), low), high)
        case IntDistribution(log=True, low=low, high=high):
            moved = _moved(math.log(value), math.log(low - 0.5), math.log(high + 0.5), step, rng)
            return min(max(round(math.exp(moved)), low), high)
        case IntDistribution(low=low, step=unit) | FloatDistribution(low=low, step=float() as unit):
            return nth(distribution, _stepped(round((value - low) / unit), int(size(distribution)) - 1, step, rng))
    raise AssertionError(f"unknown distribution {distribution}")


def _moved(value: float, low: float, high: float, step: float, rng: np.random.Generator) -> float:
    return min(max(value + rng.normal(0.0, step * (high - low)), low), high)


def _stepped(index: int, last: int, step: float, rng: np.random.Generator) -> int:
    """Another index of 0..``last``, near ``index``."""
    by = rng.normal(0.0, step * last)
    target = min(max(index + round(by), 0), last)
    if target != index:
        return target
    return index + 1 if index == 0 or (by > 0 and index < last) else index - 1


def is_copy(child: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the space, given the genes of ``child``, would ask for a configuration that was tried before."""
    return any(params.items() <= child.items() for params in tried)
