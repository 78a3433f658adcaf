"""Functions whose keywords are the fields of a dataclass of settings, so that no keyword is declared a second time."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from inspect import Signature, signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from elastune.core.errors import UserError
from elastune.core.fields import python_help, with_section

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
S = TypeVar("S")
T = TypeVar("T")
S_co = TypeVar("S_co", covariant=True)


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
