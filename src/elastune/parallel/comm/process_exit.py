"""How a process ends after a training inside it: nothing of the training may keep the process from its end.

A process group whose peers are gone cannot be destroyed: its destructor waits for threads that never end. Such an
object is kept (``keep_for_ever``), so that no destructor of it runs. The end of the process is then limited in time.

This module is imported by ``import elastune``. ``atexit`` calls the functions that were registered last first, so the
limit begins after the functions that a program registers later.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import select
import signal
import threading
import warnings
from typing import NoReturn

EXIT_LIMIT_S = 30.0  # from the last functions of ``atexit`` to the end of the process
LAST_FUNCTIONS_S = 5.0  # for the functions of ``atexit`` where the main thread is lost

_kept: list[str] = []


def keep_for_ever(thing: object, what: str) -> None:
    """Keep ``thing`` until the process has ended, so that its destructor never runs, and limit the process's end.

    Args:
        thing: The object. It gets a reference that nobody gives back: the interpreter's own end would drop any other.
        what: What it is, for the line that reports an end that takes too long.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    _kept.append(what)


def end_without_main_thread(code: int) -> NoReturn:
    """End the process with ``code`` from a thread, where a library holds the main thread for ever.

    Calls the functions of ``atexit`` first, for at most ``LAST_FUNCTIONS_S``.
    """
    last = threading.Thread(target=atexit._run_exitfuncs, name="last functions", daemon=True)
    last.start()
    last.join(LAST_FUNCTIONS_S)
    os._exit(code)


@atexit.register
def _limit_end() -> None:
    if _kept:
        kill_unless_ended(EXIT_LIMIT_S, _kept[0])


def kill_unless_ended(limit_s: float, kept: str) -> None:
    """Kill this process after ``limit_s``, and report that in one line on stderr, unless the process has ended by then.

    A child process waits for that: while the interpreter ends, no thread of it runs Python any more.
    """
    process = os.getpid()
    reading, writing = os.pipe()  # ``writing`` is closed by the end of this process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other threads: the child only waits
        try:
            child = os.fork()
        except (OSError, RuntimeError):
            return
    if child:
        os.close(reading)
        return
    try:
        os.close(writing)
        if not select.select([reading], [], [], limit_s)[0]:
            line = f"elastune: process {process} did not end within {limit_s:g} s after {kept}, so it was killed\n"
            with contextlib.suppress(OSError):
                os.write(2, line.encode())
            os.kill(process, signal.SIGKILL)
    finally:
        os._exit(0)
