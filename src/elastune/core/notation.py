"""Values as the text of a command line: durations, sizes, numbers of workers, settings of a program. Pure.

Every text that breaks a rule is a ``UserError``. The notations at the end are those of settings (``core/fields.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from elastune.core.divergence import parse_divergence
from elastune.core.errors import UserError
from elastune.core.fields import Notation
from elastune.core.mesh import MOST_WORKERS, Mesh
from elastune.core.run import Config, ConfigValue

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
UNITS_BYTES = {
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
}
LONGEST_S = 366 * UNITS_S["d"]
LONGEST_VALUE = 10_000
_PYTHONS = {"True": True, "False": False, "None": None}  # JSON has other words for them; as text each would be true


def duration(text: str, option: str = "--budget") -> float:
    """Seconds of "90s", "3m", "1.5h" or "2d"."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd])", text.strip())
    fix = "a number and s, m, h or d, such as 90s or 1.5h"
    if match is None:
        raise UserError(f"{option} must be a duration", repr(text), fix)
    seconds = float(match[1]) * UNITS_S[match[2]]
    if not 0 < seconds <= LONGEST_S:
        raise UserError(f"{option} must be above 0 and at most a year", repr(text), fix)
    return seconds


def size(text: str, option: str) -> int:
    """Bytes of "500MB", "2GB" or "24GiB"."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(kB|MB|GB|TB|MiB|GiB|TiB)", text.strip())
    if match is None or not (bytes_ := int(float(match[1]) * UNITS_BYTES[match[2]])):
        raise UserError(f"{option} must be a size above 0", repr(text), "a number and kB, MB, GB or TB, such as 2GB")
    return bytes_


def speed(text: str, option: str = "--link") -> float:
    """Gbit/s of a speed such as "25Gbit/s" or "200Mbit/s"."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([MG])bit/s", text.strip())
    if match is None or not float(match[1]) > 0:
        raise UserError(
            f"{option} must be a speed above 0", repr(text[:100]), "a number and Mbit/s or Gbit/s: 25Gbit/s"
        )
    return float(match[1]) / {"M": 1000, "G": 1}[match[2]]


def worker_counts(text: str) -> tuple[int, ...]:
    """Ascending worker counts of "1,2,4,8"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        raise UserError("--workers must be whole numbers with commas between them", repr(text), "such as 1,2,4,8")
    counts = sorted(int(part) for part in parts)
    for count in counts:
        if not 1 <= count <= MOST_WORKERS:
            raise UserError(f"--workers must be from 1 to {MOST_WORKERS}", count, "such as 1,2,4,8")
        if counts.count(count) > 1:
            raise UserError("a worker count may be named once", count, "remove the others")
    return tuple(counts)


def worker_bounds(text: str, option: str = "--workers") -> tuple[int, int]:
    """From "3" or "1:8" the smallest and the largest number of workers: (1, 3), (1, 8)."""
    match = re.fullmatch(r"(?:([0-9]{1,9}):)?([0-9]{1,9})", text.strip())
    fix = "such as 3, or 1:8 for at least 1 and at most 8"
    if match is None:
        raise UserError(f"{option} must be a whole number or LOW:HIGH", repr(text), fix)
    low, high = int(match[1] or 1), int(match[2])
    if not 1 <= low <= high <= MOST_WORKERS:
        raise UserError(f"{option} must be from 1 to {MOST_WORKERS}, LOW first", repr(text), fix)
    return low, high


def settings(pairs: Iterable[str]) -> Config:
    """The configuration of "lr=0.05", "name=text": values are JSON numbers, truths, null, text or lists, else text.

    "optim.lr=0.05" is of a nested configuration.
    """
    config: Config = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not all(part.isidentifier() for part in name.strip().split(".")):
            raise UserError("--set must be NAME=VALUE", repr(pair), "such as --set lr=0.05, or optim.lr=0.05")
        if name.strip() in config:
            raise UserError("a setting may be given once", name.strip(), "remove the others")
        config[name.strip()] = value(name.strip(), text.strip())
    return config


def numbers(texts: Iterable[str], option: str) -> dict[str, float]:
    """From "accuracy=0.98,seconds=60", one text or several, each name's number."""
    numbers_by_name: dict[str, float] = {}
    for pair in (pair for text in texts for pair in text.split(",")):
        name, _, value = pair.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not name.strip().isidentifier() or number != number or abs(number) == float("inf"):
            raise UserError(f"{option} must be NAME=NUMBER,...", repr(pair), f"such as {option} accuracy=0.98")
        if name.strip() in numbers_by_name:
            raise UserError(f"{option} may name an objective once", name.strip(), "remove the others")
        numbers_by_name[name.strip()] = number
    return numbers_by_name


def value(name: str, text: str) -> ConfigValue:
    """The value of the setting ``name`` that is written as ``text``. Raises ``UserError``."""
    rule = f"setting {name} must be a number, text, true, false, null or a list"
    if len(text) > LONGEST_VALUE:
        raise UserError(f"a value has at most {LONGEST_VALUE} characters", f"{name}, {len(text)}", "shorten it")
    if text in _PYTHONS:
        return _PYTHONS[text]
    try:
        parsed = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise UserError(rule, f"{text[:20]}...", "nest it less") from None
    except ValueError:
        return text
    if not _is_plain(parsed):
        raise UserError(rule, text, "give each of its entries alone, such as optim.lr=0.05")
    return parsed  # type: ignore[no-any-return]


def _refuse_constant(text: str) -> None:
    raise UserError("a setting must be finite", text, "give a number")


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, float):
        return abs(value) != float("inf")  # "1e999" is JSON
    return value is None or isinstance(value, (bool, int, str))


# --- the notations of settings ---

_LARGEST_UNITS_S = (("h", 3600.0), ("m", 60.0), ("s", 1.0))


def duration_text(seconds: float | None) -> str | None:
    """The text of a duration, such as "3m"; None for no duration and for 0."""
    if not seconds:
        return None
    unit, size_s = next((each for each in _LARGEST_UNITS_S if seconds % each[1] == 0), ("s", 1.0))
    return f"{seconds / size_s:g}{unit}"


def meshes(texts: Sequence[str]) -> tuple[Mesh, ...]:
    """The meshes of texts such as "data=2,shard=2"."""
    return tuple(Mesh.parse(text) for text in texts)


def _factor_text(factor: float | None) -> str:
    return "off" if factor is None else f"{factor:g}"


NAMED = "NAME[:OPTION=VALUE,...]"
TIME = Notation("TIME", duration, duration_text)
SIZE = Notation("SIZE", size)
BOUNDS = Notation("LOW:HIGH", worker_bounds, lambda bounds: None if bounds is None else ":".join(map(str, bounds)))
SPEED = Notation("SPEED", speed, lambda gbit_s: f"{gbit_s:g}Gbit/s")
COUNTS = Notation("N,N,...", lambda text, option: worker_counts(text))
FACTOR_OR_OFF = Notation("FACTOR|off", lambda text, option: parse_divergence(text), _factor_text)
CONFIG = Notation("NAME=VALUE", lambda texts, option: settings(texts), many=True)
MESHES = Notation("AXIS=N,...", lambda texts, option: meshes(texts), many=True)
