"""A training function of a notebook as a module that workers can import.

The module has the function, and what it uses of the notebook: other functions and classes with their source, modules
as imports, plain values as they are. Anything else, such as a tensor, is refused: a worker would not have it.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import symtable
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from elastune.adapt.policies.base import Policy
from elastune.core.errors import UserError

CONTRACT = ("config", "objectives", "constraints", "space", "views", "surrogate")
"""What a program file may define beside its training function."""
RULE = "workers must be able to import what a notebook's training uses"
LONGEST = 100_000  # characters of a plain value
_HEAD = '"""Written from a notebook, with what its training function uses. The next call writes it again."""\n'


def is_of_cell(function: Callable[..., Any]) -> bool:
    """Whether ``function`` was defined in a notebook's cell, whose source Python still has."""
    return _cell_of(function) is not None


def module_of_cells(train: Callable[..., Any]) -> str:
    """Return the text of a module that defines ``train``, with all that it uses of its notebook.

    Raises:
        UserError: It uses something that is no function, class, module or plain value.

    Example:
        >>> Path("train.py").write_text(module_of_cells(train))
    """
    found = inspect.unwrap(train).__globals__
    module = _Module(found)
    module.add(train.__name__)
    for name in CONTRACT:
        if name in found:
            module.add(name)
    for name, value in list(found.items()):
        if isinstance(value, type) and issubclass(value, Policy) and value.__module__ == train.__module__:
            module.add(name)
    return module.text


class _Module:
    """Collects definitions, each behind all that it uses."""

    def __init__(self, found: dict[str, Any]) -> None:
        self._found = found
        self._imports: list[str] = []
        self._definitions: list[str] = []
        self._added: set[str] = set()

    @property
    def text(self) -> str:
        return "\n".join([_HEAD, *sorted(self._imports), *(f"\n{each}" for each in self._definitions)])

    def add(self, name: str) -> None:
        """Add what the notebook calls ``name``."""
        if name in self._added:
            return
        self._added.add(name)
        value = self._found[name]
        source = _definition(value, name)
        if source is not None:
            for used in _globals_in(source):
                if used in self._found:
                    self.add(used)
                elif not hasattr(builtins, used):
                    raise UserError(RULE, f"{used}, which {name} uses and no cell defines", f"define {used}")
            self._definitions.append(source)
        elif (line := _import_line(value, name)) is not None:
            self._imports.append(line)
        elif (text := _literal(value)) is not None:
            self._definitions.append(f"{name} = {text}\n")
        else:
            fix = "make it in a function that the training calls, or write the cells to a file: %%writefile train.py"
            raise UserError(RULE, f"{name}, a {type(value).__name__}", fix)


def _cell_of(value: Any) -> list[str] | None:
    """The lines of the cell that defines a function; None for one of a file, or of a prompt."""
    function = inspect.unwrap(value)
    if not inspect.isfunction(function):
        return None
    entry = linecache.cache.get(function.__code__.co_filename)
    # A file's entry has the time of its last change; that of a cell has None.
    return entry[2] if entry is not None and len(entry) == 4 and entry[1] is None else None


def _definition(value: Any, name: str) -> str | None:
    """The source of a function or class of a cell, as ``name``; None for anything else."""
    if isinstance(value, type):
        found = _class_source(value)
        own = value.__name__
    elif callable(value) and (cell := _cell_of(value)) is not None:
        code = inspect.unwrap(value).__code__
        own = code.co_name
        found = next((source for line, source in _sources(cell, own) if line == code.co_firstlineno), None)
        if found is None:
            raise UserError(RULE, f"{name}, which is no function at the top level of a cell", f"write it as def {name}")
    else:
        return None
    return found if found is None or own == name else f"{found}\n\n{name} = {own}\n"


def _class_source(kind: type) -> str | None:
    """The source of a class of a cell: from the cell of its methods or, without any, the only one that defines it."""
    if getattr(sys.modules.get(kind.__module__), "__file__", None) is not None:
        return None
    methods = [getattr(each, "__func__", each) for each in vars(kind).values()]
    cells = [cell for method in methods if callable(method) and (cell := _cell_of(method)) is not None]
    if not cells:
        cells = [entry[2] for entry in linecache.cache.values() if len(entry) == 4 and entry[1] is None]
    sources = {source for cell in cells for _, source in _sources(cell, kind.__name__)}
    if len(sources) > 1:
        raise UserError(RULE, f"the class {kind.__name__}, which several cells define", "give it another name")
    return sources.pop() if sources else None


def _sources(cell: list[str], name: str) -> Iterator[tuple[int, str]]:
    """Each definition of ``name`` at the top level of a cell: its first line's number, and its text."""
    try:
        body = ast.parse("".join(cell)).body
    except SyntaxError:  # a cell of another language
        return
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            yield first, "".join(cell[first - 1 : node.end_lineno]).rstrip("\n") + "\n"


def _globals_in(source: str) -> list[str]:
    """The names that ``source`` takes from outside of itself, in order of appearance."""
    return list(dict.fromkeys(_outside(symtable.symtable(source, "cell", "exec"))))


def _outside(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        at_top = table.get_type() == "module"
        if symbol.is_referenced() and (not symbol.is_assigned() if at_top else symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _outside(child)


def _import_line(value: Any, name: str) -> str | None:
    """The import that brings ``value``; None if no module of a file has it."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__}" if value.__name__ == name else f"import {value.__name__} as {name}"
    own = getattr(value, "__name__", name)
    homes = [getattr(value, "__module__", None), *sorted(sys.modules, key=len)]
    for home in homes:
        module = sys.modules.get(home) if isinstance(home, str) and home != "__main__" else None
        for there in (own, name):
            if module is not None and isinstance(there, str) and vars(module).get(there) is value:
                return f"from {home} import {there}" if there == name else f"from {home} import {there} as {name}"
        if not callable(value):  # an equal number is not the same thing
            return None
    return None


def _literal(value: Any) -> str | None:
    """``value`` as Python's text of it; None where no text is equal to it."""
    text = repr(value)
    if len(text) > LONGEST:
        return None
    try:
        return text if ast.literal_eval(text) == value and type(ast.literal_eval(text)) is type(value) else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
