"""The front of a study as it forms: which trials are on it, how it grew, and how sure their values are.

Each complete trial costs a look at the front alone, however many trials there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastune.core.journal.folds import TrialSummary
from elastune.tuning.search.front import default_reference, hypervolume
from elastune.tuning.search.objective import Objective

MOST_POINTS = 1500  # of the growth of the front


@dataclass(frozen=True)
class _Step:
    """A trial that changed the front when it ended."""

    at_s: float
    worker_s: float
    point: tuple[float, ...]


@dataclass
class FormingFront:
    """The complete trials of the search, their front, and how it grew.

    Attributes:
        objectives: What the front is of.
        version: Counts the changes of the front.
    """

    objectives: tuple[Objective, ...] = ()
    version: int = 0
    _front: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)  # trial, point: smaller is better
    _best: tuple[float, int] | None = None
    _steps: list[_Step] = field(default_factory=list)
    _heights: list[float] = field(default_factory=list)  # of the steps, as far as they were asked for
    _reference: tuple[float, ...] | None = None

    def add(self, trial: int, values: Mapping[str, float], at_s: float, worker_s: float) -> None:
        """Add a complete trial that ended ``at_s`` into the study, after ``worker_s`` worker-seconds of all."""
        point = tuple(self._sign(each) * values.get(each.name, math.nan) for each in self.objectives)
        if not point or not all(map(math.isfinite, point)):
            return
        if self._best is None or point[0] < self._best[0]:
            self._best = point[0], trial
        if any(_covers(other, point) and other != point for _, other in self._front):
            return
        self.version += 1
        is_new = all(other != point for _, other in self._front)
        self._front = [(n, other) for n, other in self._front if other == point or not _covers(point, other)]
        self._front.append((trial, point))
        if is_new:
            self._steps.append(_Step(at_s, worker_s, point))

    @staticmethod
    def _sign(objective: Objective) -> float:
        return -1.0 if objective.direction == "max" else 1.0

    @property
    def trials(self) -> list[int]:
        """The trials that no other one dominates, by number."""
        return sorted(n for n, _ in self._front)

    @property
    def best(self) -> tuple[int, Objective, float] | None:
        """The best trial by the first objective: its number, the objective, and its value."""
        if self._best is None:
            return None
        value, trial = self._best
        return trial, self.objectives[0], self._sign(self.objectives[0]) * value

    def growth(self) -> dict[str, list[float]]:
        """The growth of the front over time and worker-seconds: its hypervolume; with one objective the best value.

        Only trials that changed it count, evenly thinned to ``MOST_POINTS``.
        """
        self._measure()
        every = max(1, math.ceil(len(self._steps) / MOST_POINTS))
        kept = [i for i in range(len(self._steps)) if i % every == 0 or i == len(self._steps) - 1]
        return {
            "x": [self._steps[i].at_s for i in kept],
            "worker_s": [self._steps[i].worker_s for i in kept],
            "y": [self._heights[i] for i in kept],
        }

    def _measure(self) -> None:
        """Measure the steps that were not measured yet; all of them anew if the reference point has moved."""
        import numpy as np

        if len(self._heights) == len(self._steps):
            return
        if len(self.objectives) == 1:
            sign = self._sign(self.objectives[0])
            self._heights += [sign * step.point[0] for step in self._steps[len(self._heights) :]]
            return
        reference = default_reference(np.array([point for _, point in self._front]))
        if self._reference != tuple(reference):
            self._reference, self._heights = tuple(reference), []
        begin = len(self._heights)
        points = np.array([step.point for step in self._steps])
        every = max(1, (len(points) - begin) // 100)  # a long journal at once: a hundred heights are enough
        for i in range(begin, len(points)):
            is_measured = (i - begin) % every == 0 or i == len(points) - 1 or not self._heights
            self._heights.append(hypervolume(points[: i + 1], reference) if is_measured else self._heights[-1])


def _covers(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether ``a`` is at least as good as ``b`` in everything."""
    return all(x <= y for x, y in zip(a, b, strict=True))


def interval(objective: Objective, alike: Sequence[TrialSummary]) -> tuple[float, float] | None:
    """Return the 95 % interval of an objective of trials with equal settings; None if nothing is known of its error.

    Several trials: of their mean. One trial: of the share of test samples, if its program said how many there were.
    """
    found: list[tuple[float, int | None]] = []
    for life in alike:
        end = life.finished
        value = None if end is None else {**end.metrics, **end.values}.get(objective.name)
        if end is not None and value is not None and objective.low <= value <= objective.high and math.isfinite(value):
            found.append((value, None if end.run is None else end.run.evaluated_on.get(objective.name)))
    counts = {samples for _, samples in found}
    samples = counts.pop() if len(counts) == 1 else None
    width = objective.high - objective.low
    if (len(found) == 1 and (not samples or not math.isfinite(width))) or not found:
        return None
    from elastune.core.plan.confidence_intervals import bounded_ci, wilson  # here: it brings SciPy along

    if len(found) > 1:
        return bounded_ci([value for value, _ in found], objective.low, objective.high, samples or None)
    assert samples
    low, high = wilson(round((found[0][0] - objective.low) / width * samples), samples)
    return objective.low + width * low, objective.low + width * high
