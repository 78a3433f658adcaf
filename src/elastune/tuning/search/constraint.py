"""Comparisons as users write them: constraints on a configuration, and a target that a training reaches in time."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from elastune.core.errors import UserError
from elastune.core.journal.records import Reported

# Constraints as users write them: one arithmetic comparison, for example ``workers * micro_batch == 4096``.

MAX_LENGTH = 300
MAX_DEPTH = 40
_TOLERANCE = 1e-9  # of an equality, relative to its larger side (absolute below 1)
_TINY = 1e-12  # the violation of a strict inequality whose sides are equal
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max, "abs": abs}
_COMPARISONS: dict[type[ast.cmpop], str] = {ast.LtE: "<=", ast.Lt: "<", ast.GtE: ">=", ast.Gt: ">", ast.Eq: "=="}
_EXAMPLE = "for example 'workers * micro_batch == 4096'"


@dataclass(frozen=True)
class Constraint:
    """A condition on settings and metrics: ``left comparison right`` over ``names``.

    Two constraints are equal if their texts are equal.

    Example:
        >>> Constraint.parse("workers * micro_batch <= 4096").violation({"workers": 8, "micro_batch": 1024})
        4096.0
    """

    text: str
    comparison: str = field(compare=False)
    left: ast.expr = field(compare=False, repr=False)
    right: ast.expr = field(compare=False, repr=False)
    names: frozenset[str] = field(compare=False)

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Read a comparison (``<= < >= > ==``) of numbers, names, ``+ - * / // % **``, ``min``, ``max``, ``abs``.

        No other code is ever executed. Raises ``UserError`` for any other text.
        """
        comparison, left, right = _parse(text)
        names = {node.id for side in (left, right) for node in ast.walk(side) if isinstance(node, ast.Name)}
        names -= set(FUNCTIONS)
        if not names:
            raise UserError("a constraint must name a setting or a metric", text, _EXAMPLE)
        return cls(text.strip(), comparison, left, right, frozenset(names))

    def decidable(self, names: Collection[str]) -> bool:
        """Return whether ``names`` hold all names of the constraint."""
        return self.names <= set(names)

    def violation(self, values: Mapping[str, object]) -> float:
        """Return by how much ``values`` break the constraint, in the unit of its sides.

        The violation is 0 or less where the constraint holds, and infinite where a side is undefined. Raises
        ``KeyError`` where a name is missing, ``UserError`` where its value is not a number.
        """
        numbers = {name: self._number(name, values[name]) for name in self.names}
        try:
            left, right = evaluate(self.left, numbers), evaluate(self.right, numbers)
        except (ArithmeticError, ValueError):  # division by zero, overflow, a root of a negative number
            return math.inf
        return _violation(left, self.comparison, right)

    def _number(self, name: str, value: object) -> float:
        if not isinstance(value, int | float):
            rule = f"in the constraint '{self.text}', {name} must be a number"
            raise UserError(rule, repr(value), "constrain a numeric setting or metric")
        return float(value)


def all_texts(program_texts: Iterable[str], added: Iterable[str]) -> tuple[str, ...]:
    """Return a program's ``program_texts`` constraints and the ``added`` ones, as texts, without duplicates."""
    return tuple(dict.fromkeys((*program_texts, *added)))


def parse_constraints(texts: Iterable[str]) -> tuple[Constraint, ...]:
    """Parse every text as a constraint; duplicates are dropped."""
    return tuple(dict.fromkeys(Constraint.parse(text) for text in texts))


def violations(constraints: Iterable[Constraint], values: Mapping[str, object]) -> dict[str, float]:
    """Return, by text, the violation of each constraint that ``values`` decide."""
    return {c.text: c.violation(values) for c in constraints if c.decidable(values)}


def fulfilled(constraints: Collection[Constraint], values: Mapping[str, object]) -> bool:
    """Return whether ``values`` decide all ``constraints`` and break none."""
    return all(c.decidable(values) and c.violation(values) <= 0 for c in constraints)


def evaluate(node: ast.expr, numbers: Mapping[str, float]) -> float:
    """Return the value of a checked expression. All arithmetic is in floats, so no text can make a huge integer."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return numbers[name]
        case ast.UnaryOp(op=op, operand=operand):
            value = evaluate(operand, numbers)
            return -value if isinstance(op, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right):
            result = OPERATORS[type(op)](evaluate(left, numbers), evaluate(right, numbers))
            if isinstance(result, complex):
                raise ValueError("a root of a negative number")
            return result
        case ast.Call(func=ast.Name(id=name), args=args):
            return FUNCTIONS[name](*(evaluate(each, numbers) for each in args))
    raise AssertionError(f"unchecked expression {ast.dump(node)}")


def _violation(left: float, comparison: str, right: float) -> float:
    if comparison in (">=", ">"):
        left, right = right, left
    gap = 0.0 if left == right else left - right  # equal infinities too
    if math.isnan(gap):
        return math.inf
    if comparison == "==":
        return abs(gap) - _TOLERANCE * max(1.0, min(abs(left), abs(right)))
    return gap if gap != 0.0 or comparison in ("<=", ">=") else _TINY


def _parse(text: str) -> tuple[str, ast.expr, ast.expr]:
    if not isinstance(text, str) or not text.strip():
        raise UserError("a constraint must be a comparison", repr(text), _EXAMPLE)
    if len(text) > MAX_LENGTH:
        raise UserError(f"a constraint has at most {MAX_LENGTH} characters", f"{text[:40]}...", "simplify it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of '1if x', which the check refuses anyway
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError("a constraint must be a comparison", repr(text), _EXAMPLE) from error
    if isinstance(tree, ast.BoolOp) or (isinstance(tree, ast.Compare) and len(tree.ops) != 1):
        raise UserError("a constraint is one comparison", text, "give two constraints")
    if not isinstance(tree, ast.Compare):
        raise UserError("a constraint must be a comparison", text, _EXAMPLE)
    comparison = _COMPARISONS.get(type(tree.ops[0]))
    if comparison is None:
        raise UserError("a constraint compares by <=, <, >=, > or ==", text, _EXAMPLE)
    left, right = tree.left, tree.comparators[0]
    for side in (left, right):
        _check(side, text)
    return comparison, left, right


def _check(root: ast.expr, text: str) -> None:
    todo = [(root, 1)]
    while todo:
        node, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise UserError(f"a constraint nests at most {MAX_DEPTH} deep", text, "simplify it")
        todo.extend((child, depth + 1) for child in _parts(node, text))


def _parts(node: ast.expr, text: str) -> list[ast.expr]:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float()):
            return []
        case ast.Name(id=name) if name not in FUNCTIONS:
            return []
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return [operand]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return [left, right]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            needed = len(args) == 1 if name == "abs" else len(args) >= 2
            if needed and not any(isinstance(each, ast.Starred) for each in args):
                return list(args)
    rule = "a constraint may hold names, numbers, + - * / // % **, min, max and abs"
    raise UserError(rule, f"'{ast.unparse(node)}' in '{text}'", _EXAMPLE)


# How long a training takes to reach a target: a comparison of reported metrics, written like a constraint. Pure.
#
# A program reports its metrics only now and then. The target was therefore reached between the last report that
# missed it and the first report that did not, and the time of the latter counts. A training that never reports the
# target has no time (it is censored): only its smallest shortfall is known.

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
