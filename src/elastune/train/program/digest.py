"""What of a program's file decides what it trains: two files that agree in it train alike, whatever else they hold."""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from collections.abc import Iterator

from elastune.core.run import Program

_GIVEN = {"config"}  # a run has its settings from the session, and they are recorded with it
_BINDING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)


def meaning(program: Program) -> str:
    """SHA-256 of the training function (and ``surrogate``) and of what they use of the file, however it is laid out.

    Followed by name: functions, classes, constants and imports; and whatever stands at the top level and binds no
    name. Not followed: modules that the file imports. The search space, the objectives and ``__main__`` do not count.
    """
    tree = ast.parse(program.path.read_bytes())
    binding: dict[str, set[int]] = defaultdict(set)
    for index, statement in enumerate(tree.body):
        for name in _bound(statement):
            binding[name].add(index)
    bare = [i for i, s in enumerate(tree.body) if not isinstance(s, _BINDING) and not _is_main(s) and not _is_text(s)]
    used: set[int] = set()
    todo = [*bare, *(binding[program.train] or binding["main"]), *binding["surrogate"]]
    while todo:
        index = todo.pop()
        if index not in used:
            used.add(index)
            todo.extend(i for name in _names(tree.body[index]) - _GIVEN for i in binding.get(name, ()))
    text = "\n".join(ast.unparse(tree.body[index]) for index in sorted(used))
    return hashlib.sha256(text.encode()).hexdigest()


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement gives a value."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign() | ast.AnnAssign():
            stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            yield from (node.id for node in stored if isinstance(node.ctx, ast.Store))
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in names)


def _names(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _is_main(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.If):
        return False
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
