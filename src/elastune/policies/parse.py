"""Text of a command line as a policy's name and options. Pure; every broken text is a ``UserError``.

``gns:max_batch=2048,lr=sqrt`` names a policy and its options; a tuple is written as ``30/60/90``.
"""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from elastune.core.errors import UserError

EXAMPLE = "such as gns:max_batch=2048,lr=sqrt"
LONGEST = 1000  # characters of a policy's text
_TRUTHS = {"true": True, "false": False}


@dataclass(frozen=True)
class Option:
    """One option: its ``kind`` is int, float, str, bool, ``tuple[kind, ...]``, a ``Literal`` or one of them or None."""

    name: str
    kind: Any
    required: bool


def split(text: str) -> tuple[str, dict[str, str]]:
    """The name and the options' texts of "name:option=value,option=value"."""
    if len(text) > LONGEST:
        raise UserError(f"a policy has at most {LONGEST} characters", f"{text[:20]}...", "shorten it")
    name, colon, rest = text.strip().partition(":")
    if not name.isidentifier() or (colon and not rest.strip()):
        raise UserError("a policy must be NAME or NAME:OPTION=VALUE,...", repr(text), EXAMPLE)
    options: dict[str, str] = {}
    for pair in rest.split(",") if colon else ():
        option, equals, value = (part.strip() for part in pair.partition("="))
        if not (option.isidentifier() and equals and value):
            raise UserError("an option of a policy must be OPTION=VALUE", repr(pair), EXAMPLE)
        if option in options:
            raise UserError(f"an option of {name} may be given once", option, "remove the others")
        options[option] = value
    return name, options


def options_of(kind: type) -> dict[str, Option]:
    """The options of a policy's class: its constructor's keyword arguments, annotated or with a plain default.

    Arguments of other types are left at their defaults.
    """
    name = kind.__name__
    try:
        parameters = inspect.signature(kind, eval_str=True).parameters.values()
    except NameError as error:
        raise UserError(
            f"the options of {name} must have known types", error, "import them, or leave them out"
        ) from None
    found = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        required = parameter.default is parameter.empty
        wanted = parameter.annotation
        if wanted is parameter.empty:
            wanted = type(parameter.default) if not required else str
        if parameter.kind is not parameter.POSITIONAL_ONLY and _known(wanted):
            found[parameter.name] = Option(parameter.name, wanted, required)
        elif required:
            rule = f"an option of {name} must be int, float, str, bool or a tuple of one of them"
            raise UserError(rule, parameter, "annotate it so, or give it a default")
    return found


def values(policy: str, texts: Mapping[str, str], known: Mapping[str, Option]) -> dict[str, Any]:
    """The values of ``texts`` by option. Every option must be ``known``."""
    names = ", ".join(sorted(known)) or "none"
    for name in texts:
        if name not in known:
            raise UserError(f"{policy} has no such option", name, f"known: {names}")
    for option in known.values():
        if option.required and option.name not in texts:
            raise UserError(f"{policy} needs {option.name}", "nothing", f"write {policy}:{option.name}=...")
    return {name: _value(f"{policy}'s {name}", text, known[name].kind) for name, text in texts.items()}


def _known(kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return all(arg is type(None) or _known(arg) for arg in args)
    if origin is tuple:
        return len(args) == 2 and args[1] is Ellipsis and args[0] in (int, float, str)
    if origin is Literal:
        return all(isinstance(arg, str) for arg in args)
    return kind in (int, float, str, bool)


def _value(what: str, text: str, kind: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if type(None) in args and text.lower() == "none":
            return None
        (only, *others) = (arg for arg in args if arg is not type(None))
        if others:
            raise UserError(f"{what} has several types", kind, "give it one")
        return _value(what, text, only)
    if origin is tuple:
        return tuple(_value(what, part, args[0]) for part in text.split("/"))
    if origin is Literal:
        if text not in args:
            raise UserError(f"{what} must be known", text, f"use one of {', '.join(args)}")
        return text
    if kind is bool:
        if text.lower() not in _TRUTHS:
            raise UserError(f"{what} must be true or false", text, "write one of them")
        return _TRUTHS[text.lower()]
    if kind is int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise UserError(f"{what} must be a whole number", text or "nothing", "such as 64")
        return int(text)
    return _number(what, text) if kind is float else text


def _number(what: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{what} must be a number", text or "nothing", "such as 1.5")
    return number
