"""What a command writes to stdout: tables and lines for people, or one JSON object."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from elastune.core.formatting import printable
from elastune.runtime.job.interrupts import terminated

if TYPE_CHECKING:
    from elastune.cli.results import Result

# Exit codes: done; a run failed; wrong input; the machine is taken away, try again (EX_TEMPFAIL); Ctrl-C.
OK, FAILED, WRONG, TRY_AGAIN, INTERRUPTED = 0, 1, 2, 75, 130
# TRY_AGAIN also after SIGTERM, with which batch systems and Kubernetes end a job that they start again elsewhere.
FILE_WIDTH = 120  # columns of a table where no terminal sets them
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

    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    for table in result.tables:
        console.print(to_rich(table, console.width))
    for line in (*result.lines, *(f"{what:<7} {value}" for what, value in more.items() if value is not None)):
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


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
