"""What the search is worth against the naive rule: the hypervolumes of both, at equal budget. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from elastune.core.text import count, duration
from elastune.frontier.criteria import FrontierCriteria
from elastune.frontier.trainings import Spent, Training
from elastune.frontier.ways import StepKind
from elastune.journal.records import FrontierRow
from elastune.search.analysis.front import hypervolume, nondominated


@dataclass(frozen=True)
class Volumes:
    """Parts of one box, from the best to a tenth beyond the worst of any point; ``note``: what was compared."""

    naive: float
    tuned: float
    note: str


def volumes(
    rows: Sequence[FrontierRow],
    naive: Sequence[Training],
    searched: Sequence[Spent],
    by: FrontierCriteria,
    kind_of: Callable[[Training], StepKind],
) -> Volumes:
    """Of the naive rows, and of what the search had found when it had used as much.

    ``naive``: the trainings of the naive rule; their worker-seconds, as they were spent here, are the budget.
    ``searched``: all trainings of the search, in the order in which they ended or paused. They count until they have
    used the budget, each as one point by steps of ``kind_of`` it, those of the workers that it was trained for; the
    front of these by validation is scored on held-out data, as naive rows are. Nothing of the naive rule is among them.
    Time and cost count by their logarithm: twice as fast is worth the same anywhere.
    """
    budget_s = sum(t.worker_seconds for t in naive)
    used = np.cumsum([each.worker_seconds for each in searched])
    inside = [each for each, _ in takewhile(lambda pair: pair[1] <= budget_s, zip(searched, used, strict=True))]
    found = [each.training for each in inside if each.training is not None and each.training.run is not None]
    chosen = _front(found, by, kind_of)
    before = [[_sign(by) * r.quality, r.seconds, r.cost] for r in rows if r.role == "naive"]
    after = [_point(t, by, kind_of(t), _scored(t, by)) for t in chosen]
    table = np.array(before + after).reshape(-1, 3)
    note = (
        f"At equal budget: the naive rule's {count(len(naive), 'training')} took {_spent(budget_s)}; of the search "
        f"count the first {len(inside)} of {count(len(searched), 'training')}, which took as much or less, each with "
        "its one seed"
    )
    if not len(table):
        return Volumes(0.0, 0.0, note)
    table[:, 1:] = np.log(table[:, 1:])
    low, high = table.min(axis=0), table.max(axis=0)
    scaled = (table - low) / np.where(high > low, high - low, 1.0)
    reference = np.full(3, 1.1)
    box = float(np.prod(reference))
    parts = [hypervolume(part, reference) / box for part in (scaled[: len(before)], scaled[len(before) :])]
    return Volumes(parts[0], parts[1], note)


def _front(found: Sequence[Training], by: FrontierCriteria, kind_of: Callable[[Training], StepKind]) -> list[Training]:
    """The search's own choice: by validation, which is all that it sees."""
    if not found:
        return []
    points = [_point(t, by, kind_of(t), t.result.metrics[by.quality.name]) for t in found]
    keep = nondominated(np.array(points))
    return [training for training, on_front in zip(found, keep, strict=True) if on_front]


def _point(training: Training, by: FrontierCriteria, kind: StepKind, quality: float) -> list[float]:
    seconds, _ = by.seconds(training, kind)
    return [_sign(by) * quality, seconds, by.cost(kind.workers, seconds)]


def _scored(training: Training, by: FrontierCriteria) -> float:
    metrics = training.result.metrics
    return metrics.get(f"test_{by.quality.name}", metrics[by.quality.name])


def _sign(by: FrontierCriteria) -> float:
    return -1.0 if by.quality.direction == "max" else 1.0


def _spent(worker_seconds: float) -> str:
    return f"{duration(worker_seconds)} of one worker"
