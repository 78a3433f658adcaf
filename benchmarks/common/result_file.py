"""The one way in which a benchmark writes what it has found: beside it stands what it was found with.

``commit`` (of this repository, "-changed" where files differ from it), ``command`` (the whole line, with the number of
threads), ``machine`` (cores, processor, memory, versions), ``load`` (averages over 1, 5 and 15 minutes, as the script
began and as it wrote), ``wall_s`` (seconds in between). ``tests/benchmarks/test_result_file.py`` holds every script to
it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastune.core.journal.files import atomic_write
from elastune.runtime.job.run import machine_context

ROOT = Path(__file__).parents[2]
CONDITIONS = ("commit", "command", "machine", "load", "wall_s")
_BEGAN = time.monotonic()
_LOAD = os.getloadavg()


def conditions() -> dict[str, Any]:
    """What a figure of this process was measured with, by now."""
    return {
        "commit": commit(),
        "command": command(),
        "machine": machine_context(),
        "load": {"begin": _rounded(_LOAD), "end": _rounded(os.getloadavg())},
        "wall_s": round(time.monotonic() - _BEGAN, 1),
    }


def write_result(out: Path, found: Mapping[str, Any], indent: int | None = 1) -> None:
    """Put ``found``, and before it the conditions, into ``out``: all of it or nothing.

    What ``found`` has under the name of a condition stands in its place: a result that goes on keeps those of its
    newest rows, and a GPU is a part of a machine.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, as_text(found, indent).encode())


def as_text(found: Mapping[str, Any], indent: int | None = 1) -> str:
    """What ``write_result`` writes."""
    return json.dumps({**conditions(), **found}, indent=indent) + "\n"


def command() -> str:
    """The command line of this process, ready to be repeated."""
    threads = [f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"] if "OMP_NUM_THREADS" in os.environ else []
    script = Path(sys.argv[0]).absolute()
    module = script.relative_to(ROOT).with_suffix("").parts if script.is_relative_to(ROOT / "benchmarks") else ()
    words = ["-m", ".".join(module), *sys.argv[1:]] if module else sys.argv
    return " ".join([*threads, "python", shlex.join(words)])


def commit() -> str:
    """The commit that this file is of; "unknown" outside of a repository."""
    here = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = [*here, "status", "--porcelain", "-uno"]
        result = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    results = "benchmarks/results/"  # what a script has written before is no change of what it measures
    changed = [line for line in result.splitlines() if results not in line]
    return f"{head}-changed" if changed else head


def _rounded(load: tuple[float, ...]) -> list[float]:
    return [round(value, 2) for value in load]
