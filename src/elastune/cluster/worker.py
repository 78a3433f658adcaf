"""A worker process from its first line to its last: connect, call its entry point, end with its exit code.

Started by a launcher: forked (``live``), or as ``python -m elastune.cluster.worker`` with its bootstrap in the
environment. When its coordinator goes away the worker ends at once, together with what it has started.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import io
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn, cast

from elastune.cluster.launcher import VARIABLE, Bootstrap, bootstrap_of
from elastune.core.errors import UserError
from elastune.core.run import Place, RunSpec
from elastune.elastic.worker.client import CoordinatorClient
from elastune.elastic.worker.last_resort import ORPHANED_CODE
from elastune.journal.records import RunFailed
from elastune.train.program.causes import cause_of, trace_of

Entry = Callable[[RunSpec, Place, CoordinatorClient], int]
WORK = "elastune.train.work:launched"
LAST_FUNCTIONS_S = 5  # less than whoever supervises a finished run waits for its processes


def live(bootstrap: Bootstrap) -> NoReturn:
    """Be the worker that ``bootstrap`` names. Exit codes: the entry's own, 1 after an exception.

    The process ends without the interpreter's own shutdown: libraries with native threads have been seen to abort
    there after a run had succeeded, and its exit code must tell of the run alone. ``atexit`` functions are called, for
    ``LAST_FUNCTIONS_S`` at most; threads are not waited for.
    """
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a log is read while it grows, in whatever locale
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        client = CoordinatorClient(bootstrap.coordinator, bootstrap.token, bootstrap.worker, host=host)
    except UserError as error:
        print(f"elastune: {error}", file=sys.stderr)
        os._exit(ORPHANED_CODE)
    own = os.getpid()
    code = _work(client, bootstrap)
    if os.getpid() == own:  # not a child that the program forked, and that came back from the program's code
        client.farewell(code)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LAST_FUNCTIONS_S)
        _whatever_it_raises(atexit._run_exitfuncs)
    _whatever_it_raises(lambda: sys.stdout.flush())
    _whatever_it_raises(lambda: sys.stderr.flush())
    os._exit(code & 0xFF)


def _work(client: CoordinatorClient, bootstrap: Bootstrap) -> int:
    told = client.spec
    if told is None:
        print("elastune: the coordinator does not say what to do", file=sys.stderr)
        return 1
    place = replace(told.place, device=bootstrap.device)
    try:
        os.environ.clear()
        os.environ.update(told.environment)
        os.chdir(told.folder)
        sys.path[:] = told.import_path
        return int(resolve(told.entry)(told.spec, place, client))
    except BaseException as error:  # noqa: BLE001 - the last frame of this process: whatever it is, the log has to show it
        with suppress(OSError):
            os.write(2, trace_of(error).encode(errors="backslashreplace"))
        client.report(RunFailed("exception", cause_of(error), place.rank))
    return 1


def _whatever_it_raises(last: Callable[[], object]) -> None:
    """Call ``last``, of the program's doing, when nothing depends on it any more."""
    try:
        last()
    except BaseException as error:  # noqa: BLE001
        with suppress(OSError):
            os.write(2, trace_of(error).encode(errors="backslashreplace"))


def resolve(entry: str) -> Entry:
    """The function that ``module:function`` names."""
    module, _, name = entry.partition(":")
    return cast(Entry, getattr(importlib.import_module(module), name))


if __name__ == "__main__":
    own = bootstrap_of()
    del os.environ[VARIABLE]
    live(own)
