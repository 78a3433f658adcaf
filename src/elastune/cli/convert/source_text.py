"""A script's text beside its syntax tree, and edits of the text that leave every other character as it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elastune.core.errors import UserError

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.While
MARK = "# elastune: "  # begins a comment that says what could not be converted


class SourceText:
    """A Python text, its tree, and the edits that are to be made.

    Places are offsets in the text's bytes, as the tree has them. Edits are made at once, by ``edited``.

    Args:
        text: The text of a file.
        name: The file's name, for errors.

    Raises:
        UserError: The text is no Python.

    Example:
        >>> source = SourceText("loss.backward()", "train.py")
        >>> source.insert(0, "session.")
        >>> source.edited()
        'session.loss.backward()'
    """

    def __init__(self, text: str, name: str) -> None:
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            place = f"{name}:{getattr(error, 'lineno', None) or 1}: {getattr(error, 'msg', error)}"
            raise UserError("a program must be Python", place, "mend it first") from None
        self.name, self.bytes = name, text.encode()
        self._line_starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._edits: list[tuple[int, int, int, str]] = []
        self._removed: set[ast.stmt] = set()

    # -- reading -------------------------------------------------------------------------------------------------------

    def start(self, node: ast.expr | ast.stmt) -> int:
        """The offset of the first byte of ``node``."""
        return self._line_starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        """The offset behind the last byte of ``node``."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def text_of(self, node: ast.expr | ast.stmt) -> str:
        """The text of ``node``."""
        return self.bytes[self.start(node) : self.end(node)].decode()

    def line(self, number: int) -> str:
        """The text of line ``number``, from 1, with its end."""
        return self.bytes[self._line_starts[number - 1] : self._line_starts[number]].decode()

    def indent(self, statement: ast.stmt) -> str:
        """The white space before ``statement``; before the line that it shares with others."""
        text = self.line(statement.lineno)
        return text[: len(text) - len(text.lstrip())]

    def parents(self, node: ast.AST) -> Iterator[ast.AST]:
        """What is around ``node``, from the inside."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that holds ``node``."""
        return next(each for each in (node, *self.parents(node)) if isinstance(each, ast.stmt))

    def function(self, node: ast.AST) -> Function | None:
        """The innermost function around ``node``; None at the top of the file."""
        return next((each for each in self.parents(node) if isinstance(each, Function)), None)

    def owner(self, function: Function) -> ast.ClassDef | None:
        """The class whose method ``function`` is."""
        parent = self._parents[function]
        return parent if isinstance(parent, ast.ClassDef) else None

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements among which ``statement`` stands."""
        parent = self._parents[statement]
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(parent, name, [])
            if isinstance(statements, list) and statement in statements:
                return statements
        return [statement]

    def uses(self, name: str) -> Iterator[ast.Name]:
        """The places where ``name`` stands."""
        return (n for n in ast.walk(self.tree) if isinstance(n, ast.Name) and n.id == name)

    # -- editing -------------------------------------------------------------------------------------------------------

    def insert(self, offset: int, new: str) -> None:
        """Put ``new`` at ``offset``, behind what was put there before."""
        self._edits.append((offset, offset, len(self._edits), new))

    def replace(self, node: ast.expr | ast.stmt, new: str) -> None:
        """Put ``new`` in the place of ``node``."""
        self._edits.append((self.start(node), self.end(node), len(self._edits), new))

    def cut(self, start: int, end: int) -> None:
        """Take out the bytes from ``start`` up to ``end``."""
        self._edits.append((start, end, len(self._edits), ""))

    def wrap(self, node: ast.expr, before: str, after: str) -> None:
        """Put ``before`` and ``after`` around ``node``."""
        self.insert(self.start(node), before)
        self.insert(self.end(node), after)

    def unwrap(self, outer: ast.expr, inner: ast.expr) -> None:
        """Leave of ``outer`` only its part ``inner``."""
        self.cut(self.start(outer), self.start(inner))
        self.cut(self.end(inner), self.end(outer))

    def remove(self, statement: ast.stmt) -> None:
        """Take out ``statement``, with its lines; a block that would be empty keeps a ``pass``."""
        self._removed.add(statement)

    def is_removed(self, statement: ast.stmt) -> bool:
        """Whether ``statement`` is taken out."""
        return statement in self._removed

    def lines_before(self, statement: ast.stmt, *lines: str) -> None:
        """Put ``lines`` before the line of ``statement``, as far indented."""
        first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
        text = "".join(f"{self.indent(statement)}{line}\n" for line in lines)
        self.insert(self._line_starts[first - 1], text)

    def lines_after(self, statement: ast.stmt, *lines: str) -> None:
        """Put ``lines`` behind the last line of ``statement``, as far indented."""
        assert statement.end_lineno is not None
        text = "".join(f"{self.indent(statement)}{line}\n" for line in lines)
        offset = self._line_starts[statement.end_lineno]
        self.insert(offset, text if self.bytes[:offset].endswith(b"\n") else f"\n{text}")

    def lines_inside(self, outer: Loop | Function, *lines: str) -> None:
        """Put ``lines`` at the top of the body of a loop or function, behind a docstring."""
        first, *others = outer.body
        if isinstance(outer, Function) and ast.get_docstring(outer, clean=False) is not None:
            if not others:
                self.lines_after(first, *lines)
                return
            first = others[0]
        if first.lineno == outer.lineno:  # the body stands in the loop's own line
            self.insert(self.start(first), "".join(f"{line}; " for line in lines))
            return
        self.lines_before(first, *lines)

    def shift(self, first: int, last: int, columns: int) -> None:
        """Indent the lines from ``first`` to ``last`` by ``columns``, or less, where these are negative."""
        inside = {
            number
            for node in ast.walk(self.tree)
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
            for number in range(node.lineno + 1, (node.end_lineno or 0) + 1)
        }
        for number in range(first, last + 1):
            if number in inside or not self.line(number).strip():
                continue
            offset = self._line_starts[number - 1]
            if columns > 0:
                self.insert(offset, " " * columns)
            else:
                present = len(self.line(number)) - len(self.line(number).lstrip())
                self.cut(offset, offset + min(-columns, present))

    def mark(self, node: ast.expr | ast.stmt, words: str) -> None:
        """Say above the statement of ``node`` what it could not be converted to."""
        statement = self.statement(node)
        if self.start(statement) != self._line_starts[statement.lineno - 1] + len(self.indent(statement).encode()):
            statement = next(each for each in self.parents(statement) if isinstance(each, ast.stmt))
        self.lines_before(statement, f"{MARK}{words}")

    def edited(self) -> str:
        """The text with all edits."""
        for statement in self._removed:
            self._take_out(statement)
        text, at = b"", 0
        for start, end, _, new in sorted(self._edits):
            if start >= at:
                text += self.bytes[at:start]
            text += new.encode()
            at = max(at, end)
        return (text + self.bytes[at:]).decode()

    def _take_out(self, statement: ast.stmt) -> None:
        block = self.block(statement)
        first_line, last_line = statement.lineno, statement.end_lineno or statement.lineno
        shared = any(
            each is not statement and (each.end_lineno == first_line or each.lineno == last_line) for each in block
        )
        alone = not self.line(first_line)[: statement.col_offset].strip()
        start, end = self._line_starts[first_line - 1], self._line_starts[last_line]
        self._edits = [each for each in self._edits if not (start < each[0] and each[1] < end)]
        if shared or not alone or (all(each in self._removed for each in block) and statement is block[0]):
            self.replace(statement, "pass")
        else:
            self.cut(start, end)


# --- names ---


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or an attribute; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def called(node: ast.AST) -> str:
    """The last name of the function that ``node`` calls; "" if it is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def bound_names(node: ast.AST) -> set[str]:
    """The names that a statement or a file binds in its own scope."""
    names: set[str] = set()
    todo = [node]
    while todo:
        each = todo.pop()
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.add(each.id)
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in each.names}
        elif isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(each.name)
            continue
        elif isinstance(each, ast.ExceptHandler) and each.name:
            names.add(each.name)
        if isinstance(each, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            continue
        todo += ast.iter_child_nodes(each)
    return names


def parameters(function: Function) -> list[str]:
    """The names of a function's parameters."""
    given = function.args
    others = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *others)]


def local_names(function: Function) -> set[str]:
    """The names that belong to ``function``: its parameters, and what it binds without ``global``."""
    declared = {n for each in ast.walk(function) if isinstance(each, (ast.Global, ast.Nonlocal)) for n in each.names}
    bound = {name for each in function.body for name in bound_names(each)}
    return (bound - declared) | set(parameters(function))
