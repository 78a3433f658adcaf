"""A program's own command line: its ``sys.argv``, and the settings that ``argparse`` reads of it.

While lines of a program run, ``sys.argv`` is its file and its own arguments. What a parser returns for them belongs to
the program's config. Settings of the run (``--set``, a search space) replace values in the parser's result.
"""

from __future__ import annotations

import ast
import math
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from elastune.core.errors import UserError
from elastune.core.run import Config
from elastune.train.program.source import used_by_training, without_docstrings

READS = ("parse_args", "parse_known_args")
_WATCHED = (*READS, "error", "exit")


@dataclass(frozen=True)
class _Parsed:
    """A parser that has read the program's arguments, and its result before settings of the run changed it."""

    parser: ArgumentParser
    values: dict[str, Any]


class ProgramArguments:
    """Watches how a program reads its own command line.

    Args:
        path: The program's file.
        words: Its own arguments.
        settings: Settings of the run; a parser's result has them in place of its own values.

    Attributes:
        words: The arguments.
        config: The values that parsers have returned, as far as a setting can hold them.
        printed: Whether a parser has ended the program, to print its help or version.
        names_known: Whether the names of settings were compared with a config before the training.

    Example:
        >>> arguments = ProgramArguments(Path("train.py"), ["--lr", "0.1"], {})
        >>> with arguments.watched():
        ...     import_the_program()
        >>> arguments.config
        {'lr': 0.1}
    """

    def __init__(self, path: Path, words: Sequence[str], settings: Mapping[str, Any]) -> None:
        self.words = list(words)
        self.config: Config = {}
        self.printed = False
        self.names_known = False
        self._path = path
        self._settings = dict(settings)
        self._parsed: list[_Parsed] = []
        self._depth = 0  # of calls that read the arguments: ``parse_args`` calls ``parse_known_args``
        self._trains = False

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ``UserError`` for a setting that the program's parser cannot take."""
        for parsed in self._parsed:
            for name, value in settings.items():
                if name in parsed.values:
                    _converted(parsed.parser, name, value)

    @contextmanager
    def watched(self, *, trains: bool = False) -> Iterator[None]:
        """Give lines of the program its ``sys.argv``, and watch parsers, until the block ends.

        Args:
            trains: The lines are those of the training function: it is too late to print a help text.
        """
        kept = {name: getattr(ArgumentParser, name) for name in _WATCHED}
        argv, trained = sys.argv, self._trains
        sys.argv, self._trains = [str(self._path), *self.words], trains
        for name, call in self._replacements(kept).items():
            setattr(ArgumentParser, name, call)
        try:
            yield
        finally:
            sys.argv, self._trains = argv, trained
            for name, call in kept.items():
                setattr(ArgumentParser, name, call)

    def _replacements(self, kept: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """The methods of ``ArgumentParser`` while it is watched, by name; ``kept`` are its own."""

        def parse_args(parser: ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
            with self._reading(args) as reads:
                result = kept["parse_args"](parser, args, namespace)
            if reads and self._trains and not self.names_known:
                self._refuse_unknown(result)
            return result

        def parse_known_args(parser: ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
            with self._reading(args) as reads:
                result, rest = kept["parse_known_args"](parser, args, namespace)
            if reads:
                self._take(parser, result)
            return result, rest

        def error(parser: ArgumentParser, message: str) -> Any:
            return self._refuse(message) if self._depth else kept["error"](parser, message)

        def leave(parser: ArgumentParser, status: int = 0, message: str | None = None) -> Any:
            if not self._depth:
                return kept["exit"](parser, status, message)
            if status:
                self._refuse(message or f"exit code {status}")
            if self._trains:
                rule = "help is printed for a parser at the top of a file or of a function"
                raise UserError(rule, "--help", f"python {self._path.name} --help")
            self.printed = True
            return kept["exit"](parser, status, message)

        return {"parse_args": parse_args, "parse_known_args": parse_known_args, "error": error, "exit": leave}

    @contextmanager
    def _reading(self, args: Sequence[str] | None) -> Iterator[bool]:
        """Yield whether a call with ``args`` reads the program's command line; sub-parsers get words of their own."""
        reads = args is None or list(args) == sys.argv[1:]  # ``parse_args(sys.argv[1:])`` reads it, too
        self._depth += reads
        try:
            yield reads
        finally:
            self._depth -= reads

    def _refuse(self, message: str) -> NoReturn:
        fix = f"give them behind FILE and --; 'elastune run {self._path.name} -- --help' lists them"
        raise UserError("a program's own arguments must be those that it takes", " ".join(message.split()), fix)

    def _refuse_unknown(self, result: Namespace) -> None:
        """A setting that neither the config nor the first parser has would change nothing, silently."""
        known = {*vars(result), *self.config}
        if unknown := [name for name in self._settings if name not in known]:
            rule = "a setting must be one of the program's arguments"
            raise UserError(rule, ", ".join(unknown), f"known: {', '.join(sorted(known))}")

    def _take(self, parser: ArgumentParser, result: Namespace) -> None:
        values = dict(vars(result))
        for name, value in self._settings.items():
            if name in values and (not _is_plain(values[name]) or _as_setting(values[name]) != value):
                setattr(result, name, _converted(parser, name, value))
        if not self._trains:
            self._parsed.append(_Parsed(parser, values))
        self.config.update({name: _as_setting(value) for name, value in vars(result).items() if _is_plain(value)})


def read_in_function(arguments: ProgramArguments, module: ModuleType, path: Path, train: str) -> None:
    """Let a parser that a function makes read the arguments, without calling the function.

    Of the functions that the training uses, one must hold the call at its top. Its lines that make the parser run, and
    no others. If they need more than the file's top level has, nothing is read: the parser is then watched while the
    program trains.

    Args:
        arguments: The program's arguments.
        module: The imported file.
        path: The file.
        train: The name of its training function.

    Raises:
        UserError: The parser does not take the arguments.
    """
    text = path.read_bytes()
    if not any(name.encode() in text for name in READS):
        return
    used = used_by_training(without_docstrings(ast.parse(text)), train)
    candidates = [_lines_of_parser(each) for each in used if isinstance(each, ast.FunctionDef)]
    parsers = [lines for lines in candidates if lines]
    if len(parsers) != 1:
        return
    code = compile(ast.Module(parsers[0], type_ignores=[]), str(path), "exec")
    with arguments.watched():
        try:
            FunctionType(code, dict(vars(module)))()  # lines of the file that was just imported
        except UserError:
            raise
        except Exception:  # noqa: BLE001 - they need other lines of the function
            arguments.config.clear()


def _lines_of_parser(function: ast.FunctionDef) -> list[ast.stmt]:
    """The statements of ``function`` that make a parser, and its call without arguments; none if there is none."""
    simple = [each for each in function.body if isinstance(each, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return)]
    calls = [
        (statement, node)
        for statement in simple
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and _reads_words(node)
    ]
    if not calls:
        return []
    statement, call = calls[0]
    made: list[ast.stmt] = []
    known = _names(call.func)
    for each in function.body[: function.body.index(statement)]:
        if isinstance(each, ast.Import | ast.ImportFrom) or known & _names(each):
            made.append(each)
            known |= _names(each, ast.Store)
    signature = function.args
    parameters = {each.arg for each in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)}
    if parameters & {name for each in (*made, call) for name in _names(each)}:
        return []
    return [*made, ast.copy_location(ast.Expr(call), call)]


def _reads_words(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in READS and not call.args and not call.keywords


def _names(node: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, context)}


# --- values ---


def _is_plain(value: object) -> bool:
    """Whether a setting can hold ``value``; a path is held as text."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str | PurePath)


def _as_setting(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_setting(each) for each in value]
    return str(value) if isinstance(value, PurePath) else value


def _converted(parser: ArgumentParser, name: str, value: Any) -> Any:
    """``value`` of a setting as ``parser`` would return it. Raises ``UserError`` if the parser would not take it."""
    action = _action(parser, name)
    if action is None or value is None or isinstance(value, bool):
        return value
    try:
        converted = [_of_type(action, each) for each in value] if isinstance(value, list) else _of_type(action, value)
    except (ArgumentTypeError, TypeError, ValueError) as error:
        rule = f"the setting {name} must be what the program's parser takes"
        raise UserError(rule, f"{value!r}: {error}", f"as for {_shown(action)}") from None
    choices = None if action.choices is None else list(action.choices)
    for each in converted if isinstance(converted, list) else [converted]:
        if choices is not None and each not in choices:
            rule = f"the setting {name} must be one of the parser's choices"
            raise UserError(rule, repr(each), f"use one of {', '.join(map(str, choices))}")
    return converted


def _action(parser: ArgumentParser, name: str) -> Action | None:
    """The argument of ``parser``, or of one of its sub-parsers, whose value has this name."""
    for action in parser._actions:
        if action.dest == name:
            return action
        inner = action.choices.values() if isinstance(action.choices, dict) else ()
        for each in inner:
            nested = _action(each, name) if isinstance(each, ArgumentParser) else None
            if nested is not None:
                return nested
    return None


def _of_type(action: Action, value: Any) -> Any:
    if callable(action.type):
        return action.type(value if action.type is float else str(value))
    return str(value) if isinstance(action.default, str) else value


def _shown(action: Action) -> str:
    return action.option_strings[-1] if action.option_strings else action.dest
