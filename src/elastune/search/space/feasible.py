"""Find constraints that no configuration can satisfy, before anything is run."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping, Sequence

from elastune.core.errors import UserError
from elastune.search.space.constraint import Constraint, evaluate, violations
from elastune.search.space.space import Space, enumerate_all, probe

ENUMERATED = 2000  # configurations at most, to look at every one
PROBED = 1000
_FIX = "loosen it, or widen the space"
_MIRRORED = {"<=": ">=", "<": ">", ">=": "<=", ">": "<", "==": "=="}
_MARGIN = 1e-9  # of an equality, relative to its number (absolute below 1)


def check_feasible(space: Space, constraints: Sequence[Constraint], known: Mapping[str, object], seed: int = 0) -> None:
    """Raise ``UserError`` where the constraints contradict each other, or the space and what is ``known`` beside it.

    They do where the bounds of one name leave nothing between them, or where none of a small space's configurations,
    or of a thousand random ones, satisfies all that can be decided before a run: a search would not find one either.
    """
    _refuse_contradictions(constraints)
    every = enumerate_all(space, ENUMERATED)
    samples = probe(space, PROBED, seed) if every is None else every
    closest: dict[str, float] = {}
    for sample in samples:
        found = violations(constraints, {**known, **sample.values})
        broken = {text: violation for text, violation in found.items() if violation > 0}
        if not broken:
            return
        if not closest or (len(broken), sum(broken.values())) < (len(closest), sum(closest.values())):
            closest = broken
    tried = f"none of {'the space' if every is not None else 'a thousand random ones'}"
    shown = " and ".join(f"'{text}' by {violation:g}" for text, violation in closest.items())
    rule = f"some configuration must satisfy {_quoted(c.text for c in constraints)}"
    raise UserError(rule, f"{tried} does, the closest breaks {shown}", _FIX)


def _refuse_contradictions(constraints: Iterable[Constraint]) -> None:
    """Where bounds of a bare name, be it a setting or a metric that nobody knows yet, leave nothing between them."""
    bounds: dict[str, list[tuple[Constraint, str, float]]] = {}
    for constraint in constraints:
        if bound := _bound(constraint):
            bounds.setdefault(min(constraint.names), []).append((constraint, *bound))
    for name, found in bounds.items():
        low, high = (-math.inf, False), (math.inf, True)  # whether an end is left out; whether it is included
        for _, comparison, number in found:
            margin = _MARGIN * max(1.0, abs(number)) if comparison == "==" else 0.0
            if comparison in (">=", ">", "=="):
                low = max(low, (number - margin, comparison == ">"))
            if comparison in ("<=", "<", "=="):
                high = min(high, (number + margin, comparison != "<"))
        if low[0] > high[0] or (low[0] == high[0] and (low[1] or not high[1])):
            rule = f"some {name} must satisfy {_quoted(constraint.text for constraint, _, _ in found)}"
            raise UserError(rule, f"nothing lies above {low[0]:g} and below {high[0]:g}", _FIX)


def _bound(constraint: Constraint) -> tuple[str, float] | None:
    """``(comparison, number)`` of "name <= number" in any such form; None of every other constraint."""
    comparison, left, right = constraint.comparison, constraint.left, constraint.right
    if isinstance(right, ast.Name):
        comparison, left, right = _MIRRORED[comparison], right, left
    if not isinstance(left, ast.Name):
        return None
    try:
        return comparison, evaluate(right, {})
    except (KeyError, ArithmeticError, ValueError):  # it names another, or is no number
        return None


def _quoted(texts: Iterable[str]) -> str:
    return " and ".join(f"'{text}'" for text in texts)
