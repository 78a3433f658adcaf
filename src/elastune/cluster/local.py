"""Workers as processes of this machine, forked from a warm server and watched until their end.

One thread uses a cluster. The death of its process, however sudden, ends everything that the cluster started.
"""

from __future__ import annotations

import atexit
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from elastune.cluster import devices as machine
from elastune.cluster.base import Cluster
from elastune.cluster.forkserver import kill_group
from elastune.cluster.local_run import LocalHandle, LocalWorker
from elastune.cluster.spawner import PRELOAD, Forked, ServerLost, Spawner
from elastune.cluster.wire import WorkerSpec, encode_order
from elastune.cluster.worker import WORK
from elastune.cluster.worker_log import WorkerLog
from elastune.core.errors import UserError
from elastune.core.run import Place, RunSpec


class LocalCluster(Cluster):
    """Room for ``capacity`` worker processes on this machine.

    ``devices``: the names that workers may be given, or "auto" for what the machine has. ``entry``: the
    ``module:function`` that a worker runs. ``preload``: modules that the fork server imports once for all workers; it
    begins here, in the background, so a cluster made early is warm when its first run starts.
    """

    def __init__(
        self,
        capacity: int,
        *,
        devices: Sequence[str] | Literal["auto"] = "auto",
        entry: str = WORK,
        preload: Sequence[str] = (*PRELOAD, WORK.partition(":")[0]),
    ) -> None:
        if capacity < 1:
            raise UserError("a cluster needs room for at least one worker", capacity, "give a capacity of 1 or more")
        self.capacity = capacity
        self._devices = devices
        self._entry = entry
        self._preload = tuple(preload)
        self._workers: dict[int, LocalWorker] = {}
        self._runs: list[LocalHandle] = []
        self._keys = 0
        self._owner = os.getpid()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._spawner: Spawner | None = None
        self._warm_spawner()
        atexit.register(self.close)

    @property
    def free(self) -> int:
        return self.capacity - len(self._workers)

    def start(self, spec: RunSpec) -> LocalHandle:
        if self._closed:
            raise RuntimeError("this cluster was closed")
        self.pump(0.0)
        count = spec.means.workers
        if not 1 <= count <= self.free:
            rule = f"workers must be from 1 to the {self.free} that are free of {self.capacity} on this machine"
            raise UserError(rule, count, "ask for fewer, or give the cluster a larger capacity")
        spec = replace(spec, out=spec.out.resolve())
        self._assign(spec.means.device, count)  # refuses what this machine lacks
        run = LocalHandle(self._order(spec), self)
        self._selector.register(run.elastic.coordinator, selectors.EVENT_READ, run)
        try:
            self.launch(run, range(count))
            run.elastic.announce()
        except OSError as error:
            run.kill()
            rule = f"the system must have room for {count} workers"
            raise UserError(rule, error.strerror, "ask for fewer, or raise its limits (ulimit -a)") from error
        except BaseException:
            run.kill()
            raise
        self._runs = [*(other for other in self._runs if other.alive), run]
        self._tell_room()
        return run

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(run.pending for run in self._runs) and (left_s := deadline - time.monotonic()) > 0:
            if self._closed:
                return
            self.pump(left_s)

    def close(self) -> None:
        if self._closed or os.getpid() != self._owner:  # a fork of the controller does not own what it inherited
            return
        self.pump(0.0)
        for run in self._runs:
            run.kill()
        self._closed = True
        atexit.unregister(self.close)
        if self._spawner is not None:
            self._selector.unregister(self._spawner)
            self._spawner.close()
        for worker in list(self._workers.values()):
            self._finish(worker, -signal.SIGKILL, "the cluster was closed")
        self._selector.close()

    # -- for the runs -------------------------------------------------------------------------------------------------

    def launch(self, run: LocalHandle, numbers: Sequence[int]) -> None:
        """Start workers of ``run``. Raises ``OSError`` and ``UserError`` where one cannot be started."""
        if len(numbers) > self.free:
            raise UserError("a worker must find room in its cluster", f"{self.free} free", "end another run")
        world, coordinator = run.spec.means.workers, run.elastic.coordinator
        given = self._assign(run.spec.means.device, len(numbers))
        for number, device in zip(numbers, given, strict=True):
            place = Place(number, world, number, device, coordinator=coordinator.address, token=coordinator.token)
            self._launch(run, place)

    def kill(self, workers: Iterable[LocalWorker]) -> None:
        """SIGKILL to these workers and their process groups. The server does it: it knows who still has the number."""
        try:
            if self._spawner is not None and not self._closed:
                self._spawner.kill(worker.key for worker in workers if not worker.ended)
        except ServerLost as lost:
            self._lose(lost)

    def forget(self, run: LocalHandle) -> None:
        """Expect nothing of ``run`` any more."""
        if run.elastic.coordinator in self._selector.get_map():
            self._selector.unregister(run.elastic.coordinator)

    def _order(self, spec: RunSpec) -> WorkerSpec:
        """What all workers of a run have in common, those too that it will start later."""
        here = str(Path.cwd())
        environment = _environment(os.environ, spec.means.threads)
        return WorkerSpec(self._entry, spec, Place(), environment, here, [path or here for path in sys.path])

    def _tell_room(self) -> None:
        for run in self._runs:
            run.elastic.room(self.free)

    def _assign(self, device: str, count: int) -> list[str]:
        """Devices for ``count`` more workers, the idlest first."""
        names: Sequence[str] = ("cpu",)
        if device != "cpu":
            names = machine.devices() if self._devices == "auto" else self._devices
        busy = [worker.place.device for worker in self._workers.values()]
        idlest_first = sorted(names, key=busy.count)
        return [machine.assign(device, index, idlest_first) for index in range(count)]

    def _launch(self, run: LocalHandle, place: Place) -> None:
        order = encode_order(replace(run.order, place=place))
        log = WorkerLog(run.spec.out / "logs", place)
        self._keys += 1
        with log.opened() as log_file:
            ours, theirs = socket.socketpair()
            worker = LocalWorker(self._keys, place, log, ours, run)
            run.workers[place.rank] = worker
            self._workers[worker.key] = worker
            self._selector.register(ours, selectors.EVENT_READ, worker)
            try:
                with theirs:
                    self._warm_spawner().fork(worker.key, theirs.fileno(), log_file.fileno())
                ours.sendall(order)
            except ServerLost as lost:
                self._lose(lost)
            except ConnectionError:
                pass  # the worker has gone already; how is on its way here
            except OSError as error:
                self._finish(worker, -signal.SIGKILL, f"no worker process could be started: {error.strerror}")
                raise

    # -- inside -------------------------------------------------------------------------------------------------------

    def _warm_spawner(self) -> Spawner:
        if self._spawner is None:
            self._spawner = Spawner(self._preload)
            self._selector.register(self._spawner, selectors.EVENT_READ)
        return self._spawner

    def pump(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for the sockets, and turn what they hold into events of the runs."""
        if self._closed:
            return
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, LocalHandle):
                key.data.heed()
            elif not isinstance(worker := key.data, LocalWorker):
                self._hear_spawner()
            elif not worker.ended and not worker.read():
                self._selector.unregister(worker.connection)
                if worker.fault:
                    self.kill([worker])
        self._tell_room()

    def _hear_spawner(self) -> None:
        try:
            while self._spawner is not None and (reply := self._spawner.receive()) is not None:
                if isinstance(reply, Forked):
                    self._workers[reply.key].pid = reply.pid
                else:
                    self._finish(self._workers[reply.key], reply.code, reply.why)
        except ServerLost as lost:
            self._lose(lost)

    def _finish(self, worker: LocalWorker, code: int, why: str = "") -> None:
        worker.read()  # all that it ever said is in the socket's buffer by now
        if worker.connection in self._selector.get_map():
            self._selector.unregister(worker.connection)
        worker.connection.close()
        worker.ended = True
        del self._workers[worker.key]
        if worker.fault:
            code, why = code or -signal.SIGKILL, f"worker {worker.place.rank} was ended: {worker.fault}"
        worker.run.ended(worker, code, why)

    def _lose(self, lost: ServerLost) -> None:
        """The server has gone. The kernel killed its workers with it; what these had started is killed here."""
        if self._spawner is None:
            return
        self._selector.unregister(self._spawner)
        self._spawner.close()
        self._spawner = None
        for worker in list(self._workers.values()):
            if worker.pid is not None:
                kill_group(worker.pid)
            self._finish(worker, -signal.SIGKILL, str(lost))


def _environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    count = str(threads)
    return {**base, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "GLOO_SOCKET_IFNAME": "lo"}
