"""What commands do alike: choose the folder, data and device of this machine, and print results and errors."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastune.core.errors import UserError
from elastune.core.formatting import printable
from elastune.runtime.job.interrupts import terminated
from elastune.runtime.job.output import JOURNAL, Mirror, is_url, next_folder

if TYPE_CHECKING:
    from elastune.cli.results import Result


# Exit codes: done; a run failed; wrong input; the machine is taken away, try again (EX_TEMPFAIL); Ctrl-C.
OK, FAILED, WRONG, TRY_AGAIN, INTERRUPTED = 0, 1, 2, 75, 130
# TRY_AGAIN also after SIGTERM, with which batch systems and Kubernetes end a job that they start again elsewhere.
WIDTH = 100  # columns at most, on a wider terminal and in a file
TOPIC_WIDTH = 8  # of "train   " before a command, or of the space in its place
_WORD = re.compile(r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+")  # of a command line: quotes hold spaces together
_RESULTS: ContextVar[int | None] = ContextVar("results", default=None)  # a descriptor of the command's stdout


def stopped_code() -> int:
    """The exit code of a command that was asked to end, and whose results can go on with --resume."""
    return TRY_AGAIN if terminated() else INTERRUPTED


@contextmanager
def results_alone() -> Iterator[None]:
    """Reserve stdout for ``print_json`` while the context lasts.

    Other output to stdout (of the user's program, a library, a child process) goes to stderr. No program can close the
    reserved stdout.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    token = _RESULTS.set(kept)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        _RESULTS.reset(token)
        os.close(kept)


def print_result(result: Result, *, as_json: bool, **more: object) -> None:
    """Print a result: tables and lines, or one JSON object. ``more`` adds named values to either."""
    if as_json:
        print_json({**result.data, **more})
        return
    from rich.console import Console

    from elastune.report.tables import to_rich

    console = Console()
    if not console.is_terminal or console.width > WIDTH:
        console = Console(width=WIDTH)
    for table in result.tables:
        console.print(to_rich(table, console.width))
    for line in (*result.lines, *(f"{what:<7} {value}" for what, value in more.items() if value is not None)):
        for part in wrapped(line, console.width):
            console.print(printable(part), markup=False, highlight=False, soft_wrap=True)


def wrapped(line: str, width: int) -> list[str]:
    """Return ``line`` in lines of at most ``width`` columns, the text below the text.

    A command goes on behind a backslash, so that it can be copied as it stands. Longer words stay whole.
    """
    if len(line) <= width:
        return [line]
    topic, text = _topic(line)
    command = text.startswith("elastune ") or topic.strip() == "train"
    words, end = (_with_values(_WORD.findall(text)), " \\") if command else (text.split(), "")
    lines, row = [], topic + words[0]
    for word in words[1:]:
        if len(row) + 1 + len(word) + len(end) > width:
            lines.append(row + end)
            row = " " * len(topic) + word
        else:
            row += f" {word}"
    return [*lines, row]


def _with_values(words: Sequence[str]) -> list[str]:
    """The words of a command, each option together with its value."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("--") and " " not in joined[-1] and not word.startswith("--"):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def _topic(line: str) -> tuple[str, str]:
    """The first ``TOPIC_WIDTH`` columns of a line, if they hold a topic or space, and its text."""
    head, text = line[:TOPIC_WIDTH], line[TOPIC_WIDTH:]
    return (head, text) if head.endswith(" ") and text[:1].strip() and len(head.split()) <= 1 else ("", line)


def print_json(data: Mapping[str, Any]) -> None:
    """Print one line of strict JSON: numbers that are not finite become null."""
    line = json.dumps(_strict(data), allow_nan=False) + "\n"
    if (descriptor := _RESULTS.get()) is None:
        sys.stdout.write(line)
        return
    with open(descriptor, "w", encoding="utf-8", closefd=False) as results:
        results.write(line)


def print_error(text: str) -> None:
    """Print a line for people on stderr, after "elastune: "."""
    sys.stderr.write(f"elastune: {printable(' '.join(text.split()))}\n")


def print_lines(*lines: str) -> None:
    """Print lines for people on stdout. Control characters in them, which a terminal would obey, become visible."""
    for line in lines:
        print(printable(line))


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


# What a command needs of this machine: the folder of its results, its data, its workers and its device.

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
