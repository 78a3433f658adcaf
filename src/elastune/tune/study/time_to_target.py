"""How long a training takes to reach a target: a comparison of reported metrics, written as a constraint is. Pure.

A program tells its metrics now and then, so the moment itself is not seen: the target was reached after the last
report that missed it and by the first that did not. What counts is the latter. A training that never reports it has no
time: it is censored, and how far it fell short at its best is all that is known of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from elastune.core.errors import UserError
from elastune.core.journal.records import Reported
from elastune.tune.search.constraint import Constraint

SECONDS_TO_TARGET = "seconds_to_target"
"""The name by which objectives and constraints speak of it, in seconds of training; ``search.space`` knows its unit."""


@dataclass(frozen=True)
class TargetReached:
    """``seconds`` of training until the first report that reaches it, after ``epoch`` epochs; ``missed_s``: until the
    last report before, which did not (0 where there was none)."""

    seconds: float
    missed_s: float
    epoch: int


def parse_target(text: str) -> Constraint:
    """``text`` as a target. Raises ``UserError`` where it is no comparison, or speaks of what no search may see."""
    target = Constraint.parse(text)
    if hidden := sorted(name for name in target.names if name.startswith("test_")):
        raise UserError("no search sees held-out metrics", hidden[0], "let the target name a validation metric")
    return target


def time_to(target: Constraint, reports: Iterable[Reported], settings: Mapping[str, object]) -> TargetReached | None:
    """When ``reports``, in their order, first reach ``target``; None where they never do.

    ``settings``: what else the target may name. A report that does not tell all of it counts with what was told before.
    """
    missed_s = 0.0
    for report, violation in _judged(target, reports, settings):
        if violation <= 0:
            return TargetReached(report.seconds, missed_s, report.epoch)
        missed_s = report.seconds
    return None


def shortfall(target: Constraint, reports: Iterable[Reported], settings: Mapping[str, object]) -> float:
    """By how much the best of ``reports`` misses ``target`` (<= 0: it does not); infinite where none tells of it."""
    return min((violation for _, violation in _judged(target, reports, settings)), default=math.inf)


def _judged(
    target: Constraint, reports: Iterable[Reported], settings: Mapping[str, object]
) -> Iterator[tuple[Reported, float]]:
    told: dict[str, object] = dict(settings)
    for report in reports:
        told |= {name: value for name, value in report.metrics.items() if not name.startswith("test_")}
        told["seconds"] = report.seconds
        if target.decidable(told):
            yield report, target.violation(told)
