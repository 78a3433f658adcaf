"""The coordinator of a run: a thread in the controller that hears workers and obeys the membership machine.

Only this thread calls the machine, one event at a time. The controller takes from the coordinator, by ``take`` and in
order, what it has to do: start and end processes, and keep the workers' records.
"""

from __future__ import annotations

import logging
import secrets
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from elastune.core.journal import logs
from elastune.core.journal.records import (
    Checkpointed,
    ConnectionsRefused,
    MembershipEvent,
    Record,
    Reported,
    Restarted,
    StepsCompleted,
)
from elastune.elastic.coordinator import machine
from elastune.elastic.coordinator.controller_interface import (
    SILENCE_S,
    ControllerQueue,
    ForController,
    ListenOptions,
    RecordSent,
    Timeouts,
    WorkerBounds,
    WorkerDisconnected,
    WorkerDrained,
    WorkerLookups,
)
from elastune.elastic.coordinator.liveness import WorkerConnections, beat_every_s, least_beat_s
from elastune.elastic.coordinator.machine import (
    OVER,
    Confirm,
    Dismiss,
    End,
    GiveUp,
    Instruction,
    Membership,
    ProtocolViolation,
    Release,
    Request,
    Start,
    StopRun,
    answer,
    begin,
    objection,
    waits_for_host,
)
from elastune.elastic.coordinator.round_quorum import RoundWatch, Timers
from elastune.elastic.wire import messages
from elastune.elastic.wire.messages import (
    Beat,
    Broken,
    Connected,
    Event,
    Hello,
    InstallView,
    Left,
    Lost,
    Message,
    Noticed,
    ReplaceAsked,
    ReshapeAsked,
    ResizeAsked,
)
from elastune.elastic.wire.server import CONNECTION_CLOSED, Closed, Connection, ConnectionServer, Greeted, Heard
from elastune.elastic.wire.transport import ProtocolError, WakeupPipe
from elastune.elastic.wire.view import RendezvousStore, View

BROKEN_GRACE_S = 0.02  # a report of a broken view waits this long for the death that may explain it
CLOSE_LIMIT_S = 5.0
BEATS_IN_SILENCE = 6  # heartbeats to a worker in the time after which it would take the coordinator for lost
FINAL_MESSAGES_S = 2.0  # after a worker's end its last messages may take this long to arrive
SAVE_SHARE, LEAST_SAVE_S = 0.25, 5.0  # of a notice: kept for the last step and its checkpoint
HOST_WAIT_S = 2.0  # ready workers wait this long for the others of their host, so that all join by one view
BEAT = messages.encode(Beat())
LOGGED_EVENTS = (Connected, Lost, Noticed, messages.NoticeEnding, ReplaceAsked, ResizeAsked, ReshapeAsked, Broken)
"""Events at the level info; the others are at the level debug."""


class Coordinator:
    """Serves one run until ``close``: it accepts workers, feeds the membership machine and obeys it.

    Any thread may call the public methods. Numbers that no event may have (a negative one, NaN) raise ``ValueError``.

    Args:
        workers: The numbers of the workers that the caller is starting.
        bounds: How many workers the run may have, and which meshes they may form.
        timeouts: How long coordinator and workers wait for each other.
        entrance: The address to listen on, and the token.
        lookups: What the controller knows about its workers.
        run: The name of the run in log records.

    Raises:
        OSError: The coordinator cannot listen at the address.
    """

    def __init__(
        self,
        workers: Sequence[int],
        bounds: WorkerBounds,
        timeouts: Timeouts,
        entrance: ListenOptions,
        lookups: WorkerLookups,
        run: str = "",
    ) -> None:
        self._log = logs.run_logger(__name__, run)
        host, heartbeat_s, silence_s = entrance.host, timeouts.heartbeat_s, timeouts.silence_s
        self.token = entrance.token or secrets.token_hex(16)
        self._bell = WakeupPipe()
        self._hub = ConnectionServer(host, self.token, self._bell, port=entrance.port, tls=entrance.tls)
        self.address = f"[{host}]:{self._hub.port}" if ":" in host else f"{host}:{self._hub.port}"
        self._state = begin(workers, bounds.low, bounds.high, bounds.most_losses, bounds.meshes)
        self._kept: dict[int, int] = {}
        self._timeouts, self._lookups = timeouts, lookups
        self._beat_s, self._least_beat_s = beat_every_s(heartbeat_s, bounds.high), least_beat_s(bounds.high)
        self._registry, self._restarts = WorkerRegistry(workers), RestartCosts()
        loading_s = max(heartbeat_s, min(silence_s, SILENCE_S))
        self._peers = WorkerConnections(heartbeat_s, loading_s, lookups.vitals_of, silence_s)
        self._newest: View | None = None
        self._unsent: View | None = None  # the newest view, until it was sent to all workers
        self._board = RendezvousStore()
        self._ending: dict[int, str] = {}  # how the process ended, of workers whose last messages are awaited
        self._over = self._stopping = self._closing = False
        self._calls: deque[Callable[[], None]] = deque()
        self._timers, self._host_batching = Timers(), HostBatching()
        hurry = partial(self._peers.waits, self._beat_s)
        self._rounds = RoundWatch(self._timers, self._drop, lambda: self._state, lambda: self._out.full, hurry)
        self._due = self._next_beat = self._next_sign = time.monotonic()
        self._out = ControllerQueue(on_room=self._bell.ring)
        self._thread = threading.Thread(target=self._serve, name="coordinator", daemon=True)
        self._thread.start()

    # -- for the controller -------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """A descriptor that is readable while ``take`` or ``take_records`` would return anything."""
        return self._out.fileno()

    @property
    def members(self) -> list[int]:
        """The workers that train together now, by rank."""
        current = self._state.current or self._state.proposed
        return list(current.members) if current is not None else []

    @property
    def membership(self) -> Membership:
        """The state of the membership machine now."""
        return self._state

    @property
    def step(self) -> int:
        """The number of completed steps, according to the workers' newest heartbeats."""
        return self._peers.step

    def take(self) -> list[ForController]:
        """Remove and return what the controller has to do, in order."""
        return self._out.take()

    def take_records(self) -> list[Record]:
        """Remove and return the records of what happened, in order: events of the machine, and stragglers."""
        return self._out.take_records()

    def why_left(self, worker: int) -> str:
        """The reason why ``worker`` was asked to leave: that of its notice, or that of the newest resize."""
        return self._registry.why_left(worker)

    def lost(self, worker: int, why: str) -> None:
        """Report that ``worker``'s process has ended or could not be started.

        ``WorkerDrained`` follows once all messages of this worker were handed over.
        """
        self._call(lambda: self._await_final_messages(worker, why))

    def stop(self) -> None:
        """Ask all workers, present and future ones, to write a checkpoint and end the run."""
        self._call(self._ask_to_stop)

    def corrupt(self, worker: int, request: messages.Corrupt) -> None:
        """Ask ``worker`` for a silent error."""
        self._call(lambda: self._send_to(worker, request))

    def kept(self, records: Mapping[int, int]) -> None:
        """Report how many records of each worker are in the journal."""
        self._call(lambda: self._kept.update(records))

    def capacity(self, free: int) -> None:
        """Report that ``free`` more workers could be started now."""
        self._call(partial(self._feed, None, messages.CapacityChanged(free)))

    def ask(self, request: Request | messages.Progressed) -> None:
        """Pass on a request for other workers or another mesh, or the news that the run has progressed.

        A request that is impossible has no effect. Nor has a request that was made before: each worker repeats a
        policy's.
        """

        def handle() -> None:
            if not objection(self._state, request) and machine.changes(self._state, request):
                self._feed(None, request)

        self._call(handle)

    def notice(self, worker: int, seconds: float, why: str) -> None:
        """Report that ``worker`` will be taken away in ``seconds``."""
        self._call(partial(self._feed, worker, messages.Noticed(seconds, why)))

    def close(self) -> None:
        """Close every connection and end the thread. Idempotent."""
        self._closing = True
        self._bell.ring()
        self._thread.join(CLOSE_LIMIT_S)
        self._out.release()

    def _call(self, action: Callable[[], None]) -> None:
        self._calls.append(action)
        self._bell.ring()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._round()
                self._out.wake()
        except Exception as bug:  # noqa: BLE001 - nothing else would report that the run has lost its coordinator
            traceback.print_exc(file=sys.stderr)
            self._log.critical("the coordinator failed", exc_info=True)
            self._out.put(GiveUp(f"the coordinator failed: {bug!r}"))
            self._out.wake()
        finally:
            self._hub.close()
            self._bell.close()

    def _round(self) -> None:
        full = self._out.full  # the controller is busy: its workers' messages stay unread
        self._hub.read_workers(not full)
        self._due = min([self._next_beat, self._peers.next_silence, *self._timers.next_at])
        # A call of the controller about a worker is made after the messages that the worker had sent before it.
        calls = [self._calls.popleft() for _ in range(len(self._calls))]
        for event in self._hub.wait(0.0 if calls else self._due - time.monotonic()):
            match event:
                case Greeted(connection, hello):
                    self._greet(connection, hello)
                case Heard(connection, message, size):
                    self._handle(connection, message, size)
                case Closed(connection, why):
                    self._part(connection, why)
                case ConnectionsRefused():
                    logs.log_record(self._log, event)
                    self._out.keep(event)
        for call in calls:
            call()
        now = time.monotonic()
        self._timers.run(now)
        if full:
            self._peers.excuse(now)
        for worker in self._peers.silent(now, self._due):
            self._lose(worker, self._peers.why_silent(worker))
        if self._unsent is not None and not self._over:  # once a round: workers lost with one host make one view
            self._send(self._peers.connections(), InstallView(self._unsent))
            self._unsent = None
        for slow in self._peers.take_excused():
            self._out.report(slow)
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            if now >= self._next_sign:  # a worker with unread output sees from that output that this side lives
                self._next_sign = now + self._timeouts.silence_s / BEATS_IN_SILENCE
                self._hub.send([c for c in self._peers.connections() if not c.output], BEAT)
            for worker, nth in self._kept.items():
                self._send_to(worker, messages.RecordsKept(nth))
            self._kept.clear()
            if self._host_batching.waited_enough(self._state, now):
                self._feed(None, messages.WaitedEnough())
            if self._state.current is not None and not self._over:
                members = self._state.current.members
                limit_s, last_line = self._timeouts.collective_timeout_s, self._lookups.last_line
                self._over = self._out.report(self._peers.look(members, now, limit_s, last_line))

    # -- messages of workers and clients ------------------------------------------------------------------------------

    def _greet(self, connection: Connection, hello: Hello) -> None:
        worker = connection.worker = hello.worker
        if worker is None:
            return
        if not self._registry.expects(worker) or worker in self._peers or self._over or hello.returns:
            if hello.returns:  # the others go on without it
                self._send([connection], messages.Bye())
            self._hub.end(connection)
            return
        self._let_in(connection, worker, hello)

    def _let_in(self, connection: Connection, worker: int, hello: Hello) -> None:
        self._peers.add(worker, connection, hello.host, time.monotonic())
        joins, spec, times = self._newest is not None, self._lookups.spec_of(worker), self._timeouts
        beats_s = self._beat_s, self._least_beat_s
        self._send([connection], messages.Welcome(joins, *beats_s, times.silence_s, times.grace_s, spec))
        if self._stopping:
            self._send([connection], messages.Stop())
        if self._newest is not None and self._unsent is None:
            self._send([connection], InstallView(self._newest))
        for key, value in self._board.items():
            self._send([connection], messages.Publish(key, value))
        self._feed(worker, messages.Connected(hello.host))

    def _handle(self, connection: Connection, message: Message, size: int) -> None:
        if (worker := connection.worker) is None:
            self._answer(connection, message)
            return
        now = time.monotonic()
        self._peers.message_received(worker, now, message)
        self._rounds.message_received(worker, message, now)
        match message:
            case messages.Report(record, nth):
                record = self._restarts.record_received(record, now)
                self._out.put(RecordSent(worker, record, nth), size)
                # Progress only resets the count of failures.
                if (step := self._registry.further(record)) is not None and self._state.consecutive_failures:
                    self._feed(None, messages.Progressed(step))
            case messages.Exit(code):
                self._send([connection], messages.Bye())
                self._end_connection(worker, code, f"it ended with exit code {code}")
            case _ if isinstance(message, messages.RoundTaken) or not self._registry.expects(worker):
                pass  # ``_rounds`` has its message, or the worker was released or is about to be ended
            case Beat():
                self._peers.beaten(worker, message, now)
                self._restarts.step_reached(message.step)
            case messages.Publish():
                self._publish(worker, message)
            case Broken():
                # If a death explains the break, the end of that connection arrives and is handled first.
                self._timers.put(now + BROKEN_GRACE_S, partial(self._feed, worker, message))
            case messages.ResizeAsked() | messages.ReshapeAsked():
                self.ask(message)
            case messages.LayersFound(layers):
                if self._state.meshes.widened(layers) != self._state.meshes:  # only the first report changes anything
                    self._feed(None, message)
            case _ if isinstance(message, messages.SentEvent):
                self._feed(worker, message)
            case _:
                self._lose(worker, f"it broke the protocol: it sent {message.kind!r}, which no worker sends")

    def _publish(self, worker: int, message: messages.Publish) -> None:
        try:
            kept = self._board.put(message.key, message.value)
        except ProtocolError as error:
            self._lose(worker, f"it broke the protocol: {error}")
            return
        if kept:
            self._send(self._peers.connections(but=worker), message)

    def _answer(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Request):
            why_not = OVER if self._over else objection(self._state, message)
            if not why_not:
                self._feed(None, message)
            self._send([connection], answer(self._state, message, self.members, why_not))
        self._hub.end(connection)

    def _part(self, connection: Connection, why: str) -> None:
        worker = connection.worker
        self._log.debug("the connection of worker %s ended: %s", worker, why)
        if worker is None or worker not in self._peers:
            return
        if why == CONNECTION_CLOSED:
            self._end_connection(worker, None, why)
        else:  # it was cut off
            self._lose(worker, why)
            self._bury(worker)

    def _end_connection(self, worker: int, code: int | None, why: str) -> None:
        """``worker`` will send nothing more."""
        self._out.put(WorkerDisconnected(worker, code))
        self._lose(worker, self._ending.get(worker, why))
        self._bury(worker)

    def _await_final_messages(self, worker: int, why: str) -> None:
        self._ending[worker] = why
        self._timers.put(time.monotonic() + FINAL_MESSAGES_S, partial(self._bury, worker))
        if worker not in self._peers:
            self._bury(worker)

    def _bury(self, worker: int) -> None:
        if worker in self._ending:
            self._lose(worker, self._ending.pop(worker))
            self._out.put(WorkerDrained(worker))

    def _ask_to_stop(self) -> None:
        self._stopping = True
        self._send(self._peers.connections(), messages.Stop())

    # -- the machine --------------------------------------------------------------------------------------------------

    def _lose(self, worker: int, why: str) -> None:
        if connection := self._peers.remove(worker):
            self._hub.end(connection)
        if self._registry.expects(worker):
            self._registry.mark_gone(worker)
            self._feed(worker, messages.Lost(why))

    def _drop(self, worker: int, why: str) -> None:
        self._send_to(worker, messages.Bye())
        self._lose(worker, why)

    def _feed(self, worker: int | None, event: Event) -> None:
        if self._over:
            return
        self._registry.note(worker, event)
        self._out.keep(MembershipEvent(messages.encode_event(worker, event)))
        level = logging.INFO if isinstance(event, LOGGED_EVENTS) else logging.DEBUG
        self._log.log(level, "worker %s: %s" if worker is not None else "%.0srun: %s", worker, event)
        had_members = bool(self._state.members)
        try:
            self._state, instructions = machine.transition(self._state, worker, event)
        except ProtocolViolation as violation:
            instructions = (GiveUp(str(violation)),)
        if had_members and not self._state.members:
            self._restarts.all_lost(time.monotonic())
        for instruction in instructions:
            self._obey(instruction)
        if isinstance(event, Noticed) and worker is not None:
            self._await_notice(worker, event.seconds)

    def _await_notice(self, worker: int, seconds: float) -> None:
        """Tell the machine when only the time for a checkpoint is left of a notice to ``worker`` of ``seconds``."""

        def ends() -> None:
            if self._registry.expects(worker):
                self._feed(worker, messages.NoticeEnding())

        self._timers.put(time.monotonic() + wait_for_others_s(seconds), ends)

    def _obey(self, instruction: Instruction) -> None:
        severe = isinstance(instruction, GiveUp | StopRun) or (isinstance(instruction, End) and instruction.lost)
        self._log.log(logging.WARNING if severe else logging.INFO, "decided: %s", instruction)
        match instruction:
            case InstallView(view):
                self._newest = self._unsent = view
                self._board.begin(view.number)
            case Confirm(worker, view):
                self._send_to(worker, messages.Confirmed(view))
            case Release(worker):
                self._registry.mark_gone(worker)
                self._send_to(worker, messages.Bye())
            case Dismiss():
                self._over = True
                self._send(self._peers.connections(), messages.Bye())
            case Start(workers):
                self._registry.add(workers)
                self._out.put(instruction)
            case End(worker):
                self._registry.mark_gone(worker)
                self._send_to(worker, messages.Bye())  # a worker that the controller cannot reach ends itself
                self._out.put(instruction)
            case GiveUp():
                self._over = True
                self._out.put(instruction)
            case StopRun(worker, why):
                self._ask_to_stop()
                reason = self._registry.why_left(worker)
                notice = f"notice to worker {worker}" + (f" ({reason})" if reason else "")
                self._out.put(StopRun(worker, f"{notice}: {why}"))

    def _send_to(self, worker: int, message: Message) -> None:
        if peer := self._peers.get(worker):
            self._send([peer.connection], message)

    def _send(self, connections: Sequence[Connection], message: Message) -> None:
        self._hub.send(connections, messages.encode(message))


def wait_for_others_s(seconds: float) -> float:
    """How long a run waits for replacements after a notice of ``seconds``. The rest is for a checkpoint.

    Args:
        seconds: The time of the notice.

    Returns:
        Three quarters of it, less if that leaves under 5 s, but at least half of it.
    """
    return seconds - min(seconds / 2, max(LEAST_SAVE_S, SAVE_SHARE * seconds))


class RestartCosts:
    """Measures what a restart from a checkpoint costs: no worker is left that could say so."""

    def __init__(self) -> None:
        self._step = 0
        self._lost_at: float | None = None

    def step_reached(self, step: int) -> None:
        """Note that a worker has completed ``step`` steps."""
        self._step = max(self._step, step)

    def all_lost(self, now: float) -> None:
        """Note that the last worker with the run's state was lost."""
        self._lost_at = now

    def record_received(self, record: Record, now: float) -> Record:
        """Note how far ``record`` says that training is. Returns it, with its costs if it reports a restart."""
        if isinstance(record, StepsCompleted):
            self.step_reached(record.last_step)
        if not isinstance(record, Restarted):
            return record
        pause_s = 0.0 if self._lost_at is None else now - self._lost_at
        repeated, self._step, self._lost_at = max(0, self._step - record.step), record.step, None
        return replace(record, repeated=repeated, pause_s=pause_s)


class HostBatching:
    """Decides how long ready workers wait for the other workers of their host, so that all of them join by one view."""

    def __init__(self) -> None:
        self._since: float | None = None

    def waited_enough(self, state: Membership, now: float) -> bool:
        """Whether a worker has waited for ``HOST_WAIT_S``.

        True once for each such wait; to be called from time to time.
        """
        if not waits_for_host(state):
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= HOST_WAIT_S:
            self._since = None
            return True
        return False


class WorkerRegistry:
    """The workers that a coordinator knows: which may connect, which have gone for good, and why one was to leave.

    ``workers`` are the first ones.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self._started = set(workers)
        self._gone: set[int] = set()
        self._reasons: dict[int, str] = {}
        self._resized = ""
        self._reached = -1

    def add(self, workers: Iterable[int]) -> None:
        """Note that these workers were started."""
        self._started.update(workers)

    def mark_gone(self, worker: int) -> None:
        """Note that ``worker`` has gone for good: its messages are ignored from now on."""
        self._gone.add(worker)

    def expects(self, worker: int) -> bool:
        """Whether ``worker`` was started and has not gone."""
        return worker in self._started and worker not in self._gone

    def note(self, worker: int | None, event: Event) -> None:
        """Remember the reason for leaving that ``event`` contains, if it contains one."""
        match event:
            case Left() if worker is not None:
                self.mark_gone(worker)
            case Noticed(why=why) if worker is not None:
                self._reasons[worker] = why
            case ReplaceAsked() if worker is not None:
                self._reasons[worker] = "another was to take its place"
            case ResizeAsked(workers=workers, why=why):
                self._resized = why or f"a resize to {workers} workers"
            case ReshapeAsked(mesh=mesh, why=why):
                self._resized = why or f"a reshape to {mesh}"

    def why_left(self, worker: int) -> str:
        """The reason why ``worker`` was asked to leave: that of its notice, or that of the newest resize."""
        return self._reasons.get(worker, self._resized)

    def further(self, record: Record) -> int | None:
        """The step of ``record``, a checkpoint or a report, if it is higher than that of any record before."""
        if not isinstance(record, Checkpointed | Reported) or record.step <= self._reached:
            return None
        self._reached = record.step
        return record.step
