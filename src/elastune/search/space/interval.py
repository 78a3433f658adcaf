"""Bounds of a constraint's sides when its names are only known to lie in intervals."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from elastune.search.space.constraint import OPERATORS, Constraint


@dataclass(frozen=True)
class Interval:
    """All numbers from ``low`` to ``high``, both included (infinite ends allowed)."""

    low: float = -math.inf
    high: float = math.inf

    @property
    def empty(self) -> bool:
        return self.low > self.high

    def __and__(self, other: Interval) -> Interval:
        return Interval(max(self.low, other.low), min(self.high, other.high))


ANY = Interval()


def impossible(constraint: Constraint, box: Mapping[str, Interval]) -> bool:
    """True only if no point of ``box`` (a name that it lacks may be anything) satisfies ``constraint``.

    Sound but not complete: False where the bounds cannot tell. Rounding gets a relative margin of 1e-9.
    """
    left, right = bound(constraint.left, box), bound(constraint.right, box)
    if constraint.comparison in (">=", ">"):
        left, right = right, left
    if constraint.comparison == "==":
        return _above(left, right) or _above(right, left)
    return _above(left, right) or (constraint.comparison in ("<", ">") and left.low == right.high)


def bound(node: ast.expr, box: Mapping[str, Interval]) -> Interval:
    """An interval that holds every value which a checked expression can take in ``box``."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return _hull([_number(value)])
        case ast.Name(id=name):
            return box.get(name, ANY)
        case ast.UnaryOp(op=op, operand=operand):
            inner = bound(operand, box)
            return Interval(-inner.high, -inner.low) if isinstance(op, ast.USub) else inner
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, bound(left, box), bound(right, box))
        case ast.Call(func=ast.Name(id=name), args=args):
            return _call(name, [bound(each, box) for each in args])
    return ANY


def _above(a: Interval, b: Interval) -> bool:
    return a.low > b.high and not math.isclose(a.low, b.high, rel_tol=1e-9, abs_tol=1e-9)


def _binary(op: ast.operator, a: Interval, b: Interval) -> Interval:
    match op:
        case ast.Add():
            return Interval(a.low + b.low, a.high + b.high) if not (a.empty or b.empty) else ANY
        case ast.Sub():
            return Interval(a.low - b.high, a.high - b.low) if not (a.empty or b.empty) else ANY
        case ast.Mult():
            return _corners(OPERATORS[ast.Mult], a, b)
        case ast.Div() | ast.FloorDiv() if b.low > 0 or b.high < 0:
            ratio = _corners(OPERATORS[ast.Div], a, b)
            return ratio if isinstance(op, ast.Div) else Interval(_floor(ratio.low), _floor(ratio.high))
        case ast.Mod() if b.low > 0 or b.high < 0:
            return Interval(min(b.low, 0.0), max(b.high, 0.0))  # the sign is the divisor's
        case ast.Pow() if a.low > 0:
            return _corners(OPERATORS[ast.Pow], a, b)
        case ast.Pow() if b.low == b.high and b.low > 0 and b.low == int(min(b.low, 2**53)):
            powers = _corners(OPERATORS[ast.Pow], a, b)
            return Interval(min(powers.low, 0.0), powers.high) if a.low <= 0 <= a.high else powers
    return ANY


def _call(name: str, args: list[Interval]) -> Interval:
    if name == "abs":
        inner = args[0]
        ends = sorted((abs(inner.low), abs(inner.high)))
        return Interval(0.0 if inner.low <= 0 <= inner.high else ends[0], ends[1])
    best: Callable[[Iterable[float]], float] = min if name == "min" else max
    return Interval(best(each.low for each in args), best(each.high for each in args))


def _corners(function: Callable[[float, float], float], a: Interval, b: Interval) -> Interval:
    """The hull over the corners: right for functions monotone in each argument on the box."""
    return _hull(_apply(function, x, y) for x, y in itertools.product((a.low, a.high), (b.low, b.high)))


def _apply(function: Callable[[float, float], float], x: float, y: float) -> float:
    try:
        found = function(x, y)
    except (ArithmeticError, ValueError):
        return math.nan
    return math.nan if isinstance(found, complex) else found


def _hull(values: Iterable[float]) -> Interval:
    found = list(values)
    return ANY if any(map(math.isnan, found)) else Interval(min(found), max(found))


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _floor(value: float) -> float:
    return float(math.floor(value)) if math.isfinite(value) else value
