"""Numbers and foreign strings as a reader wants to see them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def plain(value: object, limit: int = 120) -> str:
    """``value`` as one printable line of at most ``limit`` characters. Not escaped: that is the renderer's part."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def number(value: float | None, digits: int = 4) -> str:
    """``value`` to ``digits`` significant digits, without an exponent where that stays short; an en dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "-∞"}.get(value, "NaN")
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e7:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{_trimmed(mantissa)}e{int(exponent)}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return _trimmed(f"{value:.{decimals}f}")


def plus_minus(mean: float | None, half_width: float | None, digits: int = 4) -> str:
    """``0.9812 ± 0.0021``: the interval to two significant digits, the mean to as many decimals."""
    if mean is None or half_width is None or not math.isfinite(half_width) or not math.isfinite(mean):
        return number(mean, digits)
    if half_width == 0 or not 1e-6 <= half_width < 1e6:
        return f"{number(mean, digits)} ± {number(half_width, 2)}"
    decimals = max(0, 1 - math.floor(math.log10(half_width)))
    return f"{mean:.{decimals}f} ± {half_width:.{decimals}f}"


def duration(seconds: float) -> str:
    """``42.3 s``, ``3 min 05 s`` or ``2 h 04 min``."""
    if seconds < 60:
        return f"{number(seconds, 3)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count(n: int, noun: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def value_text(value: object) -> str:
    """A configuration value: numbers short, everything else as one line."""
    if isinstance(value, float):
        return number(value)
    return plain(value, 60)


def settings_text(settings: Mapping[str, Any], without: tuple[str, ...] = ()) -> str:
    """``lr=0.05, momentum=0.9``, in the order given. What is None is not set, and left out."""
    told = {key: value for key, value in settings.items() if key not in without and value is not None}
    return ", ".join(f"{plain(key, 40)}={value_text(value)}" for key, value in told.items())


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested mapping as ``{"machine.cores": "2"}``; lists as one comma-separated line."""
    leaves: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{plain(key, 60)}"
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            leaves[name] = plain(", ".join(map(str, value)), 400)
        else:
            leaves[name] = plain("–" if value is None else value, 400)
    return leaves


def _trimmed(digits: str) -> str:
    return digits.rstrip("0").rstrip(".") if "." in digits else digits
