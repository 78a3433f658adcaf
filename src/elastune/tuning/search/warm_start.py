"""Warm start: which results and configurations a search takes over from earlier studies.

Results of another context (other data, another model, other hardware where time is an objective) are not comparable.
To learn from them would need a model of how the contexts relate (Swersky et al. 2013, "Multi-task Bayesian
optimization"). But good settings of an earlier study are a good beginning for this one. Feurer et al. 2015,
"Initializing Bayesian hyperparameter optimization via meta-learning", sort earlier data sets by distance, such as in
the logarithm of their size, and try the best settings of the nearest first.
So this search tries some of the best earlier configurations first: fewer, the less similar the context is, and at most
a share of all trials, so that a misleading source costs little. Values of earlier trials count as results only where
the context is the same.
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
from elastune.tuning.search.constraint import Constraint, violations
from elastune.tuning.search.front import representative
from elastune.tuning.search.objective import Objective, clock, oriented
from elastune.tuning.search.schedule import RungEntry, ranked

TOLD = 100  # earlier trials that samplers learn from: a proposal of ``gp`` then takes 0.16 s, and 0.5 s at 300
PROPOSED = 5  # configurations that one earlier study of the same context proposes
SHARE = 0.2  # of the trials of a study, that all earlier studies together may propose
_HALF = 0.5  # the similarity of properties that differ, or may differ, and have no distance


@dataclass(frozen=True)
class Context:
    """The fixed conditions of a study, which decide whether its results are comparable with those of another study.

    Attributes:
        program: A digest of the trained program; "": unknown.
        data: The data set, as far as it is known.
        parameters: Number of parameters of the model; 0: unknown.
        hardware: The hardware; None where no objective and no constraint depends on it.
    """

    program: str
    data: DataContext
    parameters: int
    hardware: str | None

    @property
    def known(self) -> bool:
        """Whether equal ``data`` are surely the same: there are none, or a digest of their contents exists."""
        return not self.data.samples or bool(self.data.digest)


def similarity(context: Context, earlier: Context) -> float:
    """Return the similarity of two contexts from 0 to 1: a product over their properties, 1 only if all are the same.

    Sizes of ratio r count as 1 / (1 + |log10 r|), so that a factor of ten halves the similarity. Another program, other
    hardware and an unknown size halve it, too. Other data halve it, and halve it again if their samples have another
    form. Numbers of classes are sizes; for the share of the largest class, half of the difference counts.
    """
    data, other = context.data, earlier.data
    sizes = _likeness(data.samples, other.samples) * _likeness(context.parameters, earlier.parameters)
    classes = _likeness(data.classes, other.classes) * (1 - abs(data.largest_class - other.largest_class) / 2)
    differing = (context.program != earlier.program) + (context.hardware != earlier.hardware)
    differing += (data.digest != other.digest) + (data.sample != other.sample)
    return float(sizes * classes * _HALF**differing)


def differences(context: Context, earlier: Context) -> list[str]:
    """Return the differences of two contexts, in words; none where the contexts are the same."""
    data, other = context.data, earlier.data
    differing = {
        "another program": context.program != earlier.program,
        f"{data.samples} samples, not {other.samples}": data.samples != other.samples,
        f"samples of {data.sample or 'what is not known'}, not {other.sample or 'known'}": data.sample != other.sample,
        f"{data.classes} classes, not {other.classes}": data.classes != other.classes,
        "other data": data.digest != other.digest and bool(data.digest) and bool(other.digest),
        "data that could not be compared": not (context.known and earlier.known),
        f"{context.parameters} parameters, not {earlier.parameters}": context.parameters != earlier.parameters,
        f"{context.hardware}, not {earlier.hardware}": context.hardware != earlier.hardware,
    }
    return [words for words, differs in differing.items() if differs]


def _likeness(size: int, earlier: int) -> float:
    if size == earlier:
        return 1.0
    return 1 / (1 + abs(math.log10(size / earlier))) if size and earlier else _HALF


def shares(similarities: Sequence[float], trials: float | None) -> list[int]:
    """Return how many trials each earlier study may propose, in proportion to the ``similarities`` of their contexts.

    All together propose at most ``SHARE`` of the ``trials`` that the study will have, but at least one. ``trials`` None
    means that their number is unknown. The most similar studies come first.
    """
    left = math.inf if trials is None else max(1, int(SHARE * trials))
    counts = [0] * len(similarities)
    for index in sorted(range(len(similarities)), key=lambda index: -similarities[index]):
        counts[index] = int(min(left, math.floor(PROPOSED * similarities[index] + 0.5)))
        left -= counts[index]
    return counts


def clocked(objectives: Sequence[Objective], constraints: Sequence[Constraint]) -> bool:
    """Return whether any objective or constraint is about a time, or its cost."""
    names = {o.name for o in objectives}.union(*(c.names for c in constraints))
    return any(clock(name) for name in names)


def fit(space: Space, params: Mapping[str, Any]) -> Sample | str:
    """Return the configuration with exactly these parameters, or the reason why ``space`` has none."""
    reasons: list[str] = []

    def choose(name: str, distribution: BaseDistribution) -> Any:
        if name not in params:
            reasons.append(f"{name} is missing")
        elif not _allows(distribution, params[name]):
            reasons.append(f"{name} is out of range")
        else:
            return params[name]
        return spaces.draw(distribution, np.random.default_rng(0))

    sample = spaces.compose(space, choose)
    reasons += [f"{name} is not searched here" for name in params if name not in sample.params]
    return reasons[0] if reasons else sample


def _allows(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return spaces.contains(distribution, value)
    except (ValueError, TypeError):  # text for a number, or no such choice
        return False


@dataclass(frozen=True)
class TransferableTrial:
    """An earlier trial that fits the present space: its configuration in this space, and its metrics."""

    sample: Sample
    metrics: Mapping[str, float]


def lacking(names: Iterable[str], trial: TransferableTrial) -> str:
    """Return the first of ``names`` that is neither a setting nor a finite metric of the trial, else ""."""
    present = {*trial.sample.values, *(name for name, value in trial.metrics.items() if math.isfinite(value))}
    return next((name for name in names if name not in present), "")


def best_of(
    trials: Sequence[TransferableTrial], objectives: Sequence[Objective], constraints: Sequence[Constraint], k: int
) -> list[int]:
    """Return indices of the ``k`` trials to try first: those that represent the front, then the next in rank.

    Only trials that hold the constraints count, and of equal configurations only the first.
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
    """Return indices of at most ``k`` informative trials, in order: the best half, and an even choice of the others."""
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
    named_values = [{**trial.sample.values, **trial.metrics} for trial in trials]
    return points, [max(violations(constraints, names).values(), default=0.0) for names in named_values]
