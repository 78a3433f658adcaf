"""One life of a study's controller, in a process of its own, which is killed (SIGKILL) after a while."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

GONE_S = 5.0


def family(pid: int) -> set[int]:
    """All that ``pid`` has started and that has not been reaped."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    results = {pid}
    while more := {child for child, parent in parents.items() if parent in results} - results:
        results |= more
    return results - {pid}


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def one_life(request: StudyRequest, after_s: float | None) -> tuple[bool, int]:
    """Run the study, or go on with it, in a process of its own and kill that after so long (None: never).

    Returns:
        Whether the study had ended before, and how many processes were left ``GONE_S`` after the kill.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            tune(replace(request, resume=(request.out / "journal.jsonl").exists()))
            code = 0
        finally:
            os._exit(code)
    deadline = None if after_s is None else time.monotonic() + after_s
    while deadline is None or time.monotonic() < deadline:
        result, status = os.waitpid(pid, os.WNOHANG)
        if result:
            if os.waitstatus_to_exitcode(status) != 0:
                raise SystemExit("the study failed by itself")
            return True, 0
        time.sleep(0.01)
    started = family(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    limit = time.monotonic() + GONE_S
    while any(map(runs, started)) and time.monotonic() < limit:
        time.sleep(0.02)
    return False, sum(map(runs, started))
