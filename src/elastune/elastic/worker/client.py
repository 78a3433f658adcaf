"""A worker's only connection, to its coordinator: a thread for heartbeats and messages, inbox and outbox.

The connection brings the worker's task (``spec``) and takes away its records and its exit code. When the
coordinator dies, the worker reconnects to the next one and sends its ``ReconnectState``: its place in the run and
the records that may not be in the journal yet.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from elastune.core.errors import UserError
from elastune.core.journal.records import Record
from elastune.core.sync_plan import SyncPlan
from elastune.elastic.wire import messages
from elastune.elastic.wire.contact import ControllerLocator
from elastune.elastic.wire.handshake import enter_at
from elastune.elastic.wire.messages import (
    Beat,
    Broken,
    Doing,
    Done,
    Exit,
    LayersFound,
    Message,
    Noticed,
    Ready,
    Report,
    Returned,
    RoundTaken,
    Running,
    WorkerSpec,
    encode,
)
from elastune.elastic.wire.transport import (
    DIAL_LIMIT_S,
    LINE_LIMIT_BYTES,
    READ_BYTES,
    Lines,
    ProtocolError,
    Unreachable,
    WakeupPipe,
)
from elastune.elastic.wire.view import RendezvousStore, View

# [last resort] How a worker ends at once, from whatever thread, with all that it has started.

ORPHANED_CODE = 70  # EX_SOFTWARE of sysexits.h: the coordinator is gone
ABANDONED_CODE = 75  # EX_TEMPFAIL: the coordinator is gone, nobody came in its place, and a checkpoint was written
DISCONNECTED_CODE = 76  # EX_PROTOCOL: the program closed this worker's connection


def end_process(why: str, code: int) -> NoReturn:
    """Say ``why`` in the log, and end this process and its family by ``code``."""
    with contextlib.suppress(OSError):
        os.write(2, f"elastune: {why}\n".encode(errors="replace"))
    _end_family()
    os._exit(code)


def _end_family() -> None:
    """SIGKILL to the data loaders of this process, and to all of its process group where that is its own."""
    for child in multiprocessing.active_children():  # they look for their parent only now and then
        with contextlib.suppress(OSError, ValueError):
            child.kill()
    if (own := os.getpid()) == os.getpgrp():
        for process in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):
                if process != own and os.getpgid(process) == own:
                    os.kill(process, signal.SIGKILL)


# [outbox] What a worker sends: any thread puts in, none waits for another, and the one that listens sends what is left.

LIMIT_BYTES = 1 << 23


class Outbox:
    """Lines for ``connection``, which does not block, and whose other side may read slowly.

    ``put`` returns at once, even in a signal handler that interrupts another ``put``. What the connection does not take
    at once goes out by ``flush``, for which ``fileno`` is readable. A connection that is gone is for its reader to see.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines: deque[bytes] = deque()
        self._rest = memoryview(b"")
        self._sending = threading.Lock()
        self._bell = WakeupPipe()
        self.full = False
        """Whether the connection took less than it was given."""

    def begin(self, connection: socket.socket) -> None:
        """From now on lines are for ``connection``; those that the one before has not taken are forgotten."""
        with self._sending:
            self._connection, self._rest, self.full = connection, memoryview(b""), False
            self._lines.clear()

    def fileno(self) -> int:
        """Readable once there is something to ``flush``."""
        return self._bell.fileno()

    @property
    def size_bytes(self) -> int:
        """What waits here."""
        return len(self._rest) + sum(map(len, list(self._lines)))

    def put(self, line: bytes) -> None:
        """Send ``line``, after all that was put before."""
        self._lines.append(line)
        if not self.full and not self.flush():
            self._bell.ring()

    def flush(self) -> bool:
        """Send what the connection takes now; False where it does not take all."""
        while (self._lines or self._rest) and self._sending.acquire(blocking=False):
            try:
                if self.full:
                    self._bell.quiet()
                self.full = not self._send()
            finally:
                self._sending.release()
            if self.full:
                return False
        return True

    def _send(self) -> bool:
        with contextlib.suppress(IndexError):
            while True:
                if not self._rest:
                    self._rest = memoryview(self._lines.popleft())
                try:
                    self._rest = self._rest[self._connection.send(self._rest) :]
                except BlockingIOError:
                    return False
                except OSError:  # nobody reads any more
                    self._lines.clear()
                    self._rest = memoryview(b"")
        return True

    def close(self) -> None:
        """Idempotent."""
        self._bell.close()


# [news] What a worker has heard from its coordinator, and how its main thread waits for more.


class RunOver(Exception):
    """The run has ended, or this worker is cut off from it: there is nothing to wait for."""


class CoordinatorInbox:
    """Of worker ``worker``. ``note`` is called by the thread that hears; the main thread asks and waits."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.abandoned = False
        """Whether the coordinator is gone and nobody came in its place: this worker ends at its next checkpoint."""
        self.turned_away = False
        """Whether this worker lost its connection, came back, and the run goes on without it."""
        self._inbox = threading.Condition()
        self._latest: View | None = None
        self._forced = self._confirmed = 0
        self._board = RendezvousStore()
        self._over = ""
        self._stop = False

    def note(self, message: Message) -> None:
        """Hear ``message``. Raises ``ProtocolError`` for what no coordinator sends."""
        with self._inbox:
            self._take(message)
            self._inbox.notify_all()

    def _take(self, message: Message) -> None:
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
            case messages.Beat():
                pass
            case _:
                raise ProtocolError(f"it sent {message.kind!r}")

    def stop_requested(self) -> bool:
        """Whether the run is to write a checkpoint and end."""
        return self._stop

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

    def await_view(self, after: int, timeout_s: float) -> View:
        """Block until there is a version newer than ``after`` that this worker has to enter at once.

        That is one which takes effect at once, or takes this worker in. Raises ``TimeoutError`` and ``RunOver``.
        """
        self._wait(lambda: self._to_enter(after) is not None, timeout_s)
        version = self._to_enter(after)
        if version is None:
            raise TimeoutError(f"no version after {after} within {timeout_s:g} s")
        return version

    def await_pending(self, current: int) -> View | None:
        """Block until a scheduled view newer than ``current`` was proclaimed; None once ``current`` is over, and where
        nobody proclaims anything any more."""
        with suppress(RunOver):
            self._wait(lambda: self.pending(current) is not None or self.superseded(current), None)
        return None if self.superseded(current) else self.pending(current)

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
        with self._inbox:
            return self._board.get(key) is not None

    def _to_enter(self, after: int) -> View | None:
        latest = self._latest
        if latest is None or latest.number <= after or self.worker not in latest.members:
            return None
        return latest if not latest.scheduled or self.worker in latest.joiners else None

    def _is_newer(self, version: int) -> bool:
        return self._latest is not None and self._latest.number > version

    def _wait(self, there: Callable[[], bool], timeout_s: float | None) -> None:
        with self._inbox:
            self._inbox.wait_for(lambda: there() or bool(self._over) or self.abandoned, timeout_s)
            if (self._over or self.abandoned) and not there():
                raise RunOver(self._over or "the coordinator is gone")


# [whereabouts] What a worker would tell a coordinator that knows nothing of it: where it stands, and what it has reported.


class ReconnectState:
    """Where a worker stands by what it has said, and the records that may not be in the journal yet.

    ``member``: it holds the run's state for good; ``exit``: its last words. ``keeps``: whether records are kept until
    they are in the journal.
    """

    def __init__(self, keeps: bool) -> None:
        self.member = False
        self.exit: Exit | None = None
        self._keeps = keeps
        self._ready = self._done = False
        self._running = Running(0, 0)
        self._broken = self._reported = self._layers = 0
        self._goes_at: float | None = None
        self._round: RoundTaken | None = None
        self._unkept: deque[tuple[int, bytes]] = deque()
        self.unkept_bytes = 0

    def say(self, message: Message) -> None:
        """The worker says ``message``."""
        match message:
            case Ready():
                self._ready = True
            case Running():
                self._running = message
            case LayersFound(layers):
                self._layers = layers
            case Broken(version):
                self._broken = version
            case Done():
                self._done = True
            case RoundTaken():
                self._round = message
            case Noticed(seconds):
                self._goes_at = time.monotonic() + seconds

    def report(self, record: Record) -> bytes:
        """The line that reports ``record``, kept until ``kept`` says otherwise.

        Raises ``ValueError`` where it is longer than the coordinator accepts.
        """
        line = encode(Report(record, self._reported + self._keeps))
        if len(line) > LINE_LIMIT_BYTES:
            raise ValueError(f"a {record.kind} record has {len(line)} bytes, at most {LINE_LIMIT_BYTES} can be sent")
        self._reported += self._keeps
        if self._keeps:
            self._unkept.append((self._reported, line))
            self.unkept_bytes += len(line)
        return line

    def kept(self, nth: int) -> None:
        """Records up to the ``nth`` are in the journal."""
        while self._unkept and self._unkept[0][0] <= nth:
            self.unkept_bytes -= len(self._unkept.popleft()[1])

    def lines(self, heard: View | None, stops: bool) -> list[bytes]:
        """All that a new coordinator has to be told first. ``heard``: the newest view; ``stops``: was it told to."""
        goes_s = None if self._goes_at is None else max(0.0, self._goes_at - time.monotonic())
        told = Returned(
            member=self.member,
            ready=self._ready,
            heard=heard,
            version=self._running.version,
            step=self._running.step,
            layers=self._layers,
            broken=self._broken,
            done=self._done,
            stops=stops,
            noticed_s=goes_s,
            records=self._reported,
        )
        # Who waits at the end of a round would count as late to it; of a round that is over it says nothing new.
        waits = [] if self._round is None else [encode(self._round)]
        last = [] if self.exit is None else [encode(self.exit)]
        return [encode(told), *waits, *(line for _, line in self._unkept), *last]


# [client] A worker's end of its only connection, to the coordinator: a thread that beats and hears, and what others ask of it.
#
# It brings what the worker is to do (``spec``), and takes away what the worker reports and the code that it ends with.

SILENT_BEATS = 10  # of the coordinator, at least, before a worker takes it for gone
WHY_LIMIT = 2000  # characters
SPEC_LIMIT_BYTES = 16 * LINE_LIMIT_BYTES  # it holds a whole environment
FULL_LOOK_S = 0.01
AGAIN_S, AGAIN_LIMIT_S = 0.05, 0.5  # between two looks for the next coordinator, and of one look
LAST_STEP_S = 300.0  # how long a worker that nobody has come for may take to its next checkpoint


class CoordinatorClient(CoordinatorInbox):
    """Worker ``worker``, connected and known to the coordinator at ``address``.

    ``moves``: the file that says where the next one is, if on another host (``ControllerLocator``). The constructor returns
    once the coordinator has let it in. Raises ``UserError`` where it does not.
    """

    def __init__(self, address: str, token: str, worker: int, *, host: str = "", moves: str = "") -> None:
        super().__init__(worker)
        self.on_break: Callable[[View], None] = lambda version: None
        """Called in this object's thread for every version that takes effect at once."""
        self.on_scheduled: Callable[[View], None] = lambda version: None
        """Called in this object's thread for every other version."""
        self.on_bye: Callable[[], None] = lambda: None
        """Called in this object's thread when there is nothing to wait for any more."""
        self.on_orphaned: Callable[[str], None] = self._end_process
        """Called in this object's thread when the coordinator is gone; ends this process and its data loaders."""
        self.where: Callable[[], str] = lambda: ""
        """Called in this object's thread: the line that the program is at."""
        self._lines = Lines(SPEC_LIMIT_BYTES)
        self._early: list[bytes] = []
        self._doing: tuple[float, Doing, int, int, int, int, str] = (time.monotonic(), "loading", 0, 0, 0, 0, "")
        self._owner = os.getpid()
        self._leaving = self._closed = False
        self._left = threading.Event()
        self._address, self._token, self._hello = address, token, messages.Hello(worker, host)
        self._elsewhere = ControllerLocator(address, moves)
        welcome = self._enter(self._hello)
        self.joins = welcome.joins
        """Whether training goes on already: this worker has to be warm before it is ``ready``."""
        self.spec: WorkerSpec | None = welcome.spec
        """What this worker is to do; None where its coordinator does not say."""
        self._lines.limit_bytes = LINE_LIMIT_BYTES
        self._outbox = Outbox(self._socket)
        self._beat_s, self._least_beat_s = welcome.beat_s, welcome.least_beat_s
        self._every_s = welcome.beat_s
        self._silent_limit_s = max(SILENT_BEATS * welcome.beat_s, welcome.silence_s)
        self._grace_s = welcome.grace_s
        self._reconnect_state = ReconnectState(keeps=welcome.grace_s > 0)
        self._speaking = threading.RLock()  # a signal handler may speak while the main thread does
        _leave_to_parent(self)
        self._thread = threading.Thread(target=self._live, name="member", daemon=True)
        self._thread.start()

    def _enter(self, hello: messages.Hello, limit_s: float = DIAL_LIMIT_S) -> messages.Welcome:
        address, words = self._address, messages.encode(hello)
        try:
            entered = enter_at(address, self._lines, self._token, messages.PURPOSE, words, DIAL_LIMIT_S, dial_s=limit_s)
        except Unreachable as error:
            fix = "see that the run is alive, and firewalls"
            raise UserError("a worker must reach its coordinator", f"{address}: {error}", fix) from None
        except (OSError, ProtocolError) as error:
            raise self._kept_out(str(error)) from None
        try:
            self._socket, self._early = entered.connection, entered.early
            welcome = messages.decode(entered.line)
            if isinstance(welcome, messages.Bye):
                self._over, self.turned_away = "the run goes on without this worker", True
            if not isinstance(welcome, messages.Welcome):
                raise ProtocolError(f"it answered {welcome.kind!r}")
        except (ValueError, ProtocolError) as error:
            self._socket.close()
            # A message that is not valid is not repeated: it may hold the environment of the run.
            raise self._kept_out(type(error).__name__ if isinstance(error, ValidationError) else str(error)) from None
        self._socket.setblocking(False)
        return welcome

    def _kept_out(self, why: str) -> UserError:
        fix = "give each worker the token of this run and a number of its own"
        return UserError("a coordinator must let its workers in", f"{self._address}, worker {self.worker}: {why}", fix)

    # -- what the main thread says ------------------------------------------------------------------------------------

    def ready(self) -> None:
        """This worker is warm and waits for a version that has it."""
        self._send(messages.Ready())

    def running(self, version: int, step: int, *, joins: bool = False) -> None:
        """This worker holds its state under ``version``, whose first step is ``step``.

        ``joins``: not for good yet, see ``await_confirmed``.
        """
        self._reconnect_state.member = self._reconnect_state.member or not joins
        self._send(messages.Running(version, step))

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

    def reshape(self, mesh: str, why: str = "") -> None:
        """Ask for another mesh."""
        self._send(messages.ReshapeAsked(mesh, _sendable(why)))

    def layers_found(self, layers: int) -> None:
        """The model can be cut into so many stages."""
        self._send(messages.LayersFound(layers))

    def report_round(self, version: int, step: int, learners: int, sync: SyncPlan, most: int, took_s: float) -> None:
        """Under ``version`` so many ``learners`` here have taken the round after ``step``; see ``RoundTaken``.

        From here on beats come as often as the grace: who freezes is to be missed as soon as who is late.
        """
        self._every_s = min(self._beat_s, max(sync.grace, self._least_beat_s))
        self._send(messages.RoundTaken(version, step, learners, sync.quorum, sync.grace, most, took_s))

    def left(self) -> None:
        """This worker has left at the boundary of a version that does not have it."""
        self._send(messages.Left())

    def done(self) -> None:
        """The training function has ended well; this worker stays to serve the others."""
        self._send(messages.Done())

    def publish(self, key: str, value: str) -> None:
        """Let everybody read ``value`` under ``key``, which begins with a version's number and a slash."""
        with self._inbox:
            kept = self._board.put(key, value)
            self._inbox.notify_all()
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
        while self._waits and self._thread.is_alive() and not self.abandoned:
            time.sleep(FULL_LOOK_S)
        with self._speaking:
            self._outbox.put(self._reconnect_state.report(record))

    @property
    def _waits(self) -> bool:
        """Whether so much lies here that nobody has read, or put in the journal, that the program is to wait."""
        unread = self._outbox.full and self._outbox.size_bytes > LIMIT_BYTES
        return unread or self._reconnect_state.unkept_bytes > LIMIT_BYTES

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
        self._reconnect_state.exit = messages.Exit(code)
        self._left.set()
        self._send(messages.Exit(code))
        self._thread.join()

    def close(self) -> None:
        """Disconnect: the coordinator will take this worker for lost, unless it has left or the run is over."""
        self._closed = True
        self._left.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(2)
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        self._socket.close()
        self._outbox.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        why, closed_here = self._hold()
        while not self._ended and not closed_here and self._comes_back():
            why, closed_here = self._hold()
        with self._inbox:
            ended = self._ended or self._leaving
            self._over = self._over or f"the coordinator is gone: {why}"
            self._inbox.notify_all()
        if not ended and closed_here:
            self._disconnected()
        elif not ended:
            self.on_orphaned(why)

    @property
    def _ended(self) -> bool:
        return bool(self._over) or self._closed or (self._leaving and not self._grace_s)

    def _hold(self) -> tuple[str, bool]:
        """Serve the connection to its end: why it ended, and whether it was closed in this process."""
        try:
            return self._serve(), False
        except (OSError, ValueError, ProtocolError) as error:
            closed_here = isinstance(error, OSError) and error.errno in (errno.EBADF, errno.ENOTSOCK)
            return str(error) or type(error).__name__, closed_here
        except Exception:  # noqa: BLE001 - without this thread the worker is lost, and must know it
            traceback.print_exc()
            return "its thread failed", False

    def _comes_back(self) -> bool:
        """Find the next coordinator and tell it everything. Where nobody comes, have the run end at a checkpoint."""
        until = time.monotonic() + self._grace_s
        self._socket.close()
        while not self._ended and (left_s := until - time.monotonic()) > 0:
            self._lines, self._address = Lines(SPEC_LIMIT_BYTES), self._elsewhere.now
            try:
                self._enter(replace(self._hello, returns=True), min(left_s, AGAIN_LIMIT_S))
            except UserError:
                time.sleep(AGAIN_S)
                continue
            self._lines.limit_bytes = LINE_LIMIT_BYTES
            with self._speaking:
                self._outbox.begin(self._socket)
                for line in self._reconnect_state.lines(self._latest, self._stop):
                    self._outbox.put(line)
            return True
        if not self._ended and self._grace_s:
            with self._inbox:
                self._stop = self.abandoned = True
                self._inbox.notify_all()
            if not self._left.wait(LAST_STEP_S):
                end_process("nobody came in the coordinator's place, and no step ended", ABANDONED_CODE)
        return False

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
                silent_s = 0.0
                with contextlib.suppress(BlockingIOError):  # half a message, encrypted
                    if not (data := self._socket.recv(READ_BYTES)):
                        return "it closed the connection"
                    self._hear(self._lines.feed(data))
            elif silent_s > self._silent_limit_s:
                return f"it has been silent for {silent_s:.0f} s"
            if now >= next_beat:
                every_s = self._every_s
                next_beat = now + every_s
                since, doing, step, size_bytes, view, operation, what = self._doing
                since_s, words, line = max(0.0, now - since), _sendable(what), _sendable(self.where())
                self._send(Beat(step, doing, since_s, size_bytes, view, operation, words, line, every_s))

    def _hear(self, lines: list[bytes]) -> None:
        for line in lines:
            message = messages.decode(line)
            if isinstance(message, messages.RecordsKept):
                with self._speaking:
                    self._reconnect_state.kept(message.nth)
                continue
            if isinstance(message, messages.Confirmed):
                self._reconnect_state.member = True
            self.note(message)
            try:
                match message:
                    case messages.InstallView(view):
                        (self.on_scheduled if view.scheduled else self.on_break)(view)
                    case messages.Bye():
                        self.on_bye()
            except Exception:  # noqa: BLE001 - the hook's fault must not cost the connection
                traceback.print_exc()

    def _send(self, message: Message) -> None:
        with self._speaking:
            self._reconnect_state.say(message)
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
