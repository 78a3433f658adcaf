"""One worker in this very process: for debuggers, notebooks and tests."""

from __future__ import annotations

import signal
import traceback

from elastune.cluster import devices
from elastune.cluster.base import Cluster, Event, Exited, Handle, Message
from elastune.cluster.worker import WORK, exit_code, resolve
from elastune.core.errors import UserError
from elastune.core.run import Place, RunSpec
from elastune.journal.records import Record, decode, encode


class InProcessHandle(Handle):
    """A run that happens inside the first ``poll``, from beginning to end."""

    def __init__(self, spec: RunSpec, place: Place, entry: str) -> None:
        self.spec = spec
        self._place = place
        self._entry = entry
        self._events: list[Event] = []
        self._stopped = self._killed = self._over = False

    def poll(self) -> list[Event]:
        if not self._over:
            self._over = True
            code, log = (-signal.SIGKILL, "") if self._killed else self._run()
            self._events.append(Exited(0, code, log))
        events, self._events = self._events, []
        return events

    @property
    def alive(self) -> int:
        return 0 if self._over else 1

    def stop(self) -> None:
        self._stopped = True

    def kill(self) -> None:
        self._killed = True

    def _run(self) -> tuple[int, str]:
        try:
            return int(resolve(self._entry)(self.spec, self._place, self._send, lambda: self._stopped)), ""
        except SystemExit as end:
            return exit_code(end), str(end)
        except Exception:  # noqa: BLE001 - as in a process of its own: an exception is the run's result
            return 1, traceback.format_exc()

    def _send(self, record: Record) -> None:
        self._events.append(Message(0, decode(encode(record))))  # as it would be after a pipe


class InProcessCluster(Cluster):
    """Room for one worker at a time, here. KeyboardInterrupt goes through to the caller of ``poll``."""

    def __init__(self, *, entry: str = WORK) -> None:
        self.capacity = 1
        self._entry = entry
        self._handle: InProcessHandle | None = None

    def start(self, spec: RunSpec) -> InProcessHandle:
        busy = self._handle is not None and self._handle.alive > 0
        if spec.means.workers != 1 or busy:
            value = f"{spec.means.workers}{' beside a running one' if busy else ''}"
            raise UserError("one process has room for one worker", value, "use local workers for more")
        available = devices.devices() if spec.means.device != "cpu" else ("cpu",)
        place = Place(device=devices.assign(spec.means.device, 0, available))
        self._handle = InProcessHandle(spec, place, self._entry)
        return self._handle

    @property
    def free(self) -> int:
        return 0 if self._handle is not None and self._handle.alive > 0 else 1

    def wait(self, timeout_s: float) -> None:
        """Returns at once: a run makes progress only inside ``poll``."""

    def close(self) -> None:
        if self._handle is not None:
            self._handle.kill()
