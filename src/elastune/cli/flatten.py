"""Commands take groups of options as dataclasses; Typer sees each field as an option of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

from elastune.cli.given import command_given
from elastune.core.command import CommandGiven


def flatten(command: Callable[..., int]) -> Callable[..., int]:
    """``command`` with the fields of its dataclass parameters as keyword parameters in their place.

    A parameter that is a ``CommandGiven`` is no option: the command gets its own words there.
    """
    hints = get_type_hints(command, include_extras=True)
    wishes = [name for name, kind in hints.items() if kind is CommandGiven]
    groups = {name: kind for name, kind in hints.items() if name not in ("return", *wishes) and is_dataclass(kind)}
    flat: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in wishes:
            continue
        flat += _fields_of(groups[name]) if name in groups else [_keyword(name, hints[name], parameter.default)]

    @wraps(command)
    def call(**given: Any) -> int:
        words = {name: command_given(command.__name__, flat, given) for name in wishes}
        grouped = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}  # type: ignore[operator]
        return command(**given, **grouped, **words)

    call.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return call


def _fields_of(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        _keyword(f.name, hints[f.name], Parameter.empty if f.default is MISSING else f.default) for f in fields(group)
    ]


def _keyword(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
