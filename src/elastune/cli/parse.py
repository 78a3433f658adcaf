"""Texts of a command line as values: durations, worker counts, settings, the output folder, the device.

Parsing is pure; every text that breaks a rule is a ``UserError``. The functions at the end look at this machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from elastune.cli.output import print_error
from elastune.core.errors import UserError
from elastune.core.mesh import MOST_WORKERS, Mesh
from elastune.core.run import Config, ConfigValue, Elastic
from elastune.runtime.job.output import JOURNAL, Mirror, is_url, next_folder

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


def grace(text: str | None) -> float:
    """Seconds of ``--grace``; without it workers do not outlive the command."""
    return 0.0 if text is None else duration(text, "--grace")


def size(text: str, option: str) -> int:
    """Bytes of "500MB", "2GB" or "24GiB"."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(kB|MB|GB|TB|MiB|GiB|TiB)", text.strip())
    if match is None or not (bytes_ := int(float(match[1]) * UNITS_BYTES[match[2]])):
        raise UserError(f"{option} must be a size above 0", repr(text), "a number and kB, MB, GB or TB, such as 2GB")
    return bytes_


def seconds_per_byte(text: str, option: str = "--link") -> float:
    """Seconds for a byte at a speed such as "25Gbit/s" or "200Mbit/s"."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([MG])bit/s", text.strip())
    if match is None or not float(match[1]) > 0:
        raise UserError(
            f"{option} must be a speed above 0", repr(text[:100]), "a number and Mbit/s or Gbit/s: 25Gbit/s"
        )
    return 8 / (float(match[1]) * {"M": 1e6, "G": 1e9}[match[2]])


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


def trial_workers(text: str | None) -> tuple[int, int] | None:
    """How few and how many workers a trial may have, by ``--trial-workers``; None without it."""
    return None if text is None else worker_bounds(text, "--trial-workers")


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


# --- folders, data and devices of this machine ---

_copies: list[Mirror] = []


def choose_out(out_option: str | Path | None, file: Path, command: str, resume: bool) -> Path:
    """The folder of a command's results: ``out_option`` or the next free ``elastune-out/NAME-COMMAND-N``.

    For a URL it is a local folder that is copied to the URL until ``finish_copies``. A job script may set ``resume``
    from its first start on, so ``resume`` with an empty folder prints a line and starts from the beginning.
    """
    if out_option is not None:
        out = _mirrored(str(out_option), resume) if is_url(str(out_option)) else Path(out_option)
        if resume and not os.path.lexists(out / JOURNAL):
            print_error(f"{out} holds nothing to go on with, so this starts from the beginning")
        return out
    if resume:
        raise UserError("--resume needs to know what to go on with", "no --out", "give --out of the earlier run")
    return next_folder(file, command)


def _mirrored(url: str, resume: bool) -> Path:
    mirror = Mirror(url, print_error)
    mirror.begin(resume)
    _copies.append(mirror)
    return mirror.folder


def finish_copies() -> None:
    """Complete the copies of all results to their URLs. Raises ``UserError`` if a copy fails."""
    while _copies:
        _copies.pop().finish()


def use_data(data: Path | None) -> None:
    """Set ``ELASTUNE_DATA`` to ``data``: the program and its workers look for data sets in it."""
    if data is None:
        return
    if not data.is_dir():
        raise UserError("--data must be a folder", data, "check the path")
    os.environ["ELASTUNE_DATA"] = str(data.resolve())


def choose_workers(
    text: str | None, heartbeat: str, collective_timeout_s: float, mesh: Mesh | None = None
) -> tuple[int, Elastic]:
    """The number of workers that a run begins with, and the limits within which it may change.

    For "LOW:HIGH" a run begins with as many workers as this machine has cores, or with those of ``mesh``.
    """
    meshed = 1 if mesh is None else mesh.workers
    low, high = (1, meshed) if text is None else worker_bounds(text)
    elastic = Elastic(low, heartbeat_s=duration(heartbeat, "--heartbeat"), collective_timeout_s=collective_timeout_s)
    if text is None or ":" not in text:
        return high, elastic
    if mesh is not None:
        return meshed, replace(elastic, high=high)
    from elastune.train.machine import cores

    return min(high, max(low, cores())), replace(elastic, high=high)


def choose_device(wanted: str, *, local: bool = True) -> str:
    """The device of a run; "auto" becomes "cuda" or "cpu", whichever this machine has.

    ``local``: whether workers run on this machine. If not, the hosts check the device: a login node may lack GPUs that
    the hosts of its cluster have.
    """
    if wanted == "cpu" or (not local and re.fullmatch(r"cuda(:[0-9]{1,3})?", wanted)):
        return wanted
    from elastune.runtime.placement import assign, devices

    assigned = assign(wanted, 0, devices())  # refuses what this machine lacks
    if wanted == "auto":
        return assigned.partition(":")[0]  # a command printed for another day names the kind, not the number
    return wanted
