"""A worker process from its first line to its last: take the order, call its entry point, end with its exit code.

A thread listens to the controller meanwhile. When the controller goes away the worker ends at once, together with its
process group (its data loaders, for instance), whatever its main thread is doing.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import io
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn, cast

from elastune.cluster.wire import STOP, WorkerSpec, decode_order, encode_farewell
from elastune.core.run import Place, RunSpec
from elastune.elastic.protocol.frames import LINE_LIMIT_BYTES, Lines
from elastune.journal.records import Record, RunFailed, encode

Entry = Callable[[RunSpec, Place, Callable[[Record], None], Callable[[], bool]], int]
WORK = "elastune.train.work:work"
READ_BYTES = 1 << 16


class Controller:
    """The worker's end of its socket to the controller."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        # The order holds a whole environment, so it may be longer than any message after it.
        self._lines = Lines(16 * LINE_LIMIT_BYTES)
        self._sending = threading.Lock()
        self._stop = threading.Event()

    def receive_order(self) -> WorkerSpec:
        """Block until the order is here; end this process if the controller goes away first."""
        while not (lines := self._lines.feed(self._read())):
            pass
        self._obey(lines[1:])
        return decode_order(lines[0])

    def listen(self) -> None:
        """Heed the controller from now on, in a thread."""
        threading.Thread(target=self._listen, name="controller", daemon=True).start()

    def stop_requested(self) -> bool:
        """Whether the controller asked the run to checkpoint and end."""
        return self._stop.is_set()

    def send(self, record: Record) -> None:
        """Deliver ``record``; blocks while the controller is busy. Any thread may call it.

        Raises ``ValueError`` where the record is longer than the controller accepts.
        """
        line = encode(record)
        if len(line) > LINE_LIMIT_BYTES:
            raise ValueError(f"a {record.kind} record has {len(line)} bytes, at most {LINE_LIMIT_BYTES} can be sent")
        try:
            with self._sending:
                self._connection.sendall(line + b"\n")
        except ConnectionError:
            end_group()

    def farewell(self, code: int) -> None:
        """Say that this worker's entry point has ended with ``code``: its process ends next, and not by an accident."""
        with contextlib.suppress(OSError), self._sending:
            self._connection.sendall(encode_farewell(code))

    def _read(self) -> bytes:
        try:
            data = self._connection.recv(READ_BYTES)
        except ConnectionError:
            data = b""
        return data or end_group()

    def _listen(self) -> None:
        while True:
            self._obey(self._lines.feed(self._read()))

    def _obey(self, lines: list[bytes]) -> None:
        if STOP.strip() in lines:
            self._stop.set()


def end_group() -> NoReturn:
    """End this worker and everything in its process group, now."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)  # not reached: the signal is pending before killpg returns


def resolve(entry: str) -> Entry:
    """The function that ``module:function`` names."""
    module, _, name = entry.partition(":")
    return cast(Entry, getattr(importlib.import_module(module), name))


def exit_code(end: SystemExit) -> int:
    """The code that Python gives a process which ``end`` ends: 0 without one, 1 for a message."""
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def run(connection: socket.socket) -> NoReturn:
    """Be the worker at the other end of ``connection``. Exit codes: the entry's own, 1 after an exception.

    The process ends without the interpreter's own shutdown: libraries with native threads have been seen to abort
    there after a run had succeeded, and its exit code must tell of the run alone. ``atexit`` functions are called,
    threads are not waited for.
    """
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a log is read while it grows, in whatever locale
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    controller = Controller(connection)
    code = _obey_order(controller)
    controller.farewell(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _obey_order(controller: Controller) -> int:
    order = controller.receive_order()
    try:
        controller.listen()
        os.environ.clear()
        os.environ.update(order.environment)
        os.chdir(order.folder)
        sys.path[:] = order.import_path
        return int(resolve(order.entry)(order.spec, order.place, controller.send, controller.stop_requested))
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        controller.send(RunFailed("exception", f"the program called sys.exit({end.code!r})", order.place.rank))
        return exit_code(end)
    except BaseException:  # noqa: BLE001 - the last frame of this process: whatever it is, the log has to show it
        traceback.print_exc()
    return 1
