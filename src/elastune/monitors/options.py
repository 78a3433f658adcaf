"""The options of monitors: "name:every=10,memory=50" taken apart, and the limits that they share."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Mapping
from typing import Any

from elastune.core.errors import UserError
from elastune.monitors.base import Monitor

_EXAMPLE = "write it as noise_scale or noise_scale:every=10,memory=50"
_KINDS = {int: "a whole number", float: "a number", str: "a text"}


def check(every: object, memory: object, least_memory: float = 1) -> None:
    """Raise ``UserError`` unless a reading is taken every ``every`` >= 1 steps and ``memory`` readings are kept."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UserError("a monitor reads every so many steps, at least 1", every, "give every=1 or more")
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not least_memory <= memory < math.inf:
        raise UserError(
            f"a monitor's memory is a number of readings, at least {least_memory:g}", memory, "give memory=100, say"
        )


def split(text: str) -> tuple[str, dict[str, str]]:
    """ "name:a=1,b=2" as the name and its options, all still texts; raises ``UserError`` for what has another form."""
    if not isinstance(text, str):
        raise UserError("a monitor is given as a text", repr(text), _EXAMPLE)
    name, colon, rest = text.strip().partition(":")
    name = name.strip()
    if not name:
        raise UserError("a monitor must be named", repr(text), _EXAMPLE)
    options: dict[str, str] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not key or not equals or not value:
            raise UserError("a monitor's option is written name=value", repr(text), _EXAMPLE)
        if key in options:
            raise UserError("a monitor's option is given once", f"{key} in {text!r}", "keep one of them")
        options[key] = value
    return name, options


def built(name: str, kind: type[Monitor], options: Mapping[str, str]) -> Monitor:
    """A monitor of ``kind``, whose options are its constructor's arguments, read by their annotations."""
    hints = typing.get_type_hints(kind.__init__)
    known = [p for p in inspect.signature(kind).parameters if hints.get(p) in _KINDS]
    arguments: dict[str, Any] = {}
    for key, value in options.items():
        if key not in known:
            raise UserError(f"unknown option of {name}", key, f"use {', '.join(known)}" if known else "it has none")
        try:
            arguments[key] = hints[key](value)
        except ValueError:
            raise UserError(f"{key} of {name} is {_KINDS[hints[key]]}", repr(value), _EXAMPLE) from None
    return kind(**arguments)
