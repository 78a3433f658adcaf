"""A run of local worker processes, as their controller holds it."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from elastune.cluster.base import Event, Exited, Handle, Message
from elastune.cluster.wire import STOP, Lines, ProtocolError
from elastune.cluster.worker_log import WorkerLog
from elastune.core.run import Place, RunSpec
from elastune.journal.records import decode

READ_BYTES = 1 << 16


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
                    self.run.happened(Message(self.place.rank, decode(line)))
            except ProtocolError as error:
                self.fault = str(error)
            except ValidationError as error:
                self.fault = f"a message is not a record of a run: {error.errors(include_url=False)[0]['msg']}"
        return False

    def ask_to_stop(self) -> None:
        """Make the worker's ``stop_requested()`` true."""
        with contextlib.suppress(OSError):  # it is ending, or was hung up on: there is nobody to ask
            self.connection.send(STOP, socket.MSG_DONTWAIT)


class LocalHandle(Handle):
    """A run on a ``LocalCluster``, which gives it ``pump`` (look for news) and ``kill``."""

    def __init__(
        self,
        spec: RunSpec,
        rendezvous: Path | None,
        pump: Callable[[float], None],
        kill: Callable[[Sequence[LocalWorker]], None],
    ) -> None:
        self.spec = spec
        self.workers: list[LocalWorker] = []
        self._rendezvous = rendezvous
        self._pump = pump
        self._kill = kill
        self._events: deque[Event] = deque()
        self._alive = spec.means.workers

    def poll(self) -> list[Event]:
        self._pump(0.0)
        events = list(self._events)
        self._events.clear()
        self._alive -= sum(isinstance(event, Exited) for event in events)
        return events

    @property
    def alive(self) -> int:
        return self._alive

    @property
    def pending(self) -> bool:
        """Whether ``poll`` has something to hand out."""
        return bool(self._events)

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process, of the workers that run."""
        return {w.place.rank: w.pid for w in self.workers if w.pid is not None and not w.ended}

    def stop(self) -> None:
        for worker in self.workers:
            worker.ask_to_stop()

    def kill(self) -> None:
        self._kill(self.workers)

    def happened(self, event: Event) -> None:
        """Keep ``event`` for ``poll``; after the last exit nobody meets at the rendezvous any more."""
        self._events.append(event)
        if self._rendezvous is not None and all(worker.ended for worker in self.workers):
            self._rendezvous.unlink(missing_ok=True)
