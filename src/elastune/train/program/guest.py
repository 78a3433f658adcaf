"""The user's code in a process that is not its own: what it does to the process is undone afterwards."""

from __future__ import annotations

import locale
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TextIO


@contextmanager
def as_guest() -> Iterator[None]:
    """Afterwards folder, umask, environment, descriptors 1 and 2, ``sys.stdout`` and ``sys.stderr``, signal handlers,
    warnings, locale, recursion limit and the sockets' default time-out are as before, whatever the code has done.

    A child that the code has forked, and that comes back, ends.
    """
    own = os.getpid()
    with ExitStack() as stack:
        for descriptor in (1, 2):
            with suppress(OSError):  # it was closed before
                _keep_open(stack, descriptor)
        _keep_folder(stack)
        stack.callback(os.umask, _umask())
        stack.callback(_restore_environment, dict(os.environ))
        stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
        stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())
        stack.callback(locale.setlocale, locale.LC_ALL, locale.setlocale(locale.LC_ALL))
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGPIPE):
                stack.callback(signal.signal, number, signal.getsignal(number))
        stack.enter_context(warnings.catch_warnings())
        _lend_streams(stack)
        try:
            yield
        finally:
            if os.getpid() != own:
                os._exit(0)


def _keep_open(stack: ExitStack, descriptor: int) -> None:
    kept = os.dup(descriptor)
    stack.callback(os.close, kept)
    stack.callback(os.dup2, kept, descriptor)


def _keep_folder(stack: ExitStack) -> None:
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    stack.callback(os.close, folder)
    stack.callback(os.fchdir, folder)


def _umask() -> int:
    """The mask that is in force; there is no other way to ask."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _restore_environment(before: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(before)


def _lend_streams(stack: ExitStack) -> None:
    """Streams of its own, on the same files, which the code may close; a handler that it made may keep them."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        stack.callback(setattr, sys, name, before)
        try:
            lent = open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        except OSError:
            continue
        if before is not None and not before.closed:
            before.flush()
        setattr(sys, name, lent)
        stack.callback(_flush, lent)


def _flush(stream: TextIO) -> None:
    with suppress(ValueError, OSError):  # closed by the code
        stream.flush()
