"""A run of local worker processes, as their controller holds it."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from pydantic import ValidationError

from elastune.cluster.base import ElasticHandle, Event, Exited
from elastune.cluster.elastic_run import ElasticRun
from elastune.cluster.wire import STOP, WorkerSpec, decode_farewell
from elastune.cluster.worker_log import WorkerLog
from elastune.core.errors import UserError
from elastune.core.run import Place
from elastune.elastic.protocol.frames import Lines, ProtocolError
from elastune.journal.records import Record, decode

READ_BYTES = 1 << 16
NOT_STARTED = 71  # EX_OSERR of sysexits.h


class LocalWorker:
    """The controller's end of one worker process. ``key`` is its name at the fork server."""

    def __init__(self, key: int, place: Place, log: WorkerLog, connection: socket.socket, run: LocalHandle) -> None:
        self.key = key
        self.place = place
        self.log = log
        self.connection = connection
        self.run = run
        self.pid: int | None = None
        self.ended = False
        self.fault = ""
        self.returned: int | None = None
        self._lines = Lines()

    def read(self) -> bool:
        """Turn what has arrived into events. False at the stream's end, or once ``fault`` says what was wrong in it."""
        while not self.fault:
            try:
                data = self.connection.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not data:
                return False
            try:
                for line in self._lines.feed(data):
                    if (code := decode_farewell(line)) is not None:
                        self.returned = code
                    else:
                        self.run.heard(self, decode(line))
            except ProtocolError as error:
                self.fault = str(error)
            except ValidationError as error:
                self.fault = f"a message is not a record of a run: {error.errors(include_url=False)[0]['msg']}"
        return False

    def ask_to_stop(self) -> None:
        """Make the worker's ``stop_requested()`` true."""
        with contextlib.suppress(OSError):  # it is ending, or was hung up on: there is nobody to ask
            self.connection.send(STOP, socket.MSG_DONTWAIT)


class Machine(Protocol):
    """What a run needs of its cluster."""

    def pump(self, timeout_s: float) -> None:
        """Look for news."""
        ...

    def launch(self, run: LocalHandle, numbers: Sequence[int]) -> None:
        """Start workers of ``run``."""
        ...

    def kill(self, workers: Iterable[LocalWorker]) -> None:
        """SIGKILL to these workers and their process groups."""
        ...

    def forget(self, run: LocalHandle) -> None:
        """``run`` has no workers any more and will get none."""
        ...


class LocalHandle(ElasticHandle):
    """A run on the ``LocalCluster`` that is its ``machine``. ``order``: what its workers have in common."""

    def __init__(self, order: WorkerSpec, machine: Machine) -> None:
        self.spec = spec = order.spec
        self.order = order
        self.workers: dict[int, LocalWorker] = {}
        self.elastic = ElasticRun(spec, self, self._last_line)
        self._machine = machine
        self._events: deque[Event] = deque()
        self._stopping = False
        self._closed = False

    def poll(self) -> list[Event]:
        self._machine.pump(0.0)
        events = list(self._events)
        self._events.clear()
        return events

    @property
    def alive(self) -> int:
        running = sum(not worker.ended for worker in self.workers.values())
        untold = sum(isinstance(event, Exited) for event in self._events)
        return running + untold or int(not self.elastic.over)

    @property
    def pending(self) -> bool:
        """Whether ``poll`` has something to hand out."""
        return bool(self._events)

    @property
    def pids(self) -> dict[int, int]:
        return {number: w.pid for number, w in self.workers.items() if w.pid is not None and not w.ended}

    @property
    def members(self) -> list[int]:
        return self.elastic.coordinator.members

    @property
    def step(self) -> int:
        return self.elastic.coordinator.step

    def stop(self) -> None:
        self._stopping = True
        for worker in self.workers.values():
            worker.ask_to_stop()

    def kill(self) -> None:
        self.elastic.over = True
        self.kill_workers(list(self.workers))
        self._close_if_over()

    def resize(self, workers: int, why: str = "") -> None:
        self.elastic.coordinator.resize(workers, why)

    def kill_worker(self, worker: int) -> None:
        self.kill_workers([worker])

    # -- for the elastic run ------------------------------------------------------------------------------------------

    def start_workers(self, workers: Sequence[int]) -> None:
        for worker in workers:
            try:
                self._machine.launch(self, [worker])
            except (OSError, UserError) as error:
                if worker not in self.workers:
                    why = f"worker {worker} could not be started: {error}"
                    self._events.extend(self.elastic.ended(Exited(worker, NOT_STARTED, ""), None, why))
        if self._stopping:
            self.stop()

    def kill_workers(self, workers: Sequence[int]) -> None:
        self._machine.kill(self.workers[number] for number in workers if number in self.workers)

    def _last_line(self, worker: int) -> str:
        return self.workers[worker].log.last_line() if worker in self.workers else ""

    # -- for the cluster ----------------------------------------------------------------------------------------------

    def heard(self, worker: LocalWorker, record: Record) -> None:
        """A worker said something."""
        if (event := self.elastic.heard(worker.place.rank, record)) is not None:
            self._events.append(event)

    def ended(self, worker: LocalWorker, code: int, why: str) -> None:
        """A worker's process has ended, or could not be started: ``why``."""
        end = Exited(worker.place.rank, code, worker.log.tail(why))
        returned = code if worker.fault else worker.returned
        self._events.extend(self.elastic.ended(end, returned, why))
        self._close_if_over()

    def heed(self) -> None:
        """Do what the coordinator asks for."""
        if self._closed:
            return
        self._events.extend(self.elastic.heed())
        self._close_if_over()

    def _close_if_over(self) -> None:
        if not self._closed and self.elastic.over and all(worker.ended for worker in self.workers.values()):
            self._closed = True
            self._machine.forget(self)
            self._events.extend(self.elastic.heed())  # its last records
            self.elastic.close()
