"""What a loop over batches must not do where a global batch comes in several parts, found in its source.

With several slots the loop's body runs once for each slot, so its own count is no count of global batches. A ``break``,
or an ``optimizer.step()`` under such a count, then trains otherwise than the plain loop, on one worker as on several.
"""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType

from elastune.core.errors import UserError
from elastune.core.formatting import cut

RULE = "a global batch comes in several slots, and the loop's body runs for each of them"
COUNT = "count by session.batch_index or session.step, under 'if session.ends_step:'"
ACCUMULATE = "call it in each pass, with the whole batch_size (--micro-batch saves memory)"
LEAVE = "put 'if session.ends_step:' around it, or use --max-steps"
_GUARD = "ends_step"
_UPDATES = {"step", "zero_grad", "backward", "backward_global"}
_OF_SESSION = {"save", "save_best", "stop", "change", "set_sync", "resize"}  # other objects may have such methods
LONGEST = 60


@dataclass(frozen=True)
class LoopFinding:
    """A line of a batch loop that would act by a count of slots.

    Attributes:
        line: Its number.
        text: What stands there.
        fix: What to write.
    """

    line: int
    text: str
    fix: str


def refuse_counted_slots(caller: FrameType) -> None:
    """Raise ``UserError`` for a batch loop that acts by a count of slots.

    ``caller``: where the program calls ``session.batches``. Files that cannot be read, and adapters, are not judged.
    """
    if caller.f_globals.get("__name__", "").startswith(f"{__name__.partition('.')[0]}."):
        return
    if (finding := _first_finding(caller.f_code, caller.f_lineno)) is not None:
        place = f"{os.path.basename(caller.f_code.co_filename)}:{finding.line}: {cut(finding.text, LONGEST)}"
        raise UserError(RULE, place, finding.fix)


@cache
def _first_finding(code: CodeType, line: int) -> LoopFinding | None:
    """The first finding in the loop of the call in ``line`` of ``code``. Cached: a program calls once an epoch."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return None
    return min(findings(tree, line), key=lambda each: each.line, default=None)


def findings(tree: ast.Module, line: int) -> Iterator[LoopFinding]:
    """The findings in the loop over the batches of the ``session.batches`` that is called in ``line``."""
    function = _innermost(tree, line)
    for loop in _loops(function, line):
        yield from _BatchLoop(function, loop, _session_in(function, line)).findings()


def _innermost(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function around ``line``, or the file."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(around, key=lambda node: node.lineno, default=tree)


def _loops(function: ast.AST, line: int) -> Iterator[ast.For]:
    """The loops over the batches of the call in ``line``: in the loop's own line, or by a variable."""
    names = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _calls_batches(node.value, line)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.For) and (_calls_batches(node.iter, line) or _uses(node.iter, names)):
            yield node


def _calls_batches(node: ast.AST, line: int) -> bool:
    return any(
        isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr == "batches"
        and each.lineno <= line <= (each.end_lineno or 0)
        for each in ast.walk(node)
    )


def _session_in(function: ast.AST, line: int) -> str:
    """What the program calls its session in the call of ``session.batches`` in ``line``."""
    calls = (each.func for each in ast.walk(function) if isinstance(each, ast.Call) and _calls_batches(each, line))
    return next((ast.unparse(f.value) for f in calls if isinstance(f, ast.Attribute) and f.attr == "batches"), "")


def _around(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and what is below it, without the arguments of ``session.batches``."""
    yield node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "batches":
        return
    for child in ast.iter_child_nodes(node):
        yield from _around(child)


def _uses(node: ast.AST, names: Iterable[str]) -> bool:
    wanted = set(names)
    return any(isinstance(each, ast.Name) and each.id in wanted for each in ast.walk(node))


def _called(node: ast.AST) -> str:
    """The last name of the function that ``node`` calls; "" if it is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _is_guard(node: ast.AST, names: Iterable[str] = ()) -> bool:
    """Whether ``node`` looks at ``session.ends_step``, or at one of ``names``, which count by it."""
    return _uses(node, names) or any(isinstance(each, ast.Attribute) and each.attr == _GUARD for each in ast.walk(node))


def _is_flag(node: ast.AST, names: Iterable[str]) -> bool:
    """Whether ``node`` is true where a step ends: it looks at ``session.ends_step``, or is one of ``names``."""
    return _is_guard(node) or (isinstance(node, ast.Name) and node.id in set(names))


class _BatchLoop:
    """A loop over batches, in its function; ``session``: what the function calls its session."""

    def __init__(self, function: ast.AST, loop: ast.For, session: str) -> None:
        self._function, self._loop, self._session = function, loop, session
        guards = [n for n in ast.walk(loop) if isinstance(n, (ast.Assign, ast.AugAssign)) and _is_guard(n.value)]
        flags = {t.id for n in guards if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
        counts = {n.target.id for n in guards if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}
        self._unguarded = list(_unguarded(loop.body, flags | counts, flags - counts))

    def findings(self) -> Iterator[LoopFinding]:
        for call in _around(self._loop.iter):
            counted = _called(call) == "zip" and any(_called(each) == "range" for each in _around(call))
            if _called(call) == "islice" or counted:
                yield self._found(call, LEAVE)
        for node, in_loop in self._unguarded:
            if isinstance(node, ast.Return) or (isinstance(node, ast.Break) and in_loop):
                yield self._found(node, LEAVE)
        counters = self._counters()
        if counters:
            yield from self._by_count(counters)

    def _counters(self) -> set[str]:
        """The names that count slots, or follow from such a count."""
        counters: set[str] = set()
        target = self._loop.target
        if isinstance(target, ast.Tuple):
            calls = list(_around(self._loop.iter))
            numbers = target.elts[:1] if any(_called(each) == "enumerate" for each in calls) else []
            if isinstance(zipped := self._loop.iter, ast.Call) and _called(zipped) == "zip":
                pairs = zip(target.elts, zipped.args, strict=False)
                numbers = [name for name, each in pairs if _called(each) == "count"]
            counters |= {each.id for each in numbers if isinstance(each, ast.Name)}
        counters |= {name for node, _ in self._unguarded if (name := _incremented(node))}
        grown = True
        while grown:
            more = {
                each.id
                for node in ast.walk(self._loop)
                if isinstance(node, ast.Assign) and _counts(node.value, counters)
                for each in node.targets
                if isinstance(each, ast.Name)
            }
            grown = not more <= counters
            counters |= more
        return counters

    def _by_count(self, counters: set[str]) -> Iterator[LoopFinding]:
        """Where the function acts by ``counters``."""
        for node, here in self._below(self._function, counters):
            if isinstance(node, (ast.If, ast.While)) and _decides(node.test, here):
                acts = set(_acts([*node.body, *node.orelse], self._session))
                if isinstance(node, ast.While):  # the batch loop itself is a for
                    acts.add("while")
                if acts:
                    yield self._found(node.test, ACCUMULATE if acts & _UPDATES else COUNT)
            arguments = [*node.args, *(each.value for each in node.keywords)] if isinstance(node, ast.Call) else []
            steps = _called(node) == "step" and any(_uses(each, here) for each in arguments)
            reports = _called(node) == "report" and any(
                isinstance(each, ast.Name) and each.id in here for each in arguments
            )
            if steps or reports:
                yield self._found(node, COUNT)

    def _below(self, node: ast.AST, counters: set[str]) -> Iterator[tuple[ast.AST, set[str]]]:
        """The nodes below ``node``, with the counters there: other functions and loops give these names anew."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            left = counters
            if isinstance(child, ast.For) and not any(each is self._loop for each in ast.walk(child)):
                left = counters - {each.id for each in ast.walk(child.target) if isinstance(each, ast.Name)}
            yield child, left
            yield from self._below(child, left)

    @staticmethod
    def _found(node: ast.AST, fix: str) -> LoopFinding:
        return LoopFinding(getattr(node, "lineno", 0), ast.unparse(node), fix)


def _unguarded(
    body: list[ast.stmt], steps: set[str], flags: set[str], in_loop: bool = True
) -> Iterator[tuple[ast.stmt, bool]]:
    """The statements that run for each slot; and whether a ``break`` among them leaves the batch loop.

    ``steps``: the names of variables that follow from ``session.ends_step``; ``flags``: of those that are equal to it.
    """
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(statement, ast.If) and _is_guard(statement.test, steps):
            negated = any(
                isinstance(each, ast.UnaryOp) and isinstance(each.op, ast.Not) and _is_flag(each.operand, flags)
                for each in ast.walk(statement.test)
            )
            yield from _unguarded(statement.body if negated else statement.orelse, steps, flags, in_loop)
            if negated and any(isinstance(each, ast.Continue) for each in statement.body):
                return  # the rest runs where a step ends
            continue
        yield statement, in_loop
        inner = in_loop and not isinstance(statement, (ast.For, ast.AsyncFor, ast.While))
        for name in ("body", "orelse", "finalbody"):
            yield from _unguarded(getattr(statement, name, []), steps, flags, inner)
        for handler in getattr(statement, "handlers", []):
            yield from _unguarded(handler.body, steps, flags, inner)
        for case in getattr(statement, "cases", []):
            yield from _unguarded(case.body, steps, flags, inner)


def _incremented(node: ast.AST) -> str:
    """The name that ``node`` adds a whole number to, or ""."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
        return node.target.id if isinstance(node.target, ast.Name) and _is_whole(node.value) else ""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.targets[0], ast.Name):
        name, sides = node.targets[0].id, (node.value.left, node.value.right)
        adds_to_itself = any(isinstance(side, ast.Name) and side.id == name for side in sides)
        return name if adds_to_itself and any(map(_is_whole, sides)) else ""
    return ""


def _is_whole(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _counts(value: ast.AST, counters: set[str]) -> bool:
    """Whether ``value`` is arithmetic on a counter: a quotient is a mean, and an argument of a call another thing."""
    if isinstance(value, ast.BinOp):
        divides = isinstance(value.op, ast.Div) and _uses(value.right, counters)
        return not divides and (_counts(value.left, counters) or _counts(value.right, counters))
    if isinstance(value, ast.Compare):
        return _decides(value, counters)
    return isinstance(value, ast.Name) and value.id in counters


def _decides(test: ast.AST, counters: set[str]) -> bool:
    """Whether ``test`` compares a counter with another number than 0, or takes its remainder."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and _uses(node.left, counters):
            return True
        if isinstance(node, ast.Compare) and _uses(node, counters):
            sides = [node.left, *node.comparators]
            if not any(isinstance(side, ast.Constant) and side.value in (0, None) for side in sides):
                return True
        if isinstance(test, ast.Name) and test.id in counters:
            return True
    return False


def _acts(body: Iterable[ast.AST], session: str, *, in_loop: bool = False) -> Iterator[str]:
    """The names of what ``body`` does to the training.

    Pictures, logs and files of its own (``image.save()``) are not among them. Neither is what leaves an inner loop
    (``in_loop``).
    """
    for node in body:
        leaves = isinstance(node, ast.Return) or (isinstance(node, (ast.Break, ast.Continue)) and not in_loop)
        name = _called(node)
        of_session = isinstance(node, ast.Call) and ast.unparse(node.func) == f"{session}.{name}"
        if leaves:
            yield type(node).__name__.lower()
        if name in _UPDATES or (name in _OF_SESSION and of_session):
            yield name
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            inner = in_loop or isinstance(node, (ast.For, ast.AsyncFor, ast.While))
            yield from _acts(ast.iter_child_nodes(node), session, in_loop=inner)
