"""How long a training takes to reach a target: a comparison of reported metrics, written like a constraint. Pure.

A program reports its metrics only now and then. The target was therefore reached between the last report that missed it
and the first report that did not, and the time of the latter counts. A training that never reports the target has no
time (it is censored): only its smallest shortfall is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from elastune.core.errors import UserError
from elastune.core.journal.records import Reported
from elastune.tuning.search.constraint import Constraint

SECONDS_TO_TARGET = "seconds_to_target"
"""The name of this time in objectives and constraints, in seconds of training."""


@dataclass(frozen=True)
class TargetReached:
    """When a training reached its target.

    Attributes:
        seconds: Seconds of training until the first report that reaches the target.
        missed_s: Seconds until the last report before, which missed it; 0 without such a report.
        epoch: The epoch of the first report that reaches it.
    """

    seconds: float
    missed_s: float
    epoch: int


def parse_target(text: str) -> Constraint:
    """Return ``text`` as a target. Raises ``UserError`` if it is not a comparison, or names a held-out metric."""
    target = Constraint.parse(text)
    if hidden := sorted(name for name in target.names if name.startswith("test_")):
        raise UserError("no search sees held-out metrics", hidden[0], "let the target name a validation metric")
    return target


def time_to(target: Constraint, reports: Iterable[Reported], settings: Mapping[str, object]) -> TargetReached | None:
    """Return when ``reports``, in their order, first reach ``target``; None if they never do.

    ``settings`` are further names of the target. If a report lacks a metric, its value from earlier reports counts.
    """
    missed_s = 0.0
    for report, violation in _judged(target, reports, settings):
        if violation <= 0:
            return TargetReached(report.seconds, missed_s, report.epoch)
        missed_s = report.seconds
    return None


def shortfall(target: Constraint, reports: Iterable[Reported], settings: Mapping[str, object]) -> float:
    """Return by how much the best report misses ``target`` (<= 0: it reaches it); infinite if no report decides it."""
    return min((violation for _, violation in _judged(target, reports, settings)), default=math.inf)


def _judged(
    target: Constraint, reports: Iterable[Reported], settings: Mapping[str, object]
) -> Iterator[tuple[Reported, float]]:
    values: dict[str, object] = dict(settings)
    for report in reports:
        values |= {name: value for name, value in report.metrics.items() if not name.startswith("test_")}
        values["seconds"] = report.seconds
        if target.decidable(values):
            yield report, target.violation(values)
