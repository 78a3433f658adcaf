"""Find constraints that no configuration can satisfy, before anything is run."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from optuna.distributions import FloatDistribution, IntDistribution

from elastune.core.errors import UserError
from elastune.search.space.constraint import Constraint, violations
from elastune.search.space.interval import ANY, Interval, bound, impossible
from elastune.search.space.space import Sample, Space, enumerate_all, probe

ENUMERATED = 2000  # configurations at most, to look at every one
PROBED = 1000
_FEW = 64  # different values among PROBED at most, to take them for all there are
_PRODUCT = 20_000  # combinations of such values at most, to look at every one
_FIX = "loosen it, or widen the space"


@dataclass(frozen=True)
class Domain:
    """What a name can be: one of ``values``, or where these are None anything in ``interval``."""

    interval: Interval = ANY
    values: tuple[Any, ...] | None = None


def check_feasible(
    space: Space, constraints: Sequence[Constraint], known: Mapping[str, object], seed: int = 0
) -> Literal["feasible", "unknown"]:
    """Raise ``UserError`` where the constraints contradict the space, what is ``known`` beside it, or each other.

    "feasible": some configuration satisfies all that can be decided before a run. "unknown": none of a thousand random
    ones does, yet nothing rules it out (an equality over continuous parameters is such a case); a search may try.
    """
    if not constraints:
        return "feasible"
    every = enumerate_all(space, ENUMERATED)
    samples = probe(space, PROBED, seed) if every is None else every
    satisfied = any(_holds(constraints, {**known, **sample.values}) for sample in samples)
    names = frozenset().union(*(c.names for c in constraints))
    _refuse_contradictions(constraints, {name: _domain(name, samples, known) for name in names})
    if satisfied:
        return "feasible"
    if every is None:
        return "unknown"
    least = min(samples, key=lambda s: len(_broken(constraints, {**known, **s.values})))
    broken = " and ".join(_broken(constraints, {**known, **least.values}))
    rule = f"some configuration must satisfy {_quoted(c.text for c in constraints)}"
    raise UserError(rule, f"none of the space's {len(samples)} does, the closest breaks {broken}", _FIX)


def _holds(constraints: Sequence[Constraint], values: Mapping[str, object]) -> bool:
    return not _broken(constraints, values)


def _broken(constraints: Sequence[Constraint], values: Mapping[str, object]) -> list[str]:
    return [text for text, violation in violations(constraints, values).items() if violation > 0]


def _domain(name: str, samples: Sequence[Sample], known: Mapping[str, object]) -> Domain:
    """Known names are what they are; a name that neither ``known`` nor the space sets is a metric: anything."""
    having = [sample for sample in samples if name in sample.values]
    if not having and name not in known:
        return Domain()
    found = {sample.values[name] for sample in having if isinstance(sample.values[name], int | float)}
    if name in known and len(having) < len(samples):
        found |= {known[name]}
    if len(found) <= _FEW:
        values = tuple(sorted(found))
        return Domain(Interval(values[0], values[-1]), values) if values else Domain()
    ranges = [sample.distributions.get(name) for sample in having]
    unchanged = all(sample.params.get(name) == sample.values[name] for sample in having)
    if unchanged and all(isinstance(d, IntDistribution | FloatDistribution) for d in ranges):
        bounds = [d for d in ranges if isinstance(d, IntDistribution | FloatDistribution)]
        return Domain(Interval(min(float(d.low) for d in bounds), max(float(d.high) for d in bounds)))
    return Domain()  # computed from parameters by the user's code: its bounds are not known


def _refuse_contradictions(constraints: Sequence[Constraint], domains: Mapping[str, Domain]) -> None:
    box = {name: _narrow(name, domain, constraints) for name, domain in domains.items()}
    for constraint in constraints:
        if impossible(constraint, box):
            rule = f"the constraint '{constraint.text}' must be satisfiable"
            raise UserError(rule, _ranges(constraint.names, box), _FIX)
    finite = {name: domain.values for name, domain in domains.items() if domain.values is not None}
    over_finite = [c for c in constraints if c.names <= set(finite)]
    names = sorted(frozenset().union(*(c.names for c in over_finite)))
    if not names or math.prod(len(finite[name]) for name in names) > _PRODUCT:
        return
    for values in itertools.product(*(finite[name] for name in names)):
        if _holds(over_finite, dict(zip(names, values, strict=True))):
            return
    rule = f"some configuration must satisfy {_quoted(c.text for c in over_finite)}"
    raise UserError(rule, _ranges(names, box), _FIX)


def _narrow(name: str, domain: Domain, constraints: Sequence[Constraint]) -> Interval:
    """The domain, cut by every constraint that compares the bare name with a number; none left: ``UserError``."""
    interval, low_open, high_open = domain.interval, False, False
    cutting: list[str] = []
    for constraint in constraints:
        limit = _limit(name, constraint)
        if limit is None:
            continue
        cut, open_end = limit
        cutting.append(constraint.text)
        low_open = (cut.low >= interval.low and open_end) or (low_open and cut.low <= interval.low)
        high_open = (cut.high <= interval.high and open_end) or (high_open and cut.high >= interval.high)
        interval &= cut
    at_one_point = interval.low == interval.high
    if cutting and (interval.empty or (at_one_point and (low_open or high_open))):
        rule = f"some {name} must satisfy {_quoted(cutting)}"
        raise UserError(rule, _ranges([name], {name: domain.interval}), _FIX)
    return interval


def _limit(name: str, constraint: Constraint) -> tuple[Interval, bool] | None:
    """The interval that ``name <= number`` (or any such form) allows, and whether its end is left out."""
    comparison, left, right = constraint.comparison, constraint.left, constraint.right
    if isinstance(right, ast.Name):
        left, right = right, left
        comparison = {"<=": ">=", "<": ">", ">=": "<=", ">": "<", "==": "=="}[comparison]
    if constraint.names != {name} or not isinstance(left, ast.Name) or _mentions_a_name(right):
        return None
    number = bound(right, {})
    if number.low != number.high:
        return None
    if comparison == "==":
        margin = 1e-9 * max(1.0, abs(number.low))  # an equality holds within its tolerance
        return Interval(number.low - margin, number.low + margin), False
    at_most = comparison in ("<=", "<")
    allowed = Interval(high=number.high) if at_most else Interval(low=number.low)
    return allowed, comparison in ("<", ">")


def _mentions_a_name(node: ast.expr) -> bool:
    calls = {id(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
    return any(isinstance(each, ast.Name) and id(each) not in calls for each in ast.walk(node))


def _ranges(names: Sequence[str] | frozenset[str], box: Mapping[str, Interval]) -> str:
    def shown(name: str) -> str:
        interval = box[name]
        if interval.low == interval.high:
            return f"{name} = {interval.low:g}"
        return f"{name} in [{interval.low:g}, {interval.high:g}]"

    return ", ".join(shown(name) for name in sorted(names))


def _quoted(texts: Any) -> str:
    return " and ".join(f"'{text}'" for text in texts)
