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
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn, cast

from elastune.cluster.launcher import VARIABLE, Bootstrap, bootstrap_of
from elastune.core.errors import UserError
from elastune.core.run import Place, RunSpec
from elastune.elastic.worker.client import ORPHANED_CODE, CoordinatorClient
from elastune.journal.records import LONGEST_DETAIL, RunFailed

Entry = Callable[[RunSpec, Place, CoordinatorClient], int]
WORK = "elastune.train.work:launched"


def live(bootstrap: Bootstrap) -> NoReturn:
    """Be the worker that ``bootstrap`` names. Exit codes: the entry's own, 1 after an exception.

    The process ends without the interpreter's own shutdown: libraries with native threads have been seen to abort
    there after a run had succeeded, and its exit code must tell of the run alone. ``atexit`` functions are called,
    threads are not waited for.
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
    code = _work(client, bootstrap)
    client.farewell(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
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
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        detail = f"the program called sys.exit({end.code!r})"[:LONGEST_DETAIL]
        client.report(RunFailed("exception", detail, place.rank))
        return exit_code(end)
    except BaseException:  # noqa: BLE001 - the last frame of this process: whatever it is, the log has to show it
        traceback.print_exc()
    return 1


def resolve(entry: str) -> Entry:
    """The function that ``module:function`` names."""
    module, _, name = entry.partition(":")
    return cast(Entry, getattr(importlib.import_module(module), name))


def exit_code(end: SystemExit) -> int:
    """The code that Python gives a process which ``end`` ends: 0 without one, 1 for a message."""
    return end.code if isinstance(end.code, int) else int(end.code is not None)


if __name__ == "__main__":
    own = bootstrap_of()
    del os.environ[VARIABLE]
    live(own)
