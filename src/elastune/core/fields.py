"""One setting: a dataclass field with its default, its help text, and the text that a command line has for its value.

The field is the only declaration of the setting. The command line, the Python functions, the journal and the reference
page all read it. ``core/settings.py`` and ``tuning/study/settings.py`` have groups of settings. ``keywords_of`` makes
the fields of a group the keywords of a function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Signature, signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from elastune.core.errors import UserError

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
S = TypeVar("S")
T = TypeVar("T")
S_co = TypeVar("S_co", covariant=True)
_KEY = "setting"
COMMON = "Common"
"""The panel of help that comes first: the settings that most users need."""
OUTPUT = "Output and checks"
"""The panel of help of options that change no result."""
_WIDTH = 116  # of a line in a docstring


@dataclass(frozen=True)
class Notation:
    """How a command line writes values that are not plain numbers, texts or paths.

    Attributes:
        metavar: The form of the text, such as "TIME".
        read: The value of a text. Its second argument is the name of the option, for errors.
        write: The text of a default; None where help shows no default.
        many: Whether the option may be repeated. ``read`` then gets the list of all texts.

    Example:
        >>> Notation("TIME", duration).read("1.5m", "--budget")
        90.0
    """

    metavar: str
    read: Callable[[Any, str], Any]
    write: Callable[[Any], str | None] = lambda value: None
    many: bool = False


@dataclass(frozen=True)
class Setting:
    """What a field says about itself beside its name, type and default.

    Attributes:
        help: The help text.
        option: The option's name; "": that of the field, "--trial-workers" for ``trial_workers``.
        metavar: The form of a text or a number; "": as usual for the type, or as ``notation`` has it.
        notation: How the value is written; None: as usual for the type.
        panel: The panel of ``--help`` that has the option, such as ``COMMON``; "": that of all other options.
    """

    help: str
    option: str = ""
    metavar: str = ""
    notation: Notation | None = None
    panel: str = ""

    def option_of(self, name: str) -> str:
        """The option of the field ``name``."""
        return self.option or f"--{name.strip('_').replace('_', '-')}"


def described(
    help_text: str, option: str = "", notation: Notation | None = None, metavar: str = "", panel: str = ""
) -> dict[str, Any]:
    """Return the metadata of a field that is a setting, for ``dataclasses.field``."""
    return {_KEY: Setting(help_text, option, metavar, notation, panel)}


def setting(
    default: T,
    help_text: str,
    option: str = "",
    notation: Notation | None = None,
    *,
    metavar: str = "",
    panel: str = "",
) -> T:
    """Return a dataclass field that is a setting.

    Args:
        default: The default; a dict is copied.
        help_text: The help text, in sentences. Options in it, such as ``--resume``, appear as keywords in Python.
        option: As in ``Setting``.
        notation: As in ``Setting``.
        metavar: As in ``Setting``.
        panel: As in ``Setting``.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Rest:
        ...     pause_s: float = setting(60.0, "How long to rest.", "--pause", TIME)
    """
    metadata = described(help_text, option, notation, metavar, panel)
    if isinstance(default, dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def settings_of(kind: type) -> dict[str, Setting]:
    """Return the settings among the fields of ``kind``, by the name of the field."""
    return {each.name: each.metadata[_KEY] for each in fields(kind) if _KEY in each.metadata}


def values_of(kind: type, source: object) -> dict[str, Any]:
    """Return the values of the fields of ``kind`` that ``source``, an instance of it or of a subclass, has.

    Example:
        >>> StudyRequest(program, out, **values_of(TrainingSettings, settings))
    """
    return {each.name: getattr(source, each.name) for each in fields(kind)}


def settle_sequences(settings: object) -> None:
    """Make each list among the values of ``settings`` a tuple, and a text or path in place of several a tuple of one.

    For ``__post_init__``: what a user writes as a list then compares and hashes like a tuple.
    """
    for each in fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, each.name)
        if isinstance(value, list):
            object.__setattr__(settings, each.name, tuple(value))
        elif isinstance(value, str | Path) and each.default == ():
            object.__setattr__(settings, each.name, (value,))


# --- values of other types ---

_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    Path: "a path",
    NoneType: "None",
}
_EXAMPLES = {int: "2", float: "0.5", bool: "True", str: '"text"', Path: '"folder"', NoneType: "None"}


def check_types(settings: Any, without: Collection[str] = ()) -> None:
    """Refuse values whose type is not that of their field, such as ``epochs="3"``.

    For ``__post_init__``. A whole number of another package becomes an ``int``. Texts of a command line were read
    before.

    Args:
        settings: A dataclass of settings.
        without: The names of fields that are checked elsewhere.

    Raises:
        UserError: With the name of the setting, its value, and a value that fits.

    Example:
        >>> check_types(RunSettings(epochs="3"))
        Traceback (most recent call last):
        elastune.core.errors.UserError: epochs must be a whole number or None (got '3'): such as epochs=2
    """
    kind: Any = type(settings)
    for name, hint in _types(kind).items():
        value = getattr(settings, name)
        if name in without or _fits(value, hint):
            if not isinstance(value, int) and isinstance(value, Integral):
                object.__setattr__(settings, name, int(value))
            continue
        kinds = _members(hint)
        rule = f"{name} must be {' or '.join(_text_and_example(kind)[0] for kind in kinds)}"
        example = _text_and_example(next((kind for kind in kinds if kind is not NoneType), kinds[0]))[1]
        raise UserError(rule, repr(value)[:100], f"such as {name}={example}")


@cache
def _types(kind: type) -> dict[str, Any]:
    """The types of the settings of ``kind``, and of ``execution``; without those that only type checkers load."""
    known: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        for name, text in vars(base).get("__annotations__", {}).items():
            if name not in settings_of(kind) and name != "execution":
                continue
            alone = type("alone", (), {"__annotations__": {name: text}, "__module__": base.__module__})
            try:
                known[name] = get_type_hints(alone)[name]
            except NameError:
                continue
    return known


def _members(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]


def _fits(value: object, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is type(value):
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:  # which texts there are is checked elsewhere
        return type(value) in map(type, inner)
    if origin is tuple or origin is Sequence:
        return isinstance(value, list | tuple) and all(any(_fits(each, kind) for kind in inner) for each in value)
    if hint is int or hint is float:
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    plain = origin or hint
    return isinstance(value, plain) if isinstance(plain, type) else True


def _text_and_example(kind: Any) -> tuple[str, str]:
    """What values of ``kind`` are called, and one of them."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return _KINDS[str], f'"{inner[0]}"'
    if origin is Sequence or origin is tuple:
        first = _members(inner[0])[0]
        example = _EXAMPLES[first]
        number = "two" if origin is tuple and len(inner) == 2 and inner[1] is not ... else "several"
        return (f"{number} {_KINDS[first].removeprefix('a ')}s", f"({example}, {example})")
    if origin is Mapping:
        return "a dict", '{"accuracy": "max"}'
    return (
        (_KINDS[kind], _EXAMPLES[kind]) if kind in _KINDS else (f"of the type {kind.__name__}", f"{kind.__name__}(...)")
    )


# --- the same help texts for Python ---


def python_help(kind: type, names: dict[str, str] | None = None) -> list[str]:
    """Return "name: help" of each setting of ``kind``, with keywords in place of options.

    Args:
        kind: A dataclass of settings.
        names: The keyword of each option; None: those of ``kind``.
    """
    known = settings_of(kind)
    keywords = {each.option_of(name): name for name, each in known.items()} if names is None else names

    def keyword(match: re.Match[str]) -> str:
        return keywords.get(match[0], match[0].lstrip("-").replace("-", "_"))

    return [f"{name}: {re.sub(r'--[a-z][a-z-]*', keyword, each.help)}" for name, each in known.items()]


def documented(kind: type[T]) -> type[T]:
    """Return ``kind`` with a list of its settings at the end of its docstring: a class decorator."""
    kind.__doc__ = with_section(kind.__doc__ or "", "Attributes:", python_help(kind))
    return kind


def with_section(text: str, title: str, entries: list[str]) -> str:
    """Return the docstring ``text`` with a section of ``entries`` at its end."""
    if not entries:
        return text
    lines = [line for entry in entries for line in _wrapped(entry)]
    return "\n".join([text.rstrip(), "", f"    {title}", *lines, "    "])


def _wrapped(entry: str) -> list[str]:
    """The lines of an entry of a docstring, indented."""
    lines, line = [], " " * 8
    for word in entry.split():
        if len(line) + len(word) >= _WIDTH and line.strip():
            lines.append(line.rstrip())
            line = " " * 12
        line += f"{word} "
    return [*lines, line.rstrip()]


class _Decorator(Protocol[P, S_co]):
    """Puts the keywords ``P`` in place of the last parameter, which is the settings ``S_co``."""

    @overload
    def __call__(self, function: Callable[[A, S_co], T]) -> Callable[Concatenate[A, P], T]: ...
    @overload
    def __call__(self, function: Callable[[A, B, S_co], T]) -> Callable[Concatenate[A, B, P], T]: ...


def keywords_of(kind: Callable[P, S]) -> _Decorator[P, S]:
    """Return a decorator: a function takes the fields of the dataclass ``kind`` as keywords, in place of ``settings``.

    Type checkers know the keywords, ``help`` lists them, and a wrong name is a ``UserError`` with the nearest one.

    Example:
        >>> @keywords_of(StudySettings)
        ... def tune(train, space, settings): ...
        >>> tune(train, space, workers=8, trials=50)
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(signature(function).parameters.values())[:-1]
        added = signature(kind).parameters.values()
        whole = Signature([*parameters, *added], return_annotation=signature(function).return_annotation)

        @wraps(function)
        def call(*values: Any, **keywords: Any) -> Any:
            check_keywords(function.__name__, set(keywords), set(whole.parameters))
            arguments = whole.bind(*values, **keywords).arguments
            positional = [arguments.pop(parameter.name) for parameter in parameters]
            return function(*positional, kind(**arguments))  # type: ignore[call-arg]

        call.__signature__ = whole  # type: ignore[attr-defined]
        call.__doc__ = with_section(function.__doc__ or "", "Keywords:", python_help(kind))  # type: ignore[arg-type]
        return call

    return decorate


def check_keywords(function: str, names: set[str], known: set[str]) -> None:
    """Raise ``UserError`` for a keyword that ``function`` does not have."""
    for name in sorted(names - known):
        near = get_close_matches(name, sorted(known), 1)
        fix = f"use {near[0]}" if near else f"help(elastune.{function}) lists the keywords"
        raise UserError(f"elastune.{function} takes the settings that it has, as keywords", name, fix)
