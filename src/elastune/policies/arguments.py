"""Checks of what a policy passes to its run."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from elastune.core.errors import UserError

MOST = 2**31  # of anything that is counted: votes carry two digits of 16 bits


def whole(what: str, value: object, least: int) -> int:
    """Return ``value`` as a whole number of at least ``least``; ``what`` names it in the error."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= MOST:
        rule = f"{what} must be a whole number from {least} to {MOST}"
        raise UserError(rule, repr(value), "round it, and mind its bounds")
    return number


def number_of(what: str, value: object, least: float) -> float:
    """Return ``value`` as a finite number of at least ``least``; ``what`` names it in the error."""
    number = numbers_of(value)
    if isinstance(value, bool) or isinstance(number, tuple) or not least <= number < math.inf:
        raise UserError(
            f"{what} must be a finite number, at least {least:g}", repr(value), "mind NaN before the first measurement"
        )
    return number


def numbers_of(x: object) -> float | tuple[float, ...]:
    """Return ``x`` as a number or a flat tuple of numbers; arrays and tensors give their values."""
    x = x.tolist() if hasattr(x, "tolist") else x
    try:
        if isinstance(x, Sequence) and not isinstance(x, (str, bytes)):
            return tuple(map(_float, x))
        return _float(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError("a number or a flat list of numbers is needed", repr(x), "convert it with float()") from error


def _float(x: Any) -> float:
    if isinstance(x, (str, bytes)):
        raise TypeError("a text is no number")
    return float(x)
