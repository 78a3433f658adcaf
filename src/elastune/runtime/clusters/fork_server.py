"""A warm process that forks workers: it imports torch once, so that a worker starts in milliseconds.

    python -m elastune.runtime.clusters.fork_server CONTROL_FD CONTROLLER_PID [MODULE...]

It imports the modules and then serves its controller over a Unix socket that keeps message borders
(SOCK_SEQPACKET), one small JSON object a message. Requests: ``{"fork": key, "bootstrap": text}`` with a file
descriptor (the worker's log) and ``{"kill": [key...]}``. Replies: ``{"forked": key, "pid": pid}``,
``{"ended": key, "code": code}`` (negative: the signal) and ``{"refused": key, "why": text}``. A worker gets its task
from its coordinator, not from the server.

No worker outlives its server: the kernel kills it (PR_SET_PDEATHSIG), and ``GroupGuard`` kills the processes that it
had started. No server outlives its controller: at the end of the control socket, or when it is orphaned, the server
kills every worker's process group and ends. As a child subreaper it also inherits processes that left those groups,
and kills them at its own end.

The server has one thread, no CUDA context and no OpenMP pool (its starter sets the thread counts to 1): otherwise a
fork would not be safe. `docs/decisions/0002-own-forkserver.md` explains why this is not multiprocessing's fork server.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

from elastune.runtime import worker
from elastune.runtime.launcher import read_bootstrap

READ_BYTES = 4096


class GroupGuard:
    """Kills the processes that workers have started when their fork server is killed.

    The guard is a small process, forked from this one, that knows the workers' process groups. It waits for the end of
    a pipe whose other end only the server holds, and then kills the remaining groups. It needs no controller: server
    and controller may be killed at once. Make it before any large import, because it is a fork of this process.
    """

    def __init__(self) -> None:
        reader, self._pipe = os.pipe2(os.O_CLOEXEC)
        self.process = os.fork()
        if self.process == 0:
            os.close(self._pipe)
            _watch(reader)
        os.close(reader)

    def protect(self, leader: int) -> None:
        """Kill the process group of ``leader`` if the server is killed."""
        self._send(leader)

    def forget(self, leader: int) -> None:
        """Forget the group of ``leader``, which was killed. Call it before another process can get that number."""
        self._send(-leader)

    def close(self) -> None:
        """Close this end in a forked child, so that only the server holds it."""
        os.close(self._pipe)

    def _send(self, number: int) -> None:
        with contextlib.suppress(OSError):  # the guard was killed; workers end without it, too
            os.write(self._pipe, b"%d\n" % number)


def _watch(pipe: int) -> NoReturn:
    leaders: set[int] = set()
    try:
        os.setsid()
        for request in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(request, signal.SIG_IGN)
        os.closerange(0, pipe)
        os.closerange(pipe + 1, 4096)
        rest = b""
        while data := os.read(pipe, READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for number in map(int, lines):
                leaders.add(number) if number > 0 else leaders.discard(-number)
        for leader in leaders:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
    finally:
        os._exit(0)


REQUEST_LIMIT_BYTES = 1 << 16
REFUSED_CODE = 71  # EX_OSERR of sysexits.h
END_LIMIT_S = 3.0
ORPHANED = signal.SIGUSR1
SIGNALS = (signal.SIGCHLD, signal.SIGTERM, ORPHANED)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """``prctl(2)`` with one argument. Raises ``OSError``."""
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with(parent: int) -> None:
    """Let the kernel kill this process once its ``parent``, or the thread that started it, is no more."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def kill_worker(process: int) -> None:
    """Send SIGKILL to a child and to its process group: a new child may not have founded its group yet."""
    os.kill(process, signal.SIGKILL)
    kill_group(process)


def kill_group(leader: int) -> None:
    """Send SIGKILL to the process group of ``leader``, if any process of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


class Server:
    """The loop that forks and kills workers for its controller.

    Args:
        control: The socket to the controller.
        controller: The controller's process; the server ends with it.
        guard: The guard of the workers' process groups.
    """

    def __init__(self, control: socket.socket, controller: int, guard: GroupGuard) -> None:
        self._control = control
        self._guard = guard
        self._controller = controller
        self._keys: dict[int, int] = {}  # process -> the controller's key for this worker
        self._alarm, self._alarm_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Serve until the controller ends.

        SIGTERM does not end the server: a batch system, container or service may send it to all processes, and workers
        must leave in good order first. Then the controller ends the server.
        """
        for number in SIGNALS:
            signal.signal(number, _noted)
        signal.set_wakeup_fd(self._alarm_in)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._alarm, select.POLLIN)
        serving = os.getppid() == self._controller
        while serving:
            ready = [fd for fd, _ in poll.poll()]
            if self._alarm in ready:
                serving = self._handle_signals(os.read(self._alarm, 4096))
            if serving and self._control.fileno() in ready:
                serving = self._answer()
        self._end()

    def _handle_signals(self, numbers: bytes) -> bool:
        if signal.SIGCHLD in numbers:
            self._reap()
        # ORPHANED comes when the *thread* that started this process ends; the controller may still live.
        return os.getppid() == self._controller

    def _answer(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, REQUEST_LIMIT_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return False
        if not data:
            return False
        request = json.loads(data)
        if "fork" in request:
            self._fork(request["fork"], request["bootstrap"], *fds)
        else:
            doomed = set(request["kill"])
            for process, key in self._keys.items():
                if key in doomed:
                    kill_worker(process)
        return True

    def _reply(self, **fields: object) -> None:
        with contextlib.suppress(ConnectionError):  # the controller is gone, as the loop will see
            self._control.send(json.dumps(fields).encode())

    def _fork(self, key: int, bootstrap: str, log: int) -> None:
        server = os.getpid()
        # A signal must not run this process's handlers in the child before the child has its own.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process = os.fork()
            if process == 0:
                self._become_worker(server, bootstrap, log)
            self._keys[process] = key
            self._guard.protect(process)
            self._reply(forked=key, pid=process)
        except OSError as error:
            self._reply(refused=key, why=str(error))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            os.close(log)

    def _become_worker(self, server: int, bootstrap: str, log: int) -> NoReturn:
        try:
            os.setsid()  # the controller decides about Ctrl-C in the terminal
            die_with(server)
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for fd in (log, self._alarm, self._alarm_in):
                os.close(fd)
            self._control.close()
            self._guard.close()
            worker.live(read_bootstrap(bootstrap))
        except BaseException:  # noqa: BLE001 - never return into the server's loop
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        while (process := _dead_child()) is not None:
            key = self._keys.pop(process, None)
            if key is not None:
                kill_group(process)  # before the wait: while its leader is a zombie, no other process gets the number
                self._guard.forget(process)
            _, status = os.waitpid(process, 0)
            if key is not None:
                self._reply(ended=key, code=os.waitstatus_to_exitcode(status))

    def _end(self) -> None:
        for process in self._keys:
            kill_worker(process)
        deadline = time.monotonic() + END_LIMIT_S
        while (left := _children() or list(self._keys)) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            while (dead := _dead_child()) is not None:
                os.waitpid(dead, 0)
                self._keys.pop(dead, None)
            time.sleep(0.002)


def _noted(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the wake-up pipe carries the signal into the loop, if a handler exists."""


def _dead_child() -> int | None:
    """Return a child that has ended and was not waited for, without waiting for it."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended else None


def _children() -> list[int]:
    """Return this process's children, including adopted ones; none if the kernel keeps no such list."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(process) for process in listed.read_text(encoding="ascii").split()] if listed.exists() else []


def _preload(modules: list[str]) -> None:
    gc.disable()  # imports leave little garbage, and looking for it takes a fifth of their time
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:  # noqa: BLE001 - a worker that needs the module fails with the same error, in its own log
            traceback.print_exc()
    gc.collect()
    gc.freeze()  # a collection in a worker would touch, and so copy, every page that it shares with this process
    gc.enable()


def main(arguments: list[str]) -> None:
    """Serve the controller at the other end of the socket ``arguments[0]``."""
    control, controller = socket.socket(fileno=int(arguments[0])), int(arguments[1])

    def end_if_orphaned(_number: int, _frame: FrameType | None) -> None:
        if os.getppid() != controller:
            os._exit(0)

    os.set_inheritable(control.fileno(), False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(ORPHANED, end_if_orphaned)
    prctl(PR_SET_PDEATHSIG, ORPHANED)
    end_if_orphaned(ORPHANED, None)  # the controller may have died before the line above
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard = GroupGuard()
    _preload(arguments[2:])
    Server(control, controller, guard).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
