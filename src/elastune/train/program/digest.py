"""What of a program's file decides what it trains: two files that agree in it train alike, whatever else they hold."""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from collections.abc import Iterator

from elastune.core.run import Program

_GIVEN = frozenset({"config"})  # a run has its settings from the session, and they are recorded with it
_BY_ANY_NAME = {"globals", "vars", "eval", "exec"}  # a program that calls these may use whatever its file holds


def meaning(program: Program) -> str:
    """SHA-256 of the training function (and ``surrogate``) and of what they use of the file, however it is laid out.

    Followed by name: functions, classes, constants and imports; and whatever stands at the top level and binds no
    name, or is decorated. Not followed: modules that the file imports. The search space, the objectives, docstrings
    and ``__main__`` do not count.
    """
    tree = without_docstrings(ast.parse(program.path.read_bytes()))
    text = "\n".join(ast.unparse(statement) for statement in used_by_training(tree, program.train))
    return hashlib.sha256(text.encode()).hexdigest()


def used_by_training(tree: ast.Module, train: str, *, config: bool = False) -> list[ast.stmt]:
    """The statements of ``tree``, a program, that decide what it trains, in order.

    Args:
        tree: The program.
        train: The name of its training function.
        config: Whether its own settings count, which a run may have been given others for.
    """
    body = [statement for statement in tree.body if not is_main(statement)]
    binding: dict[str, set[int]] = defaultdict(set)
    for index, statement in enumerate(body):
        for name in bound(statement):
            binding[name].add(index)
    todo = [i for i, s in enumerate(body) if _acts(s) or _is_policy(s, body)]
    todo += [*(binding[train] or binding["main"]), *binding["surrogate"], *(binding["config"] if config else ())]
    used: set[int] = set()
    while todo:
        index = todo.pop()
        if index not in used:
            used.add(index)
            names = _names(body[index])
            if names & _BY_ANY_NAME:
                names = {*binding} - {"space", "objectives"}
            todo.extend(i for name in names - (set() if config else _GIVEN) for i in binding.get(name, ()))
    return [body[index] for index in sorted(used)]


def without_docstrings(tree: ast.Module) -> ast.Module:
    """``tree``, changed: without texts that are statements by themselves."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, name, None), list):
                setattr(node, name, [each for each in body if not _is_text(each)])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.body:
            node.body = [ast.Pass(lineno=node.lineno, col_offset=0)]
    return tree


def bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement gives a value; "*" where it imports whatever another module has."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign() | ast.AnnAssign():
            stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            yield from (node.id for node in stored if isinstance(node.ctx, ast.Store))
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in names)


def is_main(statement: ast.stmt) -> bool:
    """Whether it is ``if __name__ == "__main__"``."""
    if not isinstance(statement, ast.If):
        return False
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test))


def _names(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _acts(statement: ast.stmt) -> bool:
    """Whether it does something when the file is imported, whoever uses the names that it binds."""
    names = {*bound(statement)}
    return not names or "*" in names or bool(getattr(statement, "decorator_list", ()))


def _is_policy(statement: ast.stmt, body: list[ast.stmt]) -> bool:
    """Whether it is a class that a run may be given by its name (``--policy``), so that nothing else need name it."""
    if not isinstance(statement, ast.ClassDef):
        return False
    bases = {ast.unparse(base).rpartition(".")[2] for base in statement.bases}
    inherited = [each for each in body if isinstance(each, ast.ClassDef) and each.name in bases and each != statement]
    return "Policy" in bases or any(_is_policy(each, body) for each in inherited)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
