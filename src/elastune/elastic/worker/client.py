"""A worker's only connection, to its coordinator: a thread for heartbeats and messages, inbox and outbox.

The connection brings the worker's task (``spec``) and takes away its records and its exit code. When the
coordinator dies, the worker reconnects to the next one and sends its ``ReconnectState``: its place in the run and
the records that may not be in the journal yet.
"""

from __future__ import annotations

import contextlib
import errno
import logging
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
from elastune.core.journal import logs
from elastune.core.journal.records import Record
from elastune.core.sync_plan import SyncPlan
from elastune.elastic.wire import messages
from elastune.elastic.wire.contact import ControllerLocator, enter_at
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

LOG = logging.getLogger(__name__)

ORPHANED_CODE = 70  # EX_SOFTWARE of sysexits.h: the coordinator is gone
ABANDONED_CODE = 75  # EX_TEMPFAIL: the coordinator is gone, no other one came, and a checkpoint was written
DISCONNECTED_CODE = 76  # EX_PROTOCOL: the program closed this worker's connection
BACKLOG_LIMIT_BYTES = 1 << 23  # of messages that wait in a worker; beyond that its program waits
SILENT_BEATS = 10  # heartbeats of the coordinator, at least, that a worker has to miss before it takes it for gone
WHY_LIMIT = 2000  # characters
SPEC_LIMIT_BYTES = 16 * LINE_LIMIT_BYTES  # a task holds a whole environment
FULL_LOOK_S = 0.01
AGAIN_S, AGAIN_LIMIT_S = 0.05, 0.5  # the pause between two tries to reach the next coordinator, and the limit of a try
LAST_STEP_S = 300.0  # a worker without any coordinator may take this long to its next checkpoint


class RunOver(Exception):
    """The run has ended, or this worker is cut off from it: there is nothing to wait for."""


class CoordinatorInbox:
    """What worker ``worker`` has received from its coordinator.

    The connection's thread calls ``note``; the main thread reads and waits.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.abandoned = False
        """Whether the coordinator is gone and no other one came: this worker ends at its next checkpoint."""
        self.turned_away = False
        """Whether this worker lost its connection, came back, and the run goes on without it."""
        self._inbox = threading.Condition()
        self._latest: View | None = None
        self._forced = self._confirmed = 0
        self._board = RendezvousStore()
        self._over = ""
        self._stop = False
        self._corruptions: list[messages.Corrupt] = []

    def note(self, message: Message) -> None:
        """Take in ``message``. Raises ``ProtocolError`` for a message that no coordinator sends."""
        with self._inbox:
            self._take(message)
            self._inbox.notify_all()

    def _take(self, message: Message) -> None:
        match message:
            case messages.InstallView(view):
                self._latest = view
                self._board.begin(view.number)
                if not view.scheduled:
                    self._forced = view.number
            case messages.Confirmed(view):
                self._confirmed = view
            case messages.Publish(key, value):
                self._board.put(key, value)
            case messages.Stop():
                self._stop = True
            case messages.Corrupt():
                self._corruptions.append(message)
            case messages.Bye():
                self._over = "the run is over"
            case messages.Beat():
                pass
            case _:
                raise ProtocolError(f"it sent {message.kind!r}")

    def stop_requested(self) -> bool:
        """Whether the run is to write a checkpoint and end. Any thread may ask."""
        return self._stop

    def take_corruptions(self) -> list[messages.Corrupt]:
        """Return the errors on purpose that came since the last call."""
        taken, self._corruptions = self._corruptions, []
        return taken

    @property
    def latest(self) -> View | None:
        """The newest view that was installed."""
        return self._latest

    def pending(self, current: int) -> View | None:
        """A scheduled view newer than ``current``."""
        latest = self._latest
        return latest if latest is not None and latest.scheduled and latest.number > current else None

    def superseded(self, number: int) -> bool:
        """Whether view ``number`` is over: a newer one took effect at once, or the run has ended."""
        return self._forced > number or bool(self._over)

    def await_view(self, after: int, timeout_s: float) -> View:
        """Block until there is a view newer than ``after`` that this worker has to enter at once.

        Such a view takes effect at once, or has this worker as a joiner. Raises ``TimeoutError`` and ``RunOver``.
        """
        self._wait(lambda: self._to_enter(after) is not None, timeout_s)
        view = self._to_enter(after)
        if view is None:
            raise TimeoutError(f"no view after {after} within {timeout_s:g} s")
        return view

    def await_pending(self, current: int) -> View | None:
        """Block until a scheduled view newer than ``current`` is installed.

        Returns None once ``current`` is over, and if no coordinator will install any view.
        """
        with suppress(RunOver):
            self._wait(lambda: self.pending(current) is not None or self.superseded(current), None)
        return None if self.superseded(current) else self.pending(current)

    def await_confirmed(self, view: int) -> bool:
        """Block until this joiner is a member of view number ``view`` for good; False if a newer view comes first.

        Raises ``RunOver``.
        """
        self._wait(lambda: self._confirmed >= view or self._is_newer(view), None)
        return self._confirmed >= view

    def await_bye(self, after: int) -> View | None:
        """Block until the run is over (None), or a view newer than ``after`` is to be entered at once."""
        try:
            self._wait(lambda: self._to_enter(after) is not None, None)
        except RunOver:
            return None
        return self._to_enter(after)

    def read(self, keys: list[str], timeout_s: float | None) -> list[str] | None:
        """The values published under ``keys``, once all of them are published; None if not within ``timeout_s``.

        Raises ``RunOver`` as soon as the view that the keys belong to is superseded.
        """
        view = min(int(key.partition("/")[0]) for key in keys)
        values: list[str | None] = []

        def complete() -> bool:
            values[:] = [self._board.get(key) for key in keys]
            return None not in values or self.superseded(view)

        self._wait(complete, timeout_s)
        if None not in values:
            return [text for text in values if text is not None]
        if self.superseded(view):
            raise RunOver(f"view {view} is superseded")
        return None

    def published(self, key: str) -> bool:
        """Whether a value is published under ``key``."""
        with self._inbox:
            return self._board.get(key) is not None

    def _to_enter(self, after: int) -> View | None:
        latest = self._latest
        if latest is None or latest.number <= after or self.worker not in latest.members:
            return None
        return latest if not latest.scheduled or self.worker in latest.joiners else None

    def _is_newer(self, view: int) -> bool:
        return self._latest is not None and self._latest.number > view

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None) -> None:
        with self._inbox:
            self._inbox.wait_for(lambda: condition() or bool(self._over) or self.abandoned, timeout_s)
            if (self._over or self.abandoned) and not condition():
                raise RunOver(self._over or "the coordinator is gone")


class CoordinatorClient(CoordinatorInbox):
    """A worker's connection to its coordinator: it sends heartbeats, messages and records, and receives views.

    The constructor returns once the coordinator has admitted the worker. If the coordinator dies, this object looks for
    the next one by itself.

    Args:
        address: The coordinator's address, "host:port".
        token: The secret of the run.
        worker: This worker's number.
        host: The name of this worker's host.
        moves: The file that names the host of the next coordinator (``ControllerLocator``); "": the host stays the
            same.

    Raises:
        UserError: The coordinator cannot be reached, or does not admit the worker.
    """

    def __init__(self, address: str, token: str, worker: int, *, host: str = "", moves: str = "") -> None:
        super().__init__(worker)
        self.on_break: Callable[[View], None] = lambda view: None
        """Called in this object's thread for every view that takes effect at once."""
        self.on_scheduled: Callable[[View], None] = lambda view: None
        """Called in this object's thread for every other view."""
        self.on_bye: Callable[[], None] = lambda: None
        """Called in this object's thread when the run is over for this worker."""
        self.on_orphaned: Callable[[str], None] = self._end_process
        """Called in this object's thread when the coordinator is gone; ends this process and its data loaders."""
        self.where: Callable[[], str] = lambda: ""
        """Called in this object's thread; returns the line that the program is at."""
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
        """Whether the run trains already: this worker has to be warm before it is ``ready``."""
        self.spec: WorkerSpec | None = welcome.spec
        """This worker's task; None if its coordinator sends none."""
        self._lines.limit_bytes = LINE_LIMIT_BYTES
        self._outbox = Outbox(self._socket)
        self._beat_s, self._least_beat_s = welcome.beat_s, welcome.least_beat_s
        self._every_s = welcome.beat_s
        self._silent_limit_s = max(SILENT_BEATS * welcome.beat_s, welcome.silence_s)
        self._grace_s = welcome.grace_s
        self._reconnect_state = ReconnectState(keeps=welcome.grace_s > 0)
        self._sending_lock = threading.RLock()  # a signal handler may send while the main thread does
        _close_in_children(self)
        self._thread = threading.Thread(target=self._live, name="member", daemon=True)
        self._thread.start()

    def _enter(self, hello: messages.Hello, limit_s: float = DIAL_LIMIT_S) -> messages.Welcome:
        address, hello_line = self._address, messages.encode(hello)
        try:
            entered = enter_at(
                address, self._lines, self._token, messages.PURPOSE, hello_line, DIAL_LIMIT_S, dial_s=limit_s
            )
        except Unreachable as error:
            fix = "see that the run is alive, and firewalls"
            raise UserError("a worker must reach its coordinator", f"{address}: {error}", fix) from None
        except (OSError, ProtocolError) as error:
            raise self._not_admitted(str(error)) from None
        try:
            self._socket, self._early = entered.connection, entered.early
            welcome = messages.decode(entered.line)
            if isinstance(welcome, messages.Bye):
                self._over, self.turned_away = "the run goes on without this worker", True
            if not isinstance(welcome, messages.Welcome):
                raise ProtocolError(f"it answered {welcome.kind!r}")
        except (ValueError, ProtocolError) as error:
            self._socket.close()
            # The error does not quote an invalid message: it may hold the environment of the run.
            raise self._not_admitted(
                type(error).__name__ if isinstance(error, ValidationError) else str(error)
            ) from None
        self._socket.setblocking(False)
        return welcome

    def _not_admitted(self, why: str) -> UserError:
        fix = "give each worker the token of this run and a number of its own"
        return UserError("a coordinator must let its workers in", f"{self._address}, worker {self.worker}: {why}", fix)

    # -- messages of the main thread ----------------------------------------------------------------------------------

    def ready(self) -> None:
        """Report that this worker is warm and waits for a view that has it."""
        self._send(messages.Ready())

    def running(self, view: int, step: int, *, joins: bool = False) -> None:
        """Report that this worker holds its state in view number ``view``, whose first step is ``step``.

        ``joins``: it is not a member for good yet, see ``await_confirmed``.
        """
        self._reconnect_state.member = self._reconnect_state.member or not joins
        self._send(messages.Running(view, step))

    def broken(self, view: int, why: str) -> None:
        """Report that a collective of view number ``view`` failed here."""
        self._send(messages.Broken(view, _sendable(why)))

    def noticed(self, seconds: float, why: str) -> None:
        """Report that this worker will be taken away in ``seconds``. A signal handler may call it."""
        self._send(messages.Noticed(max(0.0, seconds), _sendable(why)))

    def replace(self) -> None:
        """Ask for another worker in place of this one, which goes on until the other one joins."""
        self._send(messages.ReplaceAsked())

    def resize(self, workers: int, why: str = "") -> None:
        """Ask for ``workers`` workers."""
        self._send(messages.ResizeAsked(workers, _sendable(why)))

    def reshape(self, mesh: str, why: str = "") -> None:
        """Ask for another mesh."""
        self._send(messages.ReshapeAsked(mesh, _sendable(why)))

    def layers_found(self, layers: int) -> None:
        """Report into how many stages the model can be cut."""
        self._send(messages.LayersFound(layers))

    def report_round(self, view: int, step: int, learners: int, sync: SyncPlan, most: int, took_s: float) -> None:
        """Report that the ``learners`` of this worker have taken the round after ``step`` in view number ``view``.

        From now on heartbeats come as often as the grace period: a frozen worker is to be missed as soon as a late one.
        For the other arguments see ``RoundTaken``.
        """
        self._every_s = min(self._beat_s, max(sync.grace, self._least_beat_s))
        self._send(messages.RoundTaken(view, step, learners, sync.quorum, sync.grace, most, took_s))

    def left(self) -> None:
        """Report that this worker has left at the boundary of a view that does not have it."""
        self._send(messages.Left())

    def done(self) -> None:
        """Report that the training function has ended well; this worker stays to serve the others."""
        self._send(messages.Done())

    def publish(self, key: str, value: str) -> None:
        """Let all members read ``value`` under ``key``, which begins with a view's number and a slash."""
        with self._inbox:
            kept = self._board.put(key, value)
            self._inbox.notify_all()
        if kept:
            self._send(messages.Publish(key, value))

    def doing(
        self, doing: Doing, step: int, size_bytes: int = 0, view: int = 0, operation: int = 0, what: str = ""
    ) -> None:
        """Set what the next heartbeat reports (``Beat``). Costs well under two microseconds."""
        self._doing = (time.monotonic(), doing, step, size_bytes, view, operation, what)

    def report(self, record: Record) -> None:
        """Send ``record`` to the run's controller; blocks while too many earlier records wait here.

        Raises ``ValueError`` if the record is longer than the coordinator accepts.
        """
        while self._waits and self._thread.is_alive() and not self.abandoned:
            time.sleep(FULL_LOOK_S)
        logs.log_record(LOG, record)
        with self._sending_lock:
            self._outbox.put(self._reconnect_state.report(record))

    @property
    def _waits(self) -> bool:
        """Whether so much is unread, or not yet in the journal, that the program has to wait."""
        unread = self._outbox.full and self._outbox.size_bytes > BACKLOG_LIMIT_BYTES
        return unread or self._reconnect_state.unkept_bytes > BACKLOG_LIMIT_BYTES

    def refuse_fork(self) -> None:
        """Raise ``UserError`` in a forked child of this worker, which has its variables but no place in the run."""
        if os.getpid() != self._owner:
            rule = "a child that the program forks must end, not train on with the worker"
            raise UserError(rule, f"process {os.getpid()}, forked", "end it by os._exit(0), or use multiprocessing")

    def farewell(self, code: int) -> None:
        """Report that this worker's entry point has ended with ``code``, so that the end of its process is no accident.

        Returns once the coordinator has read all messages, or is gone.
        """
        self._leaving = True
        self._reconnect_state.exit = messages.Exit(code)
        self._left.set()
        self._send(messages.Exit(code))
        self._thread.join()

    def close(self) -> None:
        """Disconnect. The coordinator will take this worker for lost, unless it has left or the run is over."""
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
        LOG.debug("the connection to the coordinator ended: %s", why)
        while not self._ended and not closed_here and self._reconnects():
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
        """Serve the connection until it ends. Returns why it ended, and whether this process closed it."""
        try:
            return self._serve(), False
        except (OSError, ValueError, ProtocolError) as error:
            closed_here = isinstance(error, OSError) and error.errno in (errno.EBADF, errno.ENOTSOCK)
            return str(error) or type(error).__name__, closed_here
        except Exception:  # noqa: BLE001 - without this thread the worker is lost, and must know it
            traceback.print_exc()
            return "its thread failed", False

    def _reconnects(self) -> bool:
        """Find the next coordinator and report everything to it. If none comes, have the run end at a checkpoint."""
        until = time.monotonic() + self._grace_s
        self._socket.close()
        if not self._ended and self._grace_s:
            LOG.warning(
                "%s: the coordinator is gone; looking for the next one for %.0f s", self._address, self._grace_s
            )
        while not self._ended and (left_s := until - time.monotonic()) > 0:
            self._lines, self._address = Lines(SPEC_LIMIT_BYTES), self._elsewhere.now
            try:
                self._enter(replace(self._hello, returns=True), min(left_s, AGAIN_LIMIT_S))
            except UserError as error:
                LOG.debug("no coordinator yet: %s", error)
                time.sleep(AGAIN_S)
                continue
            self._lines.limit_bytes = LINE_LIMIT_BYTES
            with self._sending_lock:
                self._outbox.begin(self._socket)
                for line in self._reconnect_state.lines(self._latest, self._stop):
                    self._outbox.put(line)
            LOG.info("connected to the coordinator at %s", self._address)
            return True
        if not self._ended and self._grace_s:
            with self._inbox:
                self._stop = self.abandoned = True
                self._inbox.notify_all()
            if not self._left.wait(LAST_STEP_S):
                end_process("nobody came in the coordinator's place, and no step ended", ABANDONED_CODE)
        return False

    def _serve(self) -> str:
        """Send heartbeats and read messages until the connection ends. Returns why it ended."""
        self._handle_lines(self._early)
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
                    self._handle_lines(self._lines.feed(data))
            elif silent_s > self._silent_limit_s:
                return f"it has been silent for {silent_s:.0f} s"
            if now >= next_beat:
                every_s = self._every_s
                next_beat = now + every_s
                since, doing, step, size_bytes, view, operation, what = self._doing
                since_s, words, line = max(0.0, now - since), _sendable(what), _sendable(self.where())
                self._send(Beat(step, doing, since_s, size_bytes, view, operation, words, line, every_s))

    def _handle_lines(self, lines: list[bytes]) -> None:
        for line in lines:
            message = messages.decode(line)
            if isinstance(message, messages.RecordsKept):
                with self._sending_lock:
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
        with self._sending_lock:
            self._reconnect_state.note(message)
            self._outbox.put(messages.encode(message))

    def _end_process(self, why: str) -> None:
        end_process(f"the coordinator is gone ({why}); worker {self.worker} ends", ORPHANED_CODE)

    def _disconnected(self) -> None:
        end_process("the program has closed this worker's connection", DISCONNECTED_CODE)


class ReconnectState:
    """A worker's report for a coordinator that knows nothing of it: its state, and records not yet in the journal.

    It follows from the messages that the worker sends. ``keeps``: records are kept until they are in the journal.

    Attributes:
        member: The worker holds the run's state for good.
        exit: The worker's last message, once it was sent.
        unkept_bytes: The size of the records that are not in the journal yet.
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

    def note(self, message: Message) -> None:
        """Note that the worker sends ``message``."""
        match message:
            case Ready():
                self._ready = True
            case Running():
                self._running = message
            case LayersFound(layers):
                self._layers = layers
            case Broken(view):
                self._broken = view
            case Done():
                self._done = True
            case RoundTaken():
                self._round = message
            case Noticed(seconds):
                self._goes_at = time.monotonic() + seconds

    def report(self, record: Record) -> bytes:
        """The line that reports ``record``; it is kept until ``kept`` covers it.

        Raises ``ValueError`` if it is longer than the coordinator accepts.
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
        """Forget the records up to the ``nth``: they are in the journal."""
        while self._unkept and self._unkept[0][0] <= nth:
            self.unkept_bytes -= len(self._unkept.popleft()[1])

    def lines(self, latest_view: View | None, stops: bool) -> list[bytes]:
        """The lines that a new coordinator has to receive first.

        Args:
            heard: The newest view.
            stops: Whether the coordinator before has asked the worker to stop.
        """
        goes_s = None if self._goes_at is None else max(0.0, self._goes_at - time.monotonic())
        state = Returned(
            member=self.member,
            ready=self._ready,
            latest_view=latest_view,
            version=self._running.version,
            step=self._running.step,
            layers=self._layers,
            broken=self._broken,
            done=self._done,
            stops=stops,
            noticed_s=goes_s,
            records=self._reported,
        )
        # Without this line a worker that waits at the end of a round would count as late for it.
        round_taken = [] if self._round is None else [encode(self._round)]
        last = [] if self.exit is None else [encode(self.exit)]
        return [encode(state), *round_taken, *(line for _, line in self._unkept), *last]


class Outbox:
    """The lines that a worker still has to send on ``connection``, which does not block and may be read slowly.

    ``put`` returns at once in any thread, even in a signal handler that interrupts another ``put``. ``flush`` sends
    what the connection has not taken at once; ``fileno`` is readable while it has work. A broken connection is no error
    here: the thread that reads from it will notice.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines: deque[bytes] = deque()
        self._rest = memoryview(b"")
        self._sending = threading.Lock()
        self._bell = WakeupPipe()
        self.full = False
        """Whether the connection has not taken all lines."""

    def begin(self, connection: socket.socket) -> None:
        """Send lines on ``connection`` from now on; forget lines that the connection before it has not taken."""
        with self._sending:
            self._connection, self._rest, self.full = connection, memoryview(b""), False
            self._lines.clear()

    def fileno(self) -> int:
        """A descriptor that is readable while ``flush`` has work."""
        return self._bell.fileno()

    @property
    def size_bytes(self) -> int:
        """The size of the lines that wait to be sent."""
        return len(self._rest) + sum(map(len, list(self._lines)))

    def put(self, line: bytes) -> None:
        """Send ``line``, after all lines before it."""
        self._lines.append(line)
        if not self.full and not self.flush():
            self._bell.ring()

    def flush(self) -> bool:
        """Send what the connection takes now. Returns whether it has taken everything."""
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
                except OSError:  # the other side has closed the connection
                    self._lines.clear()
                    self._rest = memoryview(b"")
        return True

    def close(self) -> None:
        """Release the file descriptors. Idempotent."""
        self._bell.close()


def _close_in_children(client: CoordinatorClient) -> None:
    """Have a forked child (a data loader) close its copy of the connection: it must not outlive the parent there."""
    reference = weakref.ref(client)

    def close_copy() -> None:
        if (parent := reference()) is not None and parent._socket.fileno() >= 0:
            os.close(parent._socket.detach())

    os.register_at_fork(after_in_child=close_copy)


def _sendable(why: str) -> str:
    return why[:WHY_LIMIT].encode(errors="replace").decode()


def end_process(why: str, code: int) -> NoReturn:
    """Write ``why`` to the log, and end this process and its children at once with ``code``. Any thread may call it."""
    with contextlib.suppress(OSError):
        os.write(2, f"elastune: {why}\n".encode(errors="replace"))
    _end_family()
    os._exit(code)


def _end_family() -> None:
    """Send SIGKILL to this process's data loaders, and to its process group if this process leads the group."""
    for child in multiprocessing.active_children():  # by themselves they check for their parent only now and then
        with contextlib.suppress(OSError, ValueError):
            child.kill()
    if (group := os.getpid()) == os.getpgrp():
        for process in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):
                if process != group and os.getpgid(process) == group:
                    os.kill(process, signal.SIGKILL)
