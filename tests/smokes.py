"""Runs benchmarks at their smallest size, each in a fork of one process that has imported what most of them do.

    python tests/smokes.py AT_ONCE "NAME [OPTION...]"...

Imports would take most of them longer than what they do. Each sees its own arguments, folder and exit code, as if it
had been started by ``python -m benchmarks.FOLDER.NAME --smoke``. The output of a benchmark is printed at its end. A
benchmark that takes longer than ``LIMIT_S`` prints where it stood, and counts as failed. After it no other begins;
the exit code is then 1.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import runpy
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

BENCHMARKS = Path("benchmarks")
LIMIT_S = 1200
IMPORTED = (
    "torch._dynamo",
    "elastune.train.worker",
    "elastune.tuning.study.run",
    "elastune.tuning.frontier.find_frontier",
    "optuna",
    "scipy",
)


def main(at_once: int, smokes: list[str]) -> int:
    """Returns in each child, too, with its exit code: it ends as any Python process does."""
    running: dict[int, tuple[str, IO[bytes], float]] = {}
    waiting, failed = smokes[::-1], list[str]()
    while running or (waiting and not failed):
        if waiting and not failed and len(running) < at_once:
            said = tempfile.TemporaryFile()  # noqa: SIM115 - read once its smoke has ended
            sys.stdout.flush()
            if (child := os.fork()) == 0:
                return smoke(waiting[-1], said)
            running[child] = waiting.pop(), said, time.monotonic()
            continue
        child, status, used = os.wait4(-1, 0)
        name, said, begun = running.pop(child)
        said.seek(0)
        code = os.waitstatus_to_exitcode(status)
        seconds = f"{time.monotonic() - begun:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of CPU"
        print(f"benchmarks/{name}: code {code} after {seconds}", flush=True)
        sys.stdout.buffer.write(said.read())
        sys.stdout.buffer.flush()
        if code:
            failed.append(name)
    if failed:
        print("FAILED:", *failed, sep="\n  ", flush=True)
    return int(bool(failed))


def smoke(words: str, said: IO[bytes]) -> int:
    """Be ``python -m benchmarks.FOLDER.NAME --smoke [OPTION...]``. Raises what it raises, ``SystemExit`` included."""
    for output in (1, 2):
        os.dup2(said.fileno(), output)
    faulthandler.register(signal.SIGALRM, file=said, chain=True)
    signal.alarm(LIMIT_S)
    name, *options = shlex.split(words)
    (file,) = BENCHMARKS.absolute().glob(f"*/{name}.py")
    sys.argv = [str(file), "--smoke", *options]
    sys.path[0] = str(BENCHMARKS.absolute().parent)
    runpy.run_path(str(file), run_name="__main__")
    return 0


if __name__ == "__main__":
    for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # or NumPy starts some as it is imported
        os.environ[threads] = "1"
    for module in IMPORTED:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "no process of several threads can be forked"
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
