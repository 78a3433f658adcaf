"""Warm start: what a search takes over from earlier studies, and how far it believes their results.

Results of another context (other data, another model, other hardware where time is an objective) are not comparable:
learning from them as well would need a model of how the contexts go together (Swersky et al. 2013, "Multi-task Bayesian
optimization"). The settings that were good there are still a good beginning here (Feurer et al. 2015, "Initializing
Bayesian hyperparameter optimization via meta-learning": sort the earlier data sets by the distance of what is known of
them, such as the logarithm of their size, and try the best of the nearest first). So some of the best are tried first:
the fewer, the less alike the context is, and no more than a share of the trials that there will be, so that a source
that misleads costs little. The values of trials are believed only where the context is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution

from elastune.core.journal.records import DataContext
from elastune.train.program import space as spaces
from elastune.train.program.space import Sample, Space
from elastune.tune.search.constraint import Constraint, violations
from elastune.tune.search.front import representative
from elastune.tune.search.objective import Objective, clock, oriented
from elastune.tune.search.schedule import RungEntry, ranked

TOLD = 100  # trials that samplers are told of: a Gaussian process's proposal takes 0.16 s then, and 0.5 s at 300
PROPOSED = 5  # of the best of one earlier study of the same context
SHARE = 0.2  # of a study's trials that earlier studies may propose, all together
_HALF = 0.5  # the similarity of what differs, or may, and has no distance


@dataclass(frozen=True)
class Context:
    """What a study could not choose. ``program``: a digest of what it trains ("": not known); sizes 0 where not known.

    ``data``: as far as it is known. ``hardware``: None where nothing that is optimised or constrained depends on it.
    """

    program: str
    data: DataContext
    parameters: int
    hardware: str | None

    @property
    def known(self) -> bool:
        """Whether data that look the same are: where there are any, their contents were seen."""
        return not self.data.samples or bool(self.data.digest)


def similarity(here: Context, there: Context) -> float:
    """From 0 to 1, and 1 if and only if all is the same: a product over what a context is made of.

    Sizes of ratio r count as 1 / (1 + |log10 r|), so that a factor of ten halves it, as another program, other hardware
    and an unknown size do. Other data halve it, too, and again if their samples are made otherwise; numbers of classes
    are sizes, and of the largest class's share the difference counts.
    """
    data, other = here.data, there.data
    sizes = _likeness(data.samples, other.samples) * _likeness(here.parameters, there.parameters)
    classes = _likeness(data.classes, other.classes) * (1 - abs(data.largest_class - other.largest_class) / 2)
    differing = (here.program != there.program) + (here.hardware != there.hardware)
    differing += (data.digest != other.digest) + (data.sample != other.sample)
    return float(sizes * classes * _HALF**differing)


def differences(here: Context, there: Context) -> list[str]:
    """What makes two contexts differ, in words; empty where nothing does, or nothing is known to."""
    data, other = here.data, there.data
    told = {
        "another program": here.program != there.program,
        f"{data.samples} samples, not {other.samples}": data.samples != other.samples,
        f"samples of {data.sample or 'what is not known'}, not {other.sample or 'known'}": data.sample != other.sample,
        f"{data.classes} classes, not {other.classes}": data.classes != other.classes,
        "other data": data.digest != other.digest and bool(data.digest) and bool(other.digest),
        "data that could not be compared": not (here.known and there.known),
        f"{here.parameters} parameters, not {there.parameters}": here.parameters != there.parameters,
        f"{here.hardware}, not {there.hardware}": here.hardware != there.hardware,
    }
    return [words for words, differs in told.items() if differs]


def _likeness(here: int, there: int) -> float:
    if here == there:
        return 1.0
    return 1 / (1 + abs(math.log10(here / there))) if here and there else _HALF


def shares(similarities: Sequence[float], trials: float | None) -> list[int]:
    """How many trials each of the earlier studies may propose, by the ``similarities`` of their contexts.

    In proportion to that; all together at most their share of the ``trials`` that the study will have (None: nobody
    knows; one at least), given to the most similar first.
    """
    left = math.inf if trials is None else max(1, int(SHARE * trials))
    found = [0] * len(similarities)
    for at in sorted(range(len(similarities)), key=lambda at: -similarities[at]):
        found[at] = int(min(left, math.floor(PROPOSED * similarities[at] + 0.5)))
        left -= found[at]
    return found


def clocked(objectives: Sequence[Objective], constraints: Sequence[Constraint]) -> bool:
    """Whether anything that is optimised or constrained is a time, or what it costs."""
    names = {o.name for o in objectives}.union(*(c.names for c in constraints))
    return any(clock(name) for name in names)


def fit(space: Space, params: Mapping[str, Any]) -> Sample | str:
    """The configuration with exactly these parameters; or why there is none in today's ``space``, in words."""
    wrong: list[str] = []

    def choose(name: str, distribution: BaseDistribution) -> Any:
        if name not in params:
            wrong.append(f"{name} is missing")
        elif not _allows(distribution, params[name]):
            wrong.append(f"{name} is out of range")
        else:
            return params[name]
        return spaces.draw(distribution, np.random.default_rng(0))

    sample = spaces.compose(space, choose)
    wrong += [f"{name} is not searched here" for name in params if name not in sample.params]
    return wrong[0] if wrong else sample


def _allows(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return bool(distribution._contains(distribution.to_internal_repr(value)))
    except (ValueError, TypeError):  # text for a number, or no such choice
        return False


@dataclass(frozen=True)
class TransferableTrial:
    """An earlier trial that fits: its configuration here, and its metrics."""

    sample: Sample
    metrics: Mapping[str, float]


def lacking(names: Iterable[str], found: TransferableTrial) -> str:
    """The first of ``names`` that is neither a setting nor a finite metric; "" where there is none."""
    known = {*found.sample.values, *(name for name, value in found.metrics.items() if math.isfinite(value))}
    return next((name for name in names if name not in known), "")


def best_of(
    trials: Sequence[TransferableTrial], objectives: Sequence[Objective], constraints: Sequence[Constraint], k: int
) -> list[int]:
    """Indices of the ``k`` trials to try first: those that stand for the front, then the next in rank.

    Only trials that hold the constraints, and of equal configurations the first.
    """
    points, broken = _judged(trials, objectives, constraints)
    valid = [i for i in range(len(trials)) if broken[i] <= 0]
    if not valid:
        return []
    front = [valid[i] for i in representative(points[valid], k)]
    order = [*front, *ranked([RungEntry(i, tuple(points[i]), broken[i]) for i in valid], len(valid))]
    chosen: dict[str, int] = {}
    for i in order:
        chosen.setdefault(repr(sorted(trials[i].sample.params.items())), i)
    return list(chosen.values())[:k]


def spread_of(
    trials: Sequence[TransferableTrial], objectives: Sequence[Objective], constraints: Sequence[Constraint], k: int
) -> list[int]:
    """Indices of at most ``k`` trials that tell the most, in order: the best half, and an even choice of the others."""
    if len(trials) <= k:
        return list(range(len(trials)))
    points, broken = _judged(trials, objectives, constraints)
    order = ranked([RungEntry(i, tuple(points[i]), broken[i]) for i in range(len(trials))], len(trials))
    best, others = order[: k // 2], order[k // 2 :]
    chosen = np.linspace(0, len(others) - 1, k - len(best)).round().astype(int)
    return sorted({*best, *(others[i] for i in chosen)})


def _judged(
    trials: Sequence[TransferableTrial], objectives: Sequence[Objective], constraints: Sequence[Constraint]
) -> tuple[Any, list[float]]:
    """Values, shape (n, objectives), smaller is better; and each trial's largest violation."""
    points = oriented([trial.metrics for trial in trials], objectives)
    known = [{**trial.sample.values, **trial.metrics} for trial in trials]
    return points, [max(violations(constraints, names).values(), default=0.0) for names in known]
