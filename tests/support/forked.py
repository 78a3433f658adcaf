"""Processes that are forked from the tests' own, which has imported torch already.

A new Python takes three seconds of a processor to import what a fork server or a controller needs; a fork takes
milliseconds. Tests of how these processes start, and all that start ``python -m elastune``, have real ones. So have all
tests in a process that has loaded Ray, whose threads do not survive a fork.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import io
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from tests.support.hosts import enter

from elastune.cli import main
from elastune.runtime.clusters import fork_server
from elastune.runtime.clusters.local import WARM
from elastune.runtime.job import preflight
from elastune.train import rehearsal

CLONE_NEWNS, CLONE_NEWUTS = 0x00020000, 0x04000000  # <linux/sched.h>
LOOK_S = 0.002
NOWHERE = -1  # a descriptor's number, for /dev/null
HANDLED = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)
INSTALLED = tuple({str(Path(module.__file__).parents[1]) for module in (os, ctypes, importlib.import_module("torch"))})


_UNDO: list[Callable[[], object]] = []


@contextmanager
def only_here(undo: Callable[[], object]) -> Iterator[None]:
    """What is forked meanwhile begins with ``undo``: what was patched in this process is not for it."""
    _UNDO.append(undo)
    try:
        yield
    finally:
        _UNDO.remove(undo)


def may_fork() -> bool:
    """Whether a fork of this process can work."""
    return sys.modules.get("ray") is None


class ForkedProcess:
    """A fork of this process that calls ``act`` and ends with its exit code, in a session of its own.

    It has the methods of ``subprocess.Popen`` that tests use. ``outputs``: descriptors of its stdout and stderr.
    """

    def __init__(
        self,
        act: Callable[[], int],
        *,
        outputs: tuple[int, int],
        keeps: Sequence[int] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _begin_anew(outputs, keeps, env)
                for undo in _UNDO:
                    undo()
                code = act()
                sys.stdout.flush()
            except BaseException:  # noqa: BLE001 - never return into the test
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(LOOK_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def popen(
    command: Sequence[str],
    *,
    stdin: int | None = None,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
    env: dict[str, str] | None = None,
) -> ForkedProcess | subprocess.Popen[bytes]:
    """In place of ``subprocess.Popen``, where the package starts a module of its own: one that ``STARTS`` has.

    What stands before Python in ``command`` is that of ``Host.command``. Each process has a session of its own.
    """
    if not may_fork():
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=start_new_session,
            env=env,
        )
    at = command.index(sys.executable)
    prefix, (module, *words) = command[:at], [word for word in command[at + 1 :] if word not in ("-P", "-m")]
    if module == SERVER:
        for name in (*WARM, *words[2:]):
            importlib.import_module(name)

    def start() -> int:
        if prefix:
            _enter_host(prefix)
        sys.argv = [module, *words]
        return STARTS[module](words) or 0

    return ForkedProcess(start, outputs=(_descriptor(stdout, 1), _descriptor(stderr, 2)), keeps=pass_fds, env=env)


def run(command: Sequence[str], *, check: bool, **how: Any) -> subprocess.CompletedProcess[bytes]:
    """In place of ``subprocess.run``, likewise."""
    assert not check
    return subprocess.CompletedProcess(command, popen(command, **how).wait())


def _serve(words: Sequence[str]) -> None:
    fork_server.main(list(words[:2]))  # what it is to import is there


SERVER = "elastune.runtime.clusters.fork_server"
STARTS: dict[str, Callable[[Sequence[str]], int | None]] = {
    SERVER: _serve,
    "elastune": main,
    "elastune.runtime.job.preflight": lambda words: preflight.main(),
    "elastune.train.rehearsal": lambda words: rehearsal.main(),
}
STARTERS = ("runtime.clusters.fork", "runtime.clusters.local", "runtime.job.preflight", "train.rehearsal")
"""The modules that start one of these."""
IN_PLACE = SimpleNamespace(**{**vars(subprocess), "Popen": popen, "run": run})


@contextmanager
def started_by(place: object) -> Iterator[None]:
    """The package starts its processes by ``place`` meanwhile: ``IN_PLACE`` forks them, ``subprocess`` does not."""
    with pytest.MonkeyPatch.context() as patch:
        for module in STARTERS:
            patch.setattr(f"elastune.{module}.subprocess", place)
        yield


def _descriptor(output: IO[bytes] | int | None, inherited: int) -> int:
    """That of an output as ``subprocess.Popen`` takes it."""
    if output is None:
        return inherited
    if output == subprocess.DEVNULL:
        return NOWHERE
    return output if isinstance(output, int) else output.fileno()


def elastune(
    *words: str, out: IO[bytes], err: IO[bytes], first: Callable[[], object] = lambda: None
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start the command line. ``first``: called before it there, to be on another host, or in another folder."""
    if not may_fork():
        start = [sys.executable, "-m", "elastune", *words]
        return subprocess.Popen(start, stdout=out, stderr=err, preexec_fn=first, start_new_session=True)

    def command() -> int:
        first()
        return main(words)

    return ForkedProcess(command, outputs=(out.fileno(), err.fileno()))


def run_script(
    script: Path, *words: str, out: IO[bytes], err: IO[bytes], **env: str
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Run a file of Python as ``python FILE WORDS`` does, in its folder."""
    if not may_fork():
        start = [sys.executable, str(script), *words]
        return subprocess.Popen(start, cwd=script.parent, stdout=out, stderr=err, env={**os.environ, **env})

    def run() -> int:
        os.environ.update(env)
        os.chdir(script.parent)
        sys.argv = [str(script), *words]
        sys.path.insert(0, str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0

    return ForkedProcess(run, outputs=(out.fileno(), err.fileno()))


def hide(folder: Path) -> None:
    """Have an empty folder in place of ``folder`` from now on, for this process and those that it starts. Needs root.

    Raises:
        OSError: Where the system refuses.
    """
    _unshare(CLONE_NEWNS)
    for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "none", str(folder)]):
        subprocess.run(["mount", *words], check=True)


def _begin_anew(outputs: tuple[int, int], keeps: Sequence[int], env: dict[str, str] | None) -> None:
    """Be as like a new process as can be: nothing of the test's is open, waited for, or imported."""
    logging.getLogger().handlers.clear()  # pytest's: the numbers of their files will be those of others
    gc.freeze()  # no object of the test's may be ended here: it could close a file that has the number of an old one
    atexit._clear()
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for at, descriptor in enumerate((null, *(null if each == NOWHERE else os.dup(each) for each in outputs))):
        os.dup2(descriptor, at)
    kept = sorted({0, 1, 2, *keeps})
    for below, above in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(below + 1, above)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, "r", closefd=False))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and not file.startswith(INSTALLED) and not name.startswith(("elastune", "tests")):
            del sys.modules[name]  # a worker's program imports its own


def _enter_host(prefix: Sequence[str]) -> None:
    """What ``Host.command`` has done by nsenter, unshare and sh."""
    (net,) = (word.removeprefix("--net=") for word in prefix if word.startswith("--net="))
    enter(net)
    _unshare(CLONE_NEWUTS)
    socket.sethostname(prefix[-1])


def _unshare(what: int) -> None:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(what) != 0:
        raise OSError(ctypes.get_errno(), "this process may not have a namespace of its own")
