"""The launcher for this machine: workers are forked from a warm server. See ``server`` and ``spawner``."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from elastune.cluster import devices as machine
from elastune.cluster.fork.server import kill_group
from elastune.cluster.fork.spawner import PRELOAD, Ended, Forked, ServerLost, Spawner
from elastune.cluster.fork.worker_log import WorkerLog
from elastune.cluster.launcher import (
    Bootstrap,
    Launcher,
    Needs,
    ProcessEnded,
    ProcessEvent,
    ProcessStarted,
)
from elastune.cluster.processes import vitals_of
from elastune.core.errors import UserError
from elastune.elastic.coordinator.liveness import Vitals

LOOK_S = 1.0  # between looks whether the server still runs
MOST_LOSSES, LOSSES_S = 2, 60.0  # of servers, before no more is started


@dataclass
class _Process:
    """One worker's. ``key`` is its name at the fork server, ``doomed`` why it was ended."""

    key: int
    bootstrap: Bootstrap
    device: str
    log: WorkerLog
    pid: int | None = None
    doomed: str = ""


class ForkLauncher(Launcher):
    """Room for ``capacity`` processes on this machine.

    ``devices``: the names that workers may be given, or "auto" for what the machine has. ``preload``: modules that the
    fork server imports once for all workers; it begins at once, in the background. ``prefix``: see ``Spawner``.
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
        return self._capacity - len(self._processes)

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
                if process is None:  # it was given up meanwhile: no run that begins now must fail by it
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

    def vitals(self, worker: Bootstrap) -> Vitals | None:
        process = self._processes.get(worker)
        return None if process is None or process.pid is None else vitals_of(process.pid)

    def close(self) -> None:
        if self._spawner is not None:
            self._spawner.close()
            self._spawner = None
        for process in list(self._processes.values()):
            self._finish(process, -signal.SIGKILL, "the cluster was closed")

    def server(self) -> Spawner:
        """The warm fork server, started again where it was lost."""
        if self._spawner is None:
            self._spawner = Spawner(self._preload, self._prefix)
        return self._spawner

    def _assign(self, device: str, workers: Sequence[Bootstrap]) -> list[str]:
        """Devices for more workers of one run."""
        names: Sequence[str] = ("cpu",)
        if device != "cpu":
            names = machine.devices() if self._devices == "auto" else self._devices
        own: list[str] = []
        others: list[str] = []
        for process in self._processes.values():
            same_run = process.bootstrap.coordinator == workers[0].coordinator
            (own if same_run else others).append(process.device)
        idlest_first = machine.idlest_first(names, own, others)
        return [machine.assign(device, index, idlest_first) for index in range(len(workers))]

    def _finish(self, process: _Process, code: int, why: str = "") -> None:
        del self._processes[process.bootstrap], self._by_key[process.key]
        note = why or (f"worker {process.bootstrap.worker} was ended: {process.doomed}" if process.doomed else "")
        self._events.append(ProcessEnded(process.bootstrap, code, process.log.tail(note), why))

    def _lose(self, lost: ServerLost) -> None:
        """The server has gone. The kernel killed its workers with it; what these had started is killed here."""
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
