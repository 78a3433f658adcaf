"""Which checkpoints of a run stay: ``last:3,every:1000,best:accuracy`` as a value, and what it decides to delete.

The decision is pure: it takes the steps and metrics of the checkpoints that exist, and returns the steps to delete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from elastune.core.errors import UserError
from elastune.core.fields import Notation

Direction = Literal["max", "min"]
DEFAULT_LAST = 2
MOST = 10**9
OPTION = "--keep-checkpoints"
NOTATION = "last:N,every:STEPS,best:METRIC[:max|min]"
FIX = "such as last:3,every:1000,best:accuracy"
_NUMBER = re.compile(r"[0-9]{1,10}")
_METRIC = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,79}")
_FALLING = re.compile(r"loss|error|perplexity|(^|_)(mse|mae|rmse|nll)($|_)", re.IGNORECASE)


@dataclass(frozen=True)
class SavedCheckpoint:
    """The checkpoint after ``step`` steps, with the newest ``metrics`` that the run had reported by then."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class KeepCheckpoints:
    """The checkpoints that a run keeps: what any of the rules keeps, stays.

    Attributes:
        last: The newest so many. The newest one always stays: a run resumes from it.
        every: Those after a multiple of so many steps; None: no such rule.
        best: The metrics of which the checkpoint with the best value stays, each with its direction.
        good: The step up to which every worker was verified: the newest one up to there stays; None: no such rule.

    Example:
        >>> KeepCheckpoints.parse("last:3,every:1000,best:accuracy").every
        1000
    """

    last: int = DEFAULT_LAST
    every: int | None = None
    best: tuple[tuple[str, Direction | Literal[""]], ...] = ()
    good: int | None = None

    @classmethod
    def parse(cls, text: str) -> KeepCheckpoints:
        """Return the rules of a text, with commas between them. A metric without a direction has "" until ``directed``.

        Raises:
            UserError: For a rule that is not known, is given twice, or has a wrong number, metric or direction.
        """
        last, every, best = None, None, dict[str, Direction | Literal[""]]()
        for part in text.split(","):
            kind, _, value = part.strip().partition(":")
            if kind == "best":
                metric, direction = _metric(part, value)
                if metric in best:
                    raise UserError(f"{OPTION} names a metric once", metric, "remove the others")
                best[metric] = direction
            elif kind == "last" and last is None:
                last = _number(part, value)
            elif kind == "every" and every is None:
                every = _number(part, value)
            elif kind in ("last", "every"):
                raise UserError(f"{OPTION} has each rule once", kind, "remove the others")
            else:
                raise UserError(f"{OPTION} must be {NOTATION}", repr(part.strip())[:100], FIX)
        return cls(DEFAULT_LAST if last is None else last, every, tuple(best.items()))

    def __str__(self) -> str:
        parts = [f"last:{self.last}", *([] if self.every is None else [f"every:{self.every}"])]
        return ",".join([*parts, *(f"best:{metric}:{direction}".rstrip(":") for metric, direction in self.best)])

    def directed(self, objectives: Mapping[str, str]) -> KeepCheckpoints:
        """Return these rules with a direction for each metric: that of the objective, else "max".

        Raises:
            UserError: For a direction against the objective, and for a metric that may be one to minimise, such as a
                loss, which is no objective and has no direction.

        Example:
            >>> KeepCheckpoints.parse("best:val_loss").directed({"val_loss": "min"}).best
            (('val_loss', 'min'),)
        """
        best = [(metric, _direction(metric, direction, objectives.get(metric))) for metric, direction in self.best]
        return replace(self, best=tuple(best))


NEWEST_TWO = KeepCheckpoints()
"""The default: the newest, and the one before it in case the newest is damaged."""


def to_delete(rules: KeepCheckpoints, saved: Sequence[SavedCheckpoint]) -> list[int]:
    """Return the steps of the checkpoints that no rule keeps, in ascending order.

    The newest one always stays. The best is decided among the checkpoints that have the metric. Of several with the
    best value the first stays: a later one may only repeat the report before it. Where none has the metric, the other
    rules decide alone.

    Example:
        >>> to_delete(KeepCheckpoints(last=1, every=20), [SavedCheckpoint(step, {}) for step in (10, 20, 30, 40, 50)])
        [10, 30]
    """
    in_order = sorted(saved, key=lambda each: each.step)
    stay = {each.step for each in in_order[-max(1, rules.last) :]}
    if rules.every is not None:
        stay |= {each.step for each in in_order if each.step % rules.every == 0}
    if rules.good is not None:
        stay |= set([each.step for each in in_order if each.step <= rules.good][-1:])
    for metric, direction in rules.best:
        with_it = [each for each in in_order if metric in each.metrics]
        if with_it:
            sign = -1.0 if direction == "min" else 1.0
            stay.add(max(with_it, key=lambda each: sign * each.metrics[metric]).step)  # max: the first of equal ones
    return [each.step for each in in_order if each.step not in stay]


def _number(part: str, value: str) -> int:
    if not _NUMBER.fullmatch(value) or not 1 <= int(value) <= MOST:
        raise UserError(f"a number in {OPTION} must be whole and from 1 to {MOST:,}", repr(part.strip())[:100], FIX)
    return int(value)


def _metric(part: str, value: str) -> tuple[str, Direction | Literal[""]]:
    metric, colon, direction = value.partition(":")
    if not _METRIC.fullmatch(metric) or (colon and direction not in ("max", "min")):
        rule = f"the best in {OPTION} is best:METRIC, best:METRIC:max or best:METRIC:min"
        raise UserError(rule, repr(part.strip())[:100], "such as best:accuracy, or best:loss:min")
    return metric, direction  # type: ignore[return-value]


def _direction(metric: str, direction: str, objective: str | None) -> Direction:
    if objective is not None and direction not in ("", objective):
        rule = "the best checkpoint is by the direction of the objective"
        raise UserError(rule, f"best:{metric}:{direction}, objective {metric}:{objective}", f"use best:{metric}")
    chosen = objective or direction
    if not chosen and _FALLING.search(metric):
        rule = "the best by a metric that may be one to minimise needs a direction"
        raise UserError(rule, f"best:{metric}", f"use best:{metric}:min, or best:{metric}:max")
    return "min" if chosen == "min" else "max"


def _check(text: str, _option: str) -> str:
    KeepCheckpoints.parse(text)
    return text


KEEP_CHECKPOINTS = Notation(NOTATION, _check, lambda text: text)
"""How a command line writes the rules. The value stays a text: a study reads it again, with its objectives."""
