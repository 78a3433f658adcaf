"""Points of several objectives: the scale on which a search sees their values, and the Pareto front they make.

Arrays of points have shape (n, k): n points, k objectives, smaller is better (see ``objective.oriented``). A row with
a value that is not finite stands for a trial without a valid result: it is never on a front and covers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.tuning.search.objective import Floats, Objective, oriented, valued

# The Pareto front: which points are on it, how points rank, how much a front covers, and which point to take.

EQUAL = 0.01  # of a value: results that differ by no more count as equal
KEEPS = 0.05  # of the best quality: what a cheaper trial may lose and still be recommended


def nondominated(points: Floats) -> NDArray[np.bool_]:
    """Return which rows no other row dominates. Equal rows all stay.

    A row dominates another one if it is at least as good in all objectives and better in one.
    """
    points = _checked(points)
    keep: NDArray[np.bool_] = np.all(np.isfinite(points), axis=1)
    order = np.flatnonzero(keep)
    order = order[np.lexsort(points[order].T[::-1])]  # a row is never dominated by a later one of this order
    if points.shape[1] == 2:
        keep[order] = _staircase(*points[order].T)
        return keep
    while len(order):
        first, order = points[order[0]], order[1:]
        rest = points[order]
        dominated = np.all(first <= rest, axis=1) & np.any(first < rest, axis=1)
        keep[order[dominated]] = False
        order = order[~dominated]
    return keep


def _staircase(x: Floats, y: Floats) -> NDArray[np.bool_]:
    """Which of the points, sorted by x, then y, are lower than all points before them, or equal to such a point."""
    before = np.minimum.accumulate(np.concatenate([[np.inf], y]))[:-1]
    new = y < before
    owner = np.maximum.accumulate(np.where(new, np.arange(len(x)), 0))
    return new | ((x == x[owner]) & (y == y[owner])) if len(x) else new


def best_first(points: Floats, k: int) -> list[int]:
    """Return the indices of the ``k`` fittest rows of ``points``, fittest first.

    One objective ranks by value. Of equal values the last comes first, so that a search drifts across a plateau.
    Several objectives rank by non-dominated front, and within a front by crowding distance, the loneliest point first
    (NSGA-II, Deb et al. 2002, III.C).
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
    """Return the crowding distance of each row of one front, shape (n,); infinite for the extremes of an objective.

    The distance is the sum over the objectives of the gap between a row's two neighbours, in units of the front's
    range (Deb et al. 2002, III.B).
    """
    distance = np.zeros(len(points))
    for column in points.T:
        order = np.argsort(column, kind="stable")
        spread = column[order[-1]] - column[order[0]]
        distance[order[[0, -1]]] = math.inf
        if spread > 0:
            distance[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / spread
    return distance


def hypervolume(points: Floats, reference: Floats) -> float:
    """Return the volume that ``points`` dominate, bounded by ``reference`` (shape (k,)); exact for any k.

    The last objective is cut into slices, and their volumes are added (Zitzler's HSO). The time grows with n log n for
    k = 2, n^2 for k = 3, and n^(k-1) for more objectives.
    """
    points, reference = _checked(points), np.asarray(reference, dtype=float)
    if reference.shape != points.shape[1:]:
        raise ValueError(f"a reference point of {points.shape[1:]} values is needed, not {reference.shape}")
    inside = points[np.isfinite(points).all(axis=1) & (points < reference).all(axis=1)]
    return _volume(inside[nondominated(inside)], reference)


def _volume(points: Floats, reference: Floats) -> float:
    if len(points) == 0:
        return 0.0
    if len(reference) == 1:
        return float(reference[0] - points.min())
    if len(reference) == 2:
        x, y = points[np.lexsort((points[:, 1], points[:, 0]))].T
        lowest = np.minimum.accumulate(np.concatenate([reference[1:], y]))
        return float(np.sum((reference[0] - x) * (lowest[:-1] - lowest[1:])))
    points = points[np.argsort(points[:, -1], kind="stable")]
    heights = np.diff(points[:, -1], append=reference[-1])
    total, slab = 0.0, points[:0, :-1]
    for point, height in zip(points[:, :-1], heights, strict=True):
        slab = np.vstack([slab[~np.all(slab >= point, axis=1)], point])  # what the new point covers adds nothing
        if height > 0:
            total += float(height) * _volume(slab, reference[:-1])
    return total


def default_reference(points: Floats) -> Floats:
    """Return the front's worst value in each objective, a tenth of the front's range further out. Shape (k,)."""
    ideal, nadir = bounds(points)
    return nadir + 0.1 * np.where(nadir > ideal, nadir - ideal, np.maximum(np.abs(nadir), 1.0))


def bounds(points: Floats) -> tuple[Floats, Floats]:
    """Return ideal and nadir of the front of ``points``: its best and worst value in each objective. Shapes (k,)."""
    front = points[_front(points)]
    return front.min(axis=0), front.max(axis=0)


def representative(points: Floats, k: int, reference: Floats | None = None) -> list[int]:
    """Return the indices of at most ``k`` front points that together cover the most, the most important first.

    Each step takes the point that adds most hypervolume. This reaches at least 1 - 1/e of the best subset's volume
    (Nemhauser et al. 1978).
    """
    if k < 1:
        raise UserError("a subset needs at least one point", k, "ask for 1 or more")
    points = _checked(points)
    front = _front(points)
    _, first = np.unique(points[front], axis=0, return_index=True)
    left = [int(front[i]) for i in np.sort(first)]
    limit = default_reference(points) if reference is None else np.asarray(reference, dtype=float)
    chosen: list[int] = []
    while left and len(chosen) < k:
        best = max(left, key=lambda i: hypervolume(points[[*chosen, i]], limit))
        chosen.append(best)
        left.remove(best)
    return chosen


@dataclass(frozen=True)
class Pick:
    """The index of the chosen point, and why it was chosen."""

    index: int
    reason: str


def pick(
    values: Sequence[Mapping[str, float]],
    objectives: Sequence[Objective],
    *,
    targets: Mapping[str, float] | None = None,
    weights: Mapping[str, float] | None = None,
) -> Pick:
    """Choose a point of the front of ``values``.

    Args:
        values: One mapping of objective values for each trial; leave out infeasible trials.
        objectives: The objectives.
        targets: Values that the point must reach, such as ``{"accuracy": 0.98}``.
        weights: Among the points that reach all targets, take the smallest weighted sum, on scales of the front's ideal
            0 and nadir 1. Without weights, take the best in the first objective that has no target.

    Returns:
        The chosen point. With neither targets nor weights it is the first that ``recommend`` returns.

    Raises:
        UserError: Where there is no point, or none reaches the targets.
    """
    names = [o.name for o in objectives]
    for name in {**(targets or {}), **(weights or {})}:
        if name not in names:
            raise UserError("a pick may name objectives only", name, f"known: {', '.join(names)}")
    points = oriented(values, objectives)
    front = _front(points)
    reason = ""
    if targets:
        front = _reaching(values, objectives, points, front, targets)
        reason = "reaches " + " and ".join(f"{name} {goal:g}" for name, goal in targets.items()) + " with "
    if weights:
        return _by_weights(objectives, points, front, weights, reason)
    if targets:
        order = [i for i, o in enumerate(objectives) if o.name not in targets] or list(range(len(objectives)))
        order += [i for i in range(len(objectives)) if i not in order]
        best = min(front, key=lambda row: tuple(points[row, order]))
        chosen = objectives[order[0]]
        return Pick(int(best), f"{reason}the best {chosen.name} ({valued(chosen.name, values[best][chosen.name])})")
    return recommend(values, objectives)[0]


def recommend(
    values: Sequence[Mapping[str, float]],
    objectives: Sequence[Objective],
    *,
    proportional: Collection[str] = (),
    floor: float | None = None,
    condition: str = "",
) -> tuple[Pick, ...]:
    """Choose the points to recommend where the user has no preference.

    These are the point that is best in ``quality``, the fastest within 1 % of it, and the cheapest that keeps 95 % of
    it. One point may be all of them. Of points that are equally fast within 1 % the best one is taken. All points are
    on the front.

    Args:
        values: One mapping of objective values for each trial; leave out infeasible trials.
        objectives: The objectives.
        proportional: Objectives that are another one times a constant, such as a cost at one price. They are ignored.
        floor: The quality of chance, or of a simple baseline. No point with a worse ``quality`` is chosen.
        condition: A text: the condition that all ``values`` fulfil. The third point is then the cheapest of all.

    Returns:
        One to three different points, the pick first: the fastest within 1 % of the best.

    Raises:
        UserError: Where there is no point, or none reaches the floor.

    Example:
        >>> recommend([{"accuracy": 0.99, "seconds": 9.0}, {"accuracy": 0.985, "seconds": 3.0}], objectives)[0].index
        1
    """
    points = oriented(values, objectives)
    front, lead = _front(points), objectives.index(quality(objectives))
    name = objectives[lead].name
    if floor is not None:
        limit = float(oriented({name: floor}, [objectives[lead]])[0])
        reached = front[points[front, lead] <= limit]
        if len(reached) == 0:
            best = values[front[np.argmin(points[front, lead])]][name]
            rule = f"what is recommended has at least the {name} {floor:g} of chance, or of a simple baseline"
            raise UserError(rule, f"at best {best:g}", "search on, or pick by a target or weights")
        front = reached
    others = [i for i, each in enumerate(objectives) if i != lead and each.name not in proportional]
    fast, cheap = (sorted(others, key=lambda i: _eagerness(objectives[i], kind)) for kind in ("seconds", "cost"))
    best = int(min(front, key=lambda row: tuple(points[row, [lead, *fast]])))
    if not others:
        return (Pick(best, f"the best {name}"),)
    near, enough = _within(points, front, lead, EQUAL), front if condition else _within(points, front, lead, KEEPS)
    taken, least = _least(points, near, [lead, *fast]), _least(points, enough, [lead, *cheap])
    sooner = _superlative(points, near, taken, fast[0], objectives)
    if sooner == "the fastest" and "cost" in proportional:
        sooner = "the fastest and cheapest"
    reasons = {taken: f"{sooner} within {EQUAL:.0%} of the best {name}"}
    reasons[best] = f"the best {name}, and {sooner} within {EQUAL:.0%} of it" if best == taken else f"the best {name}"
    what = f"that fulfils {condition}" if condition else f"within {KEEPS:.0%} of the best {name}"
    reasons.setdefault(least, f"{_superlative(points, enough, least, cheap[0], objectives)} {what}")
    return tuple(Pick(row, reason) for row, reason in reasons.items())


def quality(objectives: Sequence[Objective]) -> Objective:
    """Return the objective that measures how good a trial is: the first that is neither a time nor a price, if any."""
    return next((each for each in objectives if each.clock is None), objectives[0])


def _eagerness(objective: Objective, kind: str) -> tuple[bool, bool, bool]:
    """Sort key of objectives to keep small: first ``kind``, then time and cost, then other times, then the rest."""
    return objective.name != kind, objective.clock != "total", objective.clock is None


def _within(points: Floats, rows: NDArray[np.intp], column: int, share: float) -> NDArray[np.intp]:
    """The ``rows`` that are worse than the best of them by no more than a ``share`` of it."""
    best = float(points[rows, column].min())
    near: NDArray[np.intp] = rows[points[rows, column] <= best + share * abs(best)]
    return near


def _least(points: Floats, rows: NDArray[np.intp], columns: Sequence[int]) -> int:
    """The row with the least of all ``columns`` but the first, in their order; of equal rows the best in the first."""
    for column in columns[1:]:
        rows = _within(points, rows, column, EQUAL)
    return int(min(rows, key=lambda row: tuple(points[row, list(columns)])))


def _superlative(points: Floats, rows: NDArray[np.intp], row: int, column: int, objectives: Sequence[Objective]) -> str:
    """The words for ``row`` among ``rows`` by the objective ``column``, such as "the fastest"."""
    name = objectives[column].name
    word = {"seconds": "the fastest", "cost": "the cheapest"}.get(name, f"the best {name}")
    exact = points[row, column] <= points[rows, column].min()
    return word if exact else f"{word} (to {EQUAL:.0%})"


def _by_weights(
    objectives: Sequence[Objective], points: Floats, front: NDArray[np.intp], weights: Mapping[str, float], reason: str
) -> Pick:
    vector = np.array([float(weights.get(o.name, 0.0)) for o in objectives])
    if not np.isfinite(vector).all() or (vector < 0).any() or vector.sum() == 0:
        raise UserError("weights must be >= 0, and one of them > 0", dict(weights), "for example accuracy=2, seconds=1")
    sums = _scaled(points, front) @ vector
    best = front[min(range(len(front)), key=lambda at: (sums[at], *points[front[at]]))]  # of equals the best in order
    shown = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
    return Pick(int(best), f"{reason}the smallest weighted sum ({shown}; scaled by the front's best and worst)")


def _reaching(
    values: Sequence[Mapping[str, float]],
    objectives: Sequence[Objective],
    points: Floats,
    front: NDArray[np.intp],
    targets: Mapping[str, float],
) -> NDArray[np.intp]:
    for name, goal in targets.items():
        column = next(i for i, o in enumerate(objectives) if o.name == name)
        limit = oriented({name: goal}, [objectives[column]])[0]
        reached = front[points[front, column] <= limit]
        if len(reached) == 0:
            best = values[front[np.argmin(points[front, column])]][name]
            also = " together with the other targets" if len(targets) > 1 else ""
            raise UserError(f"a point must reach {name} {goal:g}{also}", f"at best {best:g}", "lower it, or search on")
        front = reached
    return front


def _scaled(points: Floats, rows: NDArray[np.intp]) -> Floats:
    ideal, nadir = bounds(points)
    return (points[rows] - ideal) / np.where(nadir > ideal, nadir - ideal, 1.0)


def _front(points: Floats) -> NDArray[np.intp]:
    front = np.flatnonzero(nondominated(points))
    if len(front) == 0:
        raise UserError(
            "a front needs a trial that finished", "none", "search longer, or look at the failures' reasons"
        )
    return front


def _checked(points: Floats) -> Floats:
    points = np.asarray(points, dtype=float)
    if points.ndim != 2:
        raise ValueError(f"points must have shape (n, k), not {points.shape}")
    return points


# The scale on which a search sees the values of an objective.
#
# A Gaussian process assumes a smooth objective with even noise, and TPE weighs fronts by hypervolume. Training times
# that span three decades look to both like a few slow trials and nothing else. Early stopping, which ranks the trials
# of a front by their distances, has the same problem. A monotone scale, chosen from the data, spreads the values
# evenly. It keeps all ranks, so the Pareto front does not change, and reported values stay as they are (Snoek et al.
# 2014, "Input Warping", does the same to inputs; Salinas et al. 2020, "A Quantile-based Approach for Hyperparameter
# Transfer Learning", does it to objectives).

ENOUGH = 8  # values, before their distribution counts
HEAVY = 1.0  # skewness from which a tail is heavy: that of a normal sample of 8 is beyond it once in 20 times
FAR = 3.0  # skewness from which neither mean nor spread describe where most values are


@dataclass(frozen=True)
class Scale:
    """Maps values of one objective to the values that samplers see.

    ``raw``: as they are. ``log``: their logarithm. ``rank``: the normal quantile of their rank among ``known``.
    """

    name: Literal["raw", "log", "rank"] = "raw"
    known: tuple[float, ...] = ()

    def __call__(self, value: float) -> float:
        if self.name == "log":
            return math.log(value)
        if self.name == "rank":
            below, above = np.searchsorted(self.known, value), np.searchsorted(self.known, value, side="right")
            return NormalDist().inv_cdf((float(below + above) / 2 + 0.5) / (len(self.known) + 1))
        return value


RAW = Scale()


def scale_of(values: Sequence[float]) -> Scale:
    """Return the scale that suits ``values`` of an objective, whatever their order.

    Positive values with a heavy tail to the right get a logarithm. A tail that a logarithm does not even out, or a
    heavy tail to the left, gets ranks. Other values stay raw.
    """
    if len(values) < ENOUGH:
        return RAW
    x = np.sort(np.array(values, dtype=float))
    raw = skewness(x)
    if raw > HEAVY and x[0] > 0:
        logs = abs(skewness(np.log(x)))
        if logs < min(raw, FAR):
            return Scale("log")
    return Scale("rank", tuple(map(float, x))) if abs(raw) > FAR else RAW


def on_scales(points: Floats) -> Floats:
    """Return each column of ``points`` (n, objectives) on the scale that suits it; ranks are kept.

    Callers often negate a maximised objective, so a column of negative values has the scale of its magnitudes.
    """
    columns = []
    for column in points.T:
        sign = -1.0 if bool(np.all(column < 0)) else 1.0
        scale = scale_of(list(sign * column))
        columns.append([sign * scale(float(value)) for value in sign * column])
    return np.array(columns, dtype=float).reshape(points.T.shape).T


def skewness(x: Floats) -> float:
    """Return the third standardised moment; 0 where all values are equal."""
    x = x / (float(np.abs(x).max()) or 1.0)  # else the squares of large values overflow
    centred = x - x.mean()
    spread = math.sqrt(float(np.mean(centred**2)))
    if spread <= 1e-12:
        return 0.0
    return float(np.mean((centred / spread) ** 3))
