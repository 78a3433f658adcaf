"""Numbers, times, costs, counts and untrusted text, formatted for a reader.

All rooms format values here, so that one value looks the same in a message, a table and a page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def plain(value: object, limit: int = 120) -> str:
    """Return ``value`` as one printable line of at most ``limit`` characters. A renderer of HTML must escape it."""
    line = printable(" ".join(str(value).split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def printable(text: str) -> str:
    r"""Return ``text`` with escapes, such as ``\x1b`` or ``\u202e``, in place of characters that a terminal obeys or
    hides.

    Line breaks, tabs and wide spaces stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or _is_space(c) else _escape(c) for c in text)


def cut(text: str, most: int) -> str:
    """Return ``text``, or both of its ends where it has more than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"


def _is_space(c: str) -> bool:
    return c.isspace() and c >= "\xa0" and c not in "\u2028\u2029"


def _escape(c: str) -> str:
    return c.encode("unicode_escape").decode()


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


def interval(ends: tuple[float, float] | None, digits: int = 2) -> str:
    """``0.958 to 0.995``: both ends to as many decimals as their distance has in ``digits`` significant digits."""
    if ends is None or not all(map(math.isfinite, ends)):
        return "–"
    low, high = ends
    width = high - low
    if not 1e-6 <= width < 1e6:
        return f"{number(low)} to {number(high)}"
    decimals = max(0, digits - 1 - math.floor(math.log10(width)))
    return f"{low:.{decimals}f} to {high:.{decimals}f}"


def estimate(mean: float | None, ends: tuple[float, float] | None) -> str:
    """``0.984 (0.970 to 0.993)``: the mean to as many decimals as its interval, which may be unknown."""
    shown = interval(ends)
    if mean is None or shown == "–" or not math.isfinite(mean):
        return number(mean)
    decimals = len(shown.partition(" ")[0].partition(".")[2])
    return f"{mean:.{decimals}f} ({shown})" if decimals else f"{number(mean)} ({shown})"


def modelled(factor: float | None) -> str:
    """Return ``modelled, ×÷ 1.4``: a model's figure and the factor by which it may be wrong (None: unknown)."""
    return "modelled, unchecked" if factor is None else f"modelled, ×÷ {number(factor, 3)}"


def duration(seconds: float | None) -> str:
    """``340 µs``, ``235 ms``, ``42.3 s``, ``3.2 min``, ``2.1 h`` or ``3.4 days``; an en dash for None."""
    if seconds is None or not math.isfinite(seconds) or seconds == 0:
        return "0 s" if seconds == 0 else number(seconds)
    size = abs(seconds)
    if size < 0.9995e-3:
        return f"{number(seconds * 1e6, 3)} µs"
    if size < 0.9995:
        return f"{number(seconds * 1e3, 3)} ms"
    if size < 59.95:
        return f"{number(seconds, 3)} s"
    for unit, length, up_to in (("min", 60.0, 59.95), ("h", 3600.0, 47.95)):
        if size / length < up_to:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 86400:,.1f} days"


def cost(value: float | None, price_per_worker_hour: float = 1.0) -> str:
    """Return a cost: ``$0.41``; at a price of 1.0 the work itself, as ``52.3 worker-s`` or ``1.2 worker-h``."""
    if value is None or not math.isfinite(value):
        return number(value)
    if price_per_worker_hour == 1.0:
        amount, _, unit = duration(value * 3600).partition(" ")
        return f"{amount} worker-{unit}"
    if value == 0 or abs(value) < 0.00995:
        return f"${number(value, 2)}"
    return f"${value:,.2f}" if abs(value) < 999.5 else f"${value:,.0f}"


def whole(n: int) -> str:
    """``12,345``."""
    return f"{n:,}"


def byte_count(n: int | None) -> str:
    """A number of bytes in a unit that a person reads: "0 B", "12.5 MiB"."""
    if n is None:
        return "–"
    size, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}" if size < 1000 or units[0] == "TiB" else f"{size:.0f} {units[0]}"


def count(n: int, noun: str) -> str:
    """``1 worker``, ``2 workers``, ``12,345 steps``."""
    return f"{whole(n)} {noun}" if n == 1 else f"{whole(n)} {noun}s"


def bandwidth(seconds_per_byte: float) -> str:
    """Of a link: "125 MB/s"."""
    return f"{number(1 / seconds_per_byte / 1e6)} MB/s" if seconds_per_byte > 0 else "free"


def rate(per_second: float | None, noun: str = "samples") -> str:
    """``12,345 samples/s``, ``0.42 samples/s``."""
    if per_second is None or not math.isfinite(per_second):
        return number(per_second)
    return f"{per_second:,.0f} {noun}/s" if per_second >= 999.5 else f"{number(per_second, 3)} {noun}/s"


def value_text(value: object) -> str:
    """Return a configuration value in short form: numbers rounded, everything else as one line."""
    if isinstance(value, float):
        return number(value)
    return plain(value, 60)


def settings_text(settings: Mapping[str, Any], without: tuple[str, ...] = ()) -> str:
    """Return ``lr=0.05, momentum=0.9`` in the given order, without settings that are None."""
    shown = {key: value for key, value in settings.items() if key not in without and value is not None}
    return ", ".join(f"{plain(key, 40)}={value_text(value)}" for key, value in shown.items())


def differing(configs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the settings that do not have one value in all of ``configs``, in the order of appearance."""
    names = dict.fromkeys(name for config in configs for name in config)
    missing = object()
    return tuple(name for name in names if len({repr(config.get(name, missing)) for config in configs}) > 1)


FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""A spreadsheet runs a text that begins with one of these (OWASP, "CSV Injection")."""


def spreadsheet_cell(value: Any) -> str:
    """Return ``value`` for a CSV file that a spreadsheet may open: a text that it would run gets a ' in front."""
    if value is None:
        return ""
    if isinstance(value, str):
        text = printable(value)
        return f"'{text}" if value.startswith(FORMULA) else text
    return json.dumps(value) if isinstance(value, (bool, list, dict)) else repr(value)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested mapping as ``{"machine.cores": "2"}``; lists as one comma-separated line."""
    param_blocks: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{plain(key, 60)}"
        if isinstance(value, Mapping):
            param_blocks |= flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            param_blocks[name] = plain(", ".join(map(str, value)), 400)
        else:
            param_blocks[name] = plain("–" if value is None else value, 400)
    return param_blocks


def _trimmed(digits: str) -> str:
    return digits.rstrip("0").rstrip(".") if "." in digits else digits
