"""The launcher for this machine: workers are forked from a warm server (``fork_server``), each with a log file.

``Spawner`` is the controller's side of that server: it starts the server, asks it for workers, and reads their ends.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Literal

from elastune.core.errors import UserError
from elastune.elastic.coordinator.liveness import ProcessStatus
from elastune.runtime import placement
from elastune.runtime.clusters.fork_server import REFUSED_CODE, REQUEST_LIMIT_BYTES, kill_group
from elastune.runtime.launcher import Bootstrap, Launcher, Needs, ProcessEnded, ProcessEvent, ProcessStarted

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def process_vitals(process: int) -> ProcessStatus | None:
    """Return the state of ``process`` and the processor time of its threads; None if it has ended. See proc(5)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return ProcessStatus(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)
    except (OSError, ValueError, IndexError):
        return None


TAIL_BYTES = 8192
TAIL_LINES = 60


class WorkerLog:
    """The log ``folder/worker-N.log`` of one process of worker N. Earlier processes may have written into it.

    Raises:
        UserError: If the file cannot be written.
    """

    def __init__(self, folder: Path, worker: int) -> None:
        self.path = folder / f"worker-{worker}.log"
        header = f"--- worker {worker}, {datetime.now().isoformat(' ', 'seconds')}\n"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(header.encode())
                file.flush()
                self._start = file.tell()
        except OSError as error:
            rule = "the output folder must be writable"
            raise UserError(rule, f"{self.path}: {error.strerror}", "choose another folder or make room") from error

    def opened(self) -> BinaryIO:
        """Open the file for appending."""
        return self.path.open("ab")

    def last_line(self) -> str:
        """The last line of this process's output."""
        return self.tail().rpartition("\n")[2]

    def tail(self, note: str = "") -> str:
        """Return the end of this process's output. ``note`` is written into the file first, as its last line."""
        try:
            if note:
                with self.path.open("ab") as file:
                    file.write(f"elastune: {note}\n".encode())
            with self.path.open("rb") as file:
                end = file.seek(0, 2)
                file.seek(max(self._start, end - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            text = f"elastune: {note or 'no log'} ({self.path}: {error.strerror})"
        return "\n".join(text.rstrip("\n").split("\n")[-TAIL_LINES:])


# The server has one thread, whatever these libraries would start. Workers set their own numbers.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# torch._dynamo: building the first optimizer imports it, which takes as long as importing torch.
PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "torch._dynamo")
# A module that looks for CUDA at its import must not initialise it: forked workers could not use CUDA then.
NO_CUDA_CONTEXT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
END_LIMIT_S = 5.0


@dataclass(frozen=True)
class Forked:
    """The worker ``key`` runs as process ``pid``, the leader of its own session and process group."""

    key: int
    pid: int


@dataclass(frozen=True)
class Ended:
    """The worker ``key`` has ended with ``code`` (negative: the signal), or could not start, and ``why``."""

    key: int
    code: int
    why: str = ""


class ServerLost(Exception):
    """The fork server has ended by itself, or was killed."""


class Spawner:
    """A running fork server, for its controller.

    The constructor does not wait for the imports of the server.

    Args:
        preload: The modules that the server imports.
        prefix: A command that the server's command line follows and that replaces itself by it, such as ``nsenter``.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD, prefix: Sequence[str] = ()) -> None:
        if platform.system() != "Linux":
            raise UserError(
                "local worker processes need Linux", platform.system(), "use Linux, or start the file by torchrun"
            )
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._control, server_end):
            end.setblocking(True)  # a program may have set a time-out for all new sockets
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        import_path = os.pathsep.join(path for path in sys.path if path)
        # -P: Python must not import a file of this folder in place of a module
        server = [*prefix, sys.executable, "-P", "-m", "elastune.runtime.clusters.fork_server"]
        with server_end:
            self._process = subprocess.Popen(
                [*server, str(server_end.fileno()), str(os.getpid()), *preload],
                pass_fds=(server_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                env={**os.environ, **ONE_THREAD, **NO_CUDA_CONTEXT, "PYTHONPATH": import_path},
            )

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def fileno(self) -> int:
        """The descriptor for selectors: readable when ``receive`` has a reply."""
        return self._control.fileno()

    def fork(self, key: int, bootstrap: Bootstrap, log: int) -> None:
        """Ask for a worker. ``Forked`` or ``Ended`` will follow.

        Args:
            key: Names the worker in replies.
            bootstrap: What the worker needs to reach its coordinator.
            log: The descriptor of its log.

        Raises:
            ServerLost: If the server has ended.
        """
        try:
            request = json.dumps({"fork": key, "bootstrap": bootstrap.to_json()})
            socket.send_fds(self._control, [request.encode()], [log])
        except ConnectionError as error:
            raise ServerLost(self._story()) from error

    def kill(self, keys: Iterable[int]) -> None:
        """Send SIGKILL to the process groups of these workers. Ignores workers that have ended."""
        try:
            for key in keys:
                self._control.send(json.dumps({"kill": [key]}).encode())
        except ConnectionError as error:
            raise ServerLost(self._story()) from error

    def receive(self) -> Forked | Ended | None:
        """Return the next reply, or None if there is none. Raises ``ServerLost``."""
        try:
            data = self._control.recv(REQUEST_LIMIT_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise ServerLost(self._story()) from error
        if not data:
            raise ServerLost(self._story())
        reply = json.loads(data)
        if "forked" in reply:
            return Forked(reply["forked"], reply["pid"])
        if "ended" in reply:
            return Ended(reply["ended"], reply["code"])
        return Ended(reply["refused"], REFUSED_CODE, f"no worker process could be started: {reply['why']}")

    def wake(self) -> None:
        """Continue the server if it was stopped (SIGSTOP): the end of a run waits for it."""
        vitals = process_vitals(self._process.pid)
        if vitals is not None and vitals.state == "T":
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server and all its workers."""
        self._control.close()
        self._process.terminate()  # it may still import modules, and not see the end of its socket
        self._process.send_signal(signal.SIGCONT)  # it may be stopped
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _story(self) -> str:
        try:
            code = self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "the fork server closed its connection"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        text = os.pread(self._log.fileno(), 4096, 0).decode(errors="replace").strip()
        return f"the fork server ended ({how})" + (f": {text.splitlines()[-1]}" if text else "")


LOOK_S = 1.0  # between two checks whether the server is stopped
MOST_LOSSES, LOSSES_S = 2, 60.0  # after so many lost servers within this time, no other one is started


@dataclass
class _Process:
    """The process of a worker. ``key``: names it at the fork server; ``doomed``: why the launcher has ended it."""

    key: int
    bootstrap: Bootstrap
    device: str
    log: WorkerLog
    pid: int | None = None
    doomed: str = ""


class ForkLauncher(Launcher):
    """Starts workers as processes of this placement.

    Args:
        capacity: The number of workers that it has room for.
        devices: The devices that workers may get; "auto": the devices of this placement.
        preload: The modules that the fork server imports once for all workers, from now on in the background.
        prefix: As of ``Spawner``.
    """

    def __init__(
        self,
        capacity: int,
        *,
        devices: Sequence[str] | Literal["auto"] = "auto",
        preload: Sequence[str] = PRELOAD,
        prefix: Sequence[str] = (),
    ) -> None:
        if capacity < 1:
            raise UserError("a cluster needs room for at least one worker", capacity, "give a capacity of 1 or more")
        self._capacity = capacity
        self._marked: set[str] = set()  # devices on which a worker has computed wrong
        self._devices = devices
        self._preload = tuple(preload)
        self._prefix = tuple(prefix)
        self._processes: dict[Bootstrap, _Process] = {}
        self._by_key: dict[int, _Process] = {}
        self._events: list[ProcessEvent] = []
        self._keys = 0
        self._spawner: Spawner | None = None
        self._next_look = 0.0
        self._losses: list[float] = []  # when servers were lost
        self.server()

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def free(self) -> int:
        return max(0, self._capacity - len(self._processes))  # a marked worker may still run

    def mark(self, worker: Bootstrap) -> None:
        if (process := self._processes.get(worker)) is not None:
            self._capacity -= 1
            self._marked |= {process.device} - {"cpu"}  # cores have no names

    def fileno(self) -> int | None:
        return self._spawner.fileno() if self._spawner is not None else None

    def start(self, workers: Sequence[Bootstrap], needs: Needs) -> None:
        self._losses = [at for at in self._losses if at > time.monotonic() - LOSSES_S]
        if len(self._losses) >= MOST_LOSSES:
            rule = "a program must leave its parent process, the fork server, alone"
            fix = "look for os.getppid in it; else the machine may lack memory"
            raise UserError(rule, f"killed {len(self._losses)} times in {LOSSES_S:g} s", fix)
        if len(workers) > self.free:
            raise UserError("a worker must find room in its cluster", f"{self.free} free", "end another run")
        devices = self._assign(needs.device, workers)
        logs = [WorkerLog(needs.logs, worker.worker) for worker in workers]
        for worker, device, log in zip(workers, devices, logs, strict=True):
            self._keys += 1
            process = _Process(self._keys, worker, device, log)
            self._processes[worker] = self._by_key[process.key] = process
            try:
                self._fork(process)
            except ServerLost as lost:
                self._lose(lost)
            except OSError as error:
                self._finish(process, -signal.SIGKILL, f"no worker process could be started: {error.strerror}")
                raise

    def _fork(self, process: _Process) -> None:
        bootstrap = replace(process.bootstrap, device=process.device)
        with process.log.opened() as file:
            self.server().fork(process.key, bootstrap, file.fileno())

    def end(self, workers: Sequence[Bootstrap], why: str = "") -> None:
        doomed = [process for worker in workers if (process := self._processes.get(worker)) is not None]
        for process in doomed:
            process.doomed = process.doomed or why
        try:
            if self._spawner is not None:
                self._spawner.kill(process.key for process in doomed)
        except ServerLost as lost:
            self._lose(lost)

    def poll(self) -> list[ProcessEvent]:
        if self._spawner is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._spawner.wake()
        try:
            while self._spawner is not None and (reply := self._spawner.receive()) is not None:
                process = self._by_key.get(reply.key)
                if process is None:  # it was given up meanwhile, and must not fail another run
                    if isinstance(reply, Forked):
                        self._spawner.kill([reply.key])
                    continue
                match reply:
                    case Forked(pid=pid):
                        process.pid = pid
                        self._events.append(ProcessStarted(process.bootstrap, pid))
                    case Ended(code=code, why=why):
                        self._finish(process, code, why)
        except ServerLost as lost:
            self._lose(lost)
        events, self._events = self._events, []
        return events

    def last_line(self, worker: Bootstrap) -> str:
        process = self._processes.get(worker)
        return process.log.last_line() if process is not None else ""

    def vitals(self, worker: Bootstrap) -> ProcessStatus | None:
        process = self._processes.get(worker)
        return None if process is None or process.pid is None else process_vitals(process.pid)

    def close(self) -> None:
        if self._spawner is not None:
            self._spawner.close()
            self._spawner = None
        for process in list(self._processes.values()):
            self._finish(process, -signal.SIGKILL, "the cluster was closed")

    def server(self) -> Spawner:
        """The warm fork server. It is started again if it was lost."""
        if self._spawner is None:
            self._spawner = Spawner(self._preload, self._prefix)
        return self._spawner

    def _assign(self, device: str, workers: Sequence[Bootstrap]) -> list[str]:
        """Return devices for more workers of one run."""
        names: Sequence[str] = ("cpu",)
        if device != "cpu":
            names = placement.devices() if self._devices == "auto" else self._devices
            names = [name for name in names if name not in self._marked]
        of_run: list[str] = []
        of_others: list[str] = []
        for process in self._processes.values():
            same_run = process.bootstrap.coordinator == workers[0].coordinator
            (of_run if same_run else of_others).append(process.device)
        least_used_first = placement.least_used_first(names, of_run, of_others)
        return [placement.assign(device, index, least_used_first) for index in range(len(workers))]

    def _finish(self, process: _Process, code: int, why: str = "") -> None:
        del self._processes[process.bootstrap], self._by_key[process.key]
        note = why or (f"worker {process.bootstrap.worker} was ended: {process.doomed}" if process.doomed else "")
        self._events.append(ProcessEnded(process.bootstrap, code, process.log.tail(note), why))

    def _lose(self, lost: ServerLost) -> None:
        """Take in the loss of the server. The kernel has killed its workers; kill what they had started."""
        if self._spawner is None:
            return
        self._spawner.close()
        self._spawner = None
        self._losses.append(time.monotonic())
        for process in list(self._processes.values()):
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    kill_group(process.pid)
            self._finish(process, -signal.SIGKILL, str(lost))
