"""Whether quality holds: at the target, or against the one-worker baseline; said only of what the seeds show. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from elastune.frontier.criteria import FrontierCriteria
from elastune.frontier.trainings import Training
from elastune.plan.intervals import Comparison, non_inferiority

Word = Literal["holds", "not shown", "falls"]


@dataclass(frozen=True)
class Judgement:
    """``values``: of the seeds that did not diverge; ``interval`` of their mean; ``samples`` of the test set.

    ``against``: the baseline on the same seeds; None where no seed was trained for both. ``word``: with a target, where
    the interval lies; without one, what the comparison says. Where a seed diverged nothing is shown to hold.
    """

    word: Word
    values: tuple[float, ...]
    interval: tuple[float, float] | None
    samples: int | None
    against: Comparison | None


def judge(
    trainings: Sequence[Training], baseline: Sequence[Training], by: FrontierCriteria, metric: str
) -> Judgement | None:
    """By ``metric``, the quality on one of its data; None where all ``trainings`` diverged."""
    good = [t for t in trainings if t.run is not None]
    if not good:
        return None
    values = [t.result.metrics[metric] for t in good]
    samples = _samples(good, metric)
    interval, against = by.interval(values, samples), _against(good, baseline, by, metric)
    against_word: Word = "not shown" if against is None else against.verdict
    word = against_word if by.target is None else _at_target(interval, by)
    diverged = len(trainings) - len(good)
    if diverged and word == "holds":
        word = "not shown"
    return Judgement("falls" if diverged > len(good) else word, tuple(values), interval, samples, against)


def _at_target(interval: tuple[float, float] | None, by: FrontierCriteria) -> Word:
    """Holds where all of the interval is at the target, falls where nothing of it is."""
    if interval is None:
        return "not shown"
    reaching = [by.reaches(end) for end in interval]
    return "holds" if all(reaching) else "not shown" if any(reaching) else "falls"


def _against(
    good: Sequence[Training], baseline: Sequence[Training], by: FrontierCriteria, metric: str
) -> Comparison | None:
    base = {t.seed: t.result.metrics[metric] for t in baseline if t.run is not None and metric in t.result.metrics}
    losses = [by.loss(t.result.metrics[metric], base[t.seed]) for t in good if t.seed in base]
    return non_inferiority(losses, by.margin_at(fmean(base.values()))) if losses else None


def _samples(good: Sequence[Training], metric: str) -> int | None:
    """That the metric was measured on; None where a training does not tell."""
    told = [t.run.evaluated_on.get(metric) for t in good if t.run is not None]
    known = [n for n in told if n is not None]
    return min(known) if len(known) == len(good) else None
