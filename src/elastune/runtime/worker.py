"""A worker process from its first line to its last: connect, call its entry point, end with its exit code.

A launcher forks it and calls ``live``, or runs ``python -m elastune.runtime.worker`` with the bootstrap in the
environment. When the coordinator goes away, the worker ends at once, together with every process that it has
started. What a worker prints goes to a log file on its host. On a full disk the output is dropped and training goes
on.
"""

from __future__ import annotations

import atexit
import errno
import faulthandler
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from elastune.core.errors import UserError
from elastune.core.journal import logs
from elastune.core.journal.records import RunFailed
from elastune.core.run import Place, RunSpec
from elastune.elastic.wire.transport import host_name
from elastune.elastic.worker.client import ABANDONED_CODE, ORPHANED_CODE, CoordinatorClient
from elastune.runtime.launcher import VARIABLE, Bootstrap, bootstrap_of
from elastune.train.program.errors import cause_of, trace_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


# A worker prints to a log on its host. Where that disk is full the lines are dropped, and the worker goes on
# training.

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LogFile(io.FileIO):
    """The file of ``stream``. Drops a write for which the disk has no room, and reports it as complete."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(stream.fileno(), "wb", closefd=False)
        self._stream = stream  # or it would close the file

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return memoryview(data).nbytes


def log_stream(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """What is to be printed to in place of ``stream``, to the same file: line by line, since a log is read while it
    grows, and in whatever locale."""
    stream.flush()
    file = io.BufferedWriter(LogFile(stream))
    return io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=True)


# A launcher starts the process: forked (``live``), or as ``python -m elastune.runtime.worker`` with the bootstrap in
# the environment. When the coordinator goes away, the worker ends at once, with all processes that it has started.

Entry = Callable[[RunSpec, Place, CoordinatorClient], int]
WORK = "elastune.train.worker:launched"
LAST_FUNCTIONS_S = 5  # less than the supervisor of a finished run waits for its processes


def live(bootstrap: Bootstrap) -> NoReturn:
    """Run the worker that ``bootstrap`` names, and end the process. Exit codes: that of the entry, 1 for an exception.

    The process ends without the shutdown of the interpreter. Libraries with native threads may abort there after a run
    has succeeded, and the exit code must show the run alone. ``atexit`` functions are called, for at most
    ``LAST_FUNCTIONS_S``. Threads are not waited for.
    """
    faulthandler.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = log_stream(sys.stdout)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = log_stream(sys.stderr)
    try:
        address, token, moves = bootstrap.coordinator, bootstrap.token, bootstrap.moves
        client = CoordinatorClient(address, token, bootstrap.worker, host=host_name(), moves=moves)
    except UserError as error:
        print(f"elastune: {error}", file=sys.stderr)
        os._exit(ORPHANED_CODE)
    pid = os.getpid()
    code = _work(client, bootstrap)
    if os.getpid() == pid:  # not a child that the program has forked and that returned from the program's code
        client.farewell(code)
        code = final_code(client, code)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LAST_FUNCTIONS_S)
        _whatever_it_raises(atexit._run_exitfuncs)
    _whatever_it_raises(lambda: sys.stdout.flush())
    _whatever_it_raises(lambda: sys.stderr.flush())
    os._exit(code & 0xFF)


def final_code(client: CoordinatorClient, code: int) -> int:
    """Return ``code``, or the code for a lost connection: code 0 would say that the program has ended by itself."""
    if code == 0 and client.turned_away:
        print("elastune: this worker lost its connection, and the run went on without it", file=sys.stderr)
        return ORPHANED_CODE
    return ABANDONED_CODE if code == 0 and client.abandoned else code


def _work(client: CoordinatorClient, bootstrap: Bootstrap) -> int:
    task = client.spec
    if task is None:
        print("elastune: the coordinator has sent no task", file=sys.stderr)
        return 1
    place = replace(task.place, device=bootstrap.device)
    try:
        if task.adds:
            sys.path[:0] = [path for path in task.import_path if path not in sys.path]
        else:
            os.environ.clear()
            sys.path[:] = task.import_path
        os.environ.update(task.environment)
        logs.begin(logs.from_environment(os.environ))
        logs.describe(run=str(task.spec.out), rank=place.rank, host=host_name())
        try:
            os.chdir(task.folder)
        except OSError as error:
            rule = "the controller's working directory must be on every machine that has workers"
            why = f"{host_name()}: {task.folder}: {error.strerror}"
            client.report(RunFailed("user_error", str(UserError(rule, why, "mount it, or copy it there")), place.rank))
            return 1
        spec = task.spec
        if bootstrap.spool:
            spec = replace(spec, out=Path(bootstrap.spool), spool=Path(bootstrap.spool))
        return int(resolve(task.entry)(spec, place, client))
    except BaseException as error:  # noqa: BLE001 - the last frame: the log must show any error
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
    bootstrap = bootstrap_of()
    del os.environ[VARIABLE]
    live(bootstrap)
