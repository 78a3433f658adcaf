"""A worker's end of its only connection, to the coordinator: a thread that beats and hears, and what others ask of it.

It brings what the worker is to do (``spec``), and takes away what the worker reports and the code that it ends with.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
import traceback
import weakref
from collections.abc import Callable

from pydantic import ValidationError

from elastune.core.errors import UserError
from elastune.elastic.protocol import messages
from elastune.elastic.protocol.messages import Beat, Doing, Message
from elastune.elastic.protocol.rendezvous import RendezvousStore
from elastune.elastic.protocol.transport import (
    DIAL_LIMIT_S,
    LINE_LIMIT_BYTES,
    READ_BYTES,
    Lines,
    ProtocolError,
    dial,
    first_line,
)
from elastune.elastic.protocol.view import View
from elastune.elastic.protocol.worker_spec import WorkerSpec
from elastune.elastic.worker import outbox
from elastune.elastic.worker.last_resort import DISCONNECTED_CODE, ORPHANED_CODE, end_process
from elastune.elastic.worker.outbox import Outbox
from elastune.journal.records import Record

SILENT_BEATS = 10  # of the coordinator, at least, before a worker takes it for gone
WHY_LIMIT = 2000  # characters
SPEC_LIMIT_BYTES = 16 * LINE_LIMIT_BYTES  # it holds a whole environment
FULL_LOOK_S = 0.01


class RunOver(Exception):
    """The run has ended, or this worker is cut off from it: there is nothing to wait for."""


class CoordinatorClient:
    """Worker ``worker``, connected and known to the coordinator at ``address``.

    The constructor returns once the coordinator has let it in. Raises ``UserError`` where it does not.
    """

    def __init__(self, address: str, token: str, worker: int, *, host: str = "") -> None:
        self.worker = worker
        self.on_break: Callable[[View], None] = lambda version: None
        """Called in this object's thread for every version that takes effect at once."""
        self.on_orphaned: Callable[[str], None] = self._end_process
        """Called in this object's thread when the coordinator is gone; ends this process and its data loaders."""
        self.where: Callable[[], str] = lambda: ""
        """Called in this object's thread: the line that the program is at."""
        self._lines = Lines(SPEC_LIMIT_BYTES)
        self._early: list[bytes] = []
        self._doing: tuple[float, Doing, int, int, int, int, str] = (time.monotonic(), "loading", 0, 0, 0, 0, "")
        self._news = threading.Condition()
        self._latest: View | None = None
        self._forced = self._confirmed = 0
        self._board = RendezvousStore()
        self._over = ""
        self._owner = os.getpid()
        self._stop = False
        self._leaving = False
        self._closed = False
        welcome = self._enter(address, messages.Hello(token, worker, host))
        self.joins = welcome.joins
        """Whether training goes on already: this worker has to be warm before it is ``ready``."""
        self.spec: WorkerSpec | None = welcome.spec
        """What this worker is to do; None where its coordinator does not say."""
        self._lines.limit_bytes = LINE_LIMIT_BYTES
        self._outbox = Outbox(self._socket)
        self._beat_s = welcome.beat_s
        self._silent_limit_s = max(SILENT_BEATS * welcome.beat_s, welcome.silence_s)
        _leave_to_parent(self)
        self._thread = threading.Thread(target=self._live, name="member", daemon=True)
        self._thread.start()

    def _enter(self, address: str, hello: messages.Hello) -> messages.Welcome:
        try:
            self._socket = dial(address)
        except OSError as error:
            why = f"{address}: {error}"
            raise UserError(
                "a worker must reach its coordinator", why, "see that the run is alive, and firewalls"
            ) from None
        try:
            self._socket.sendall(messages.encode(hello))
            line, self._early = first_line(self._socket, self._lines, DIAL_LIMIT_S)
            welcome = messages.decode(line)
            if not isinstance(welcome, messages.Welcome):
                raise ProtocolError(f"it answered {welcome.kind!r}")
        except (OSError, ValueError, ProtocolError) as error:
            self._socket.close()
            # A message that is not valid is not repeated: it may hold the environment of the run.
            why = type(error).__name__ if isinstance(error, ValidationError) else str(error)
            fix = "give each worker the token of this run and a number of its own"
            raise UserError(
                "a coordinator must let its workers in", f"{address}, worker {self.worker}: {why}", fix
            ) from None
        self._socket.setblocking(True)
        return welcome

    # -- what the main thread says ------------------------------------------------------------------------------------

    def ready(self) -> None:
        """This worker is warm and waits for a version that has it."""
        self._send(messages.Ready())

    def running(self, version: int, step: int, layers: int = 0) -> None:
        """This worker holds its state under ``version``, whose first step is ``step``; ``layers``: see ``Running``."""
        self._send(messages.Running(version, step, layers))

    def broken(self, version: int, why: str) -> None:
        """A collective of ``version`` failed here."""
        self._send(messages.Broken(version, _sendable(why)))

    def noticed(self, seconds: float, why: str) -> None:
        """This worker will be taken away in ``seconds``. A signal handler may call it."""
        self._send(messages.Noticed(max(0.0, seconds), _sendable(why)))

    def replace(self) -> None:
        """Ask for another worker in this one's place; this one goes on until that one is there."""
        self._send(messages.ReplaceAsked())

    def resize(self, workers: int, why: str = "") -> None:
        """Ask for ``workers`` workers."""
        self._send(messages.ResizeAsked(workers, _sendable(why)))

    def reshape(self, mesh: str, why: str = "", layers: int = 0) -> None:
        """Ask for another mesh; ``layers``: see ``Running``."""
        self._send(messages.ReshapeAsked(mesh, _sendable(why), layers))

    def left(self) -> None:
        """This worker has left at the boundary of a version that does not have it."""
        self._send(messages.Left())

    def done(self) -> None:
        """The training function has ended well; this worker stays to serve the others."""
        self._send(messages.Done())

    def publish(self, key: str, value: str) -> None:
        """Let everybody read ``value`` under ``key``, which begins with a version's number and a slash."""
        with self._news:
            kept = self._board.put(key, value)
            self._news.notify_all()
        if kept:
            self._send(messages.Publish(key, value))

    def doing(
        self, doing: Doing, step: int, size_bytes: int = 0, view: int = 0, operation: int = 0, what: str = ""
    ) -> None:
        """The next beat tells it (``Beat``). Costs well under two microseconds."""
        self._doing = (time.monotonic(), doing, step, size_bytes, view, operation, what)

    def report(self, record: Record) -> None:
        """Deliver ``record`` to the run's controller; blocks while much of what was reported before is still here.

        Raises ``ValueError`` where the record is longer than the coordinator accepts.
        """
        line = messages.encode(messages.Report(record))
        if len(line) > LINE_LIMIT_BYTES:
            raise ValueError(f"a {record.kind} record has {len(line)} bytes, at most {LINE_LIMIT_BYTES} can be sent")
        while self._outbox.full and self._outbox.size_bytes > outbox.LIMIT_BYTES and self._thread.is_alive():
            time.sleep(FULL_LOOK_S)
        self._outbox.put(line)

    def stop_requested(self) -> bool:
        """Whether the run is to write a checkpoint and end."""
        return self._stop

    def refuse_fork(self) -> None:
        """Raises ``UserError`` in a forked child of this worker, which has its variables but no place in the run."""
        if os.getpid() != self._owner:
            rule = "a child that the program forks must end, not train on with the worker"
            raise UserError(rule, f"process {os.getpid()}, forked", "end it by os._exit(0), or use multiprocessing")

    def farewell(self, code: int) -> None:
        """Say that this worker's entry point has ended with ``code``: its process ends next, and not by an accident.

        Returns once the coordinator has read all that was ever sent, or is gone.
        """
        self._leaving = True
        self._send(messages.Exit(code))
        self._thread.join()

    def close(self) -> None:
        """Disconnect: the coordinator will take this worker for lost, unless it has left or the run is over."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(2)
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self._socket.close()
        self._outbox.close()

    # -- what the main thread asks ------------------------------------------------------------------------------------

    @property
    def latest(self) -> View | None:
        """The newest version that was proclaimed."""
        return self._latest

    def pending(self, current: int) -> View | None:
        """A scheduled view newer than ``current``."""
        latest = self._latest
        return latest if latest is not None and latest.scheduled and latest.number > current else None

    def superseded(self, number: int) -> bool:
        """Whether version ``number`` is over: a newer one took effect at once, or the run has ended."""
        return self._forced > number or bool(self._over)

    def await_version(self, after: int, timeout_s: float) -> View:
        """Block until there is a version newer than ``after`` that this worker has to enter at once.

        That is one which takes effect at once, or takes this worker in. Raises ``TimeoutError`` and ``RunOver``.
        """
        self._wait(lambda: self._to_enter(after) is not None, timeout_s)
        version = self._to_enter(after)
        if version is None:
            raise TimeoutError(f"no version after {after} within {timeout_s:g} s")
        return version

    def await_confirmed(self, version: int) -> bool:
        """Block until this joiner is a member of ``version`` for good; False if a newer version comes first.

        Raises ``RunOver``.
        """
        self._wait(lambda: self._confirmed >= version or self._is_newer(version), None)
        return self._confirmed >= version

    def await_bye(self, after: int) -> View | None:
        """Block until the run is over (None), or there is a version newer than ``after`` to be entered at once."""
        try:
            self._wait(lambda: self._to_enter(after) is not None, None)
        except RunOver:
            return None
        return self._to_enter(after)

    def read(self, keys: list[str], timeout_s: float | None) -> list[str] | None:
        """What is published under ``keys``, once all is; None if not within ``timeout_s``.

        Raises ``RunOver`` as soon as the version that they belong to is superseded.
        """
        version = min(int(key.partition("/")[0]) for key in keys)
        found: list[str | None] = []

        def there() -> bool:
            found[:] = [self._board.get(key) for key in keys]
            return None not in found or self.superseded(version)

        self._wait(there, timeout_s)
        if None not in found:
            return [value for value in found if value is not None]
        if self.superseded(version):
            raise RunOver(f"version {version} is superseded")
        return None

    def published(self, key: str) -> bool:
        """Whether anything is published under ``key``."""
        with self._news:
            return self._board.get(key) is not None

    def _to_enter(self, after: int) -> View | None:
        latest = self._latest
        if latest is None or latest.number <= after or self.worker not in latest.members:
            return None
        return latest if not latest.scheduled or self.worker in latest.joiners else None

    def _is_newer(self, version: int) -> bool:
        return self._latest is not None and self._latest.number > version

    def _wait(self, there: Callable[[], bool], timeout_s: float | None) -> None:
        with self._news:
            self._news.wait_for(lambda: there() or bool(self._over), timeout_s)
            if self._over and not there():
                raise RunOver(self._over)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        closed_here = False
        try:
            why = self._serve()
        except (OSError, ValueError, ProtocolError) as error:
            why = str(error) or type(error).__name__
            closed_here = isinstance(error, OSError) and error.errno in (errno.EBADF, errno.ENOTSOCK)
        except Exception:  # noqa: BLE001 - without this thread the worker is lost, and must know it
            traceback.print_exc()
            why = "its thread failed"
        with self._news:
            ended = bool(self._over) or self._closed or self._leaving
            self._over = self._over or f"the coordinator is gone: {why}"
            self._news.notify_all()
        if not ended and closed_here:
            self._disconnected()
        elif not ended:
            self.on_orphaned(why)

    def _serve(self) -> str:
        """Beat and hear until the connection ends, and say why it did."""
        self._hear(self._early)
        poll = select.poll()
        poll.register(self._outbox, select.POLLIN)
        next_beat = before = time.monotonic()
        silent_s = 0.0
        while True:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outbox.full else 0))
            came = dict(poll.poll(max(0.0, next_beat - time.monotonic()) * 1000))
            now = time.monotonic()
            # Time in which this process did not run is no silence of the coordinator.
            silent_s += min(now - before, 2 * self._beat_s)
            before = now
            self._outbox.flush()
            if came.get(self._socket.fileno(), 0) & ~select.POLLOUT:
                data = self._socket.recv(READ_BYTES)
                if not data:
                    return "it closed the connection"
                silent_s = 0.0
                self._hear(self._lines.feed(data))
            elif silent_s > self._silent_limit_s:
                return f"it has been silent for {silent_s:.0f} s"
            if now >= next_beat:
                next_beat = now + self._beat_s
                since, doing, step, size_bytes, view, operation, what = self._doing
                line = _sendable(self.where())
                self._send(Beat(step, doing, max(0.0, now - since), size_bytes, view, operation, _sendable(what), line))

    def _hear(self, lines: list[bytes]) -> None:
        for line in lines:
            message = messages.decode(line)
            with self._news:
                self._note(message)
                self._news.notify_all()
            if isinstance(message, messages.InstallView) and not message.view.scheduled:
                try:
                    self.on_break(message.view)
                except Exception:  # noqa: BLE001 - the hook's fault must not cost the connection
                    traceback.print_exc()

    def _note(self, message: Message) -> None:
        match message:
            case messages.InstallView(version):
                self._latest = version
                self._board.begin(version.number)
                if not version.scheduled:
                    self._forced = version.number
            case messages.Confirmed(version):
                self._confirmed = version
            case messages.Publish(key, value):
                self._board.put(key, value)
            case messages.Stop():
                self._stop = True
            case messages.Bye():
                self._over = "the run is over"
            case Beat():
                pass
            case _:
                raise ProtocolError(f"it sent {message.kind!r}")

    def _send(self, message: Message) -> None:
        self._outbox.put(messages.encode(message))

    def _end_process(self, why: str) -> None:
        end_process(f"the coordinator is gone ({why}); worker {self.worker} ends", ORPHANED_CODE)

    def _disconnected(self) -> None:
        end_process("the program has closed this worker's connection", DISCONNECTED_CODE)


def _leave_to_parent(member: CoordinatorClient) -> None:
    """A forked child (of a data loader) must not keep the connection open when its parent is killed."""
    reference = weakref.ref(member)

    def close_copy() -> None:
        if (parent := reference()) is not None and parent._socket.fileno() >= 0:
            os.close(parent._socket.detach())

    os.register_at_fork(after_in_child=close_copy)


def _sendable(why: str) -> str:
    return why[:WHY_LIMIT].encode(errors="replace").decode()
