"""The agent of one machine: it owns the workers there and executes the requests of its controller.

Workers are forked from a warm server, as on a controller's own machine. All of them end with the agent, however it
ends. An agent knows no runs: each worker finds the coordinator of its run by itself. When its controller dies, an
agent may keep its workers for a while and serve the next controller at the same address.

A worker that has ended well may have written the last checkpoint of its run. ``PendingExits`` reports its end only once
the controller has the files, because a report of the end lets the run go on from that checkpoint.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastune.core.cost import KINDS, ON_DEMAND
from elastune.core.errors import UserError
from elastune.core.journal.logs import logged
from elastune.elastic.wire.contact import SALT_DIGITS, ServerBusy, derived, enter_at
from elastune.elastic.wire.transport import READ_BYTES, Lines, ProtocolError, Unreachable
from elastune.elastic.worker.client import ABANDONED_CODE
from elastune.runtime.agents import messages
from elastune.runtime.agents.host_report import facts, probe_folder
from elastune.runtime.agents.messages import (
    AgentBeat,
    AgentBye,
    AgentHello,
    AgentRefused,
    AgentWelcome,
    EndWorker,
    FolderProbeRequest,
    HostFactsRequest,
    PreemptionNoticed,
    StartWorker,
    TakeFiles,
    WorkerEnded,
    WorkerKept,
    WorkerSeen,
    WorkerStarted,
)
from elastune.runtime.agents.transfer_client import FileTransferClient
from elastune.runtime.launcher import Bootstrap, Launcher, Needs, ProcessEnded, ProcessEvent, ProcessStarted
from elastune.runtime.preemption import NoticeSource

LOG = logging.getLogger(__name__)

WELL = (0, ABANDONED_CODE)  # exit codes of a worker that has written its files
HELD_LOOK_S = 0.05
STALLED_S = 30.0  # after this time without any progress of the files, the agent no longer waits for them


def run_of(worker: Bootstrap) -> str:
    """The run of ``worker``, by the salt of its token."""
    return worker.token[:SALT_DIGITS]


class PendingExits:
    """Moves the files of an agent's workers to the controller, and holds back the workers' ends until it has them.

    Args:
        folder: The folder for the files; it is made when it is needed.
        notify: Called with a line for the person who looks after this machine.
    """

    def __init__(self, folder: Path, notify: Callable[[str], None]) -> None:
        self._folder, self._notify = folder, notify
        self._transfers: FileTransferClient | None = None
        self._used = False
        self._held: list[tuple[float, ProcessEnded]] = []
        self._closing = False

    def use(self, host: str, port: int, token: str) -> None:
        """Send files to the controller on ``host`` at ``port``; 0: workers write into their runs' folders."""
        self._used = port > 0
        if not self._used:
            return
        if self._transfers is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="files-", dir=self._folder))
            self._transfers = FileTransferClient(folder, self._notify)
        self._transfers.use(f"{host}:{port}", token)

    def spool_of(self, run: str) -> str:
        """The folder in which new workers of ``run`` leave files; "": they write into the run's folder."""
        return str(self._transfers.spool_of(run)) if self._used and self._transfers is not None else ""

    def begin(self, run: str) -> None:
        """Prepare for the first worker of ``run``. Raises ``OSError``."""
        if self._used and self._transfers is not None:
            self._transfers.begin(run)

    def leave(self, run: str) -> None:
        """Note that no worker of ``run`` is left on this machine."""
        if self._transfers is not None:
            self._transfers.leave(run)

    @property
    def look_s(self) -> float:
        """How long to wait until the next call of ``released``."""
        return HELD_LOOK_S if self._held else math.inf

    def holds(self, event: ProcessEvent) -> bool:
        """Hold back ``event`` if it is an end that must not be reported yet. Return whether it is."""
        if not isinstance(event, ProcessEnded) or event.code not in WELL or not self._waits(event, time.monotonic()):
            return False
        self._held.append((time.monotonic(), event))
        return True

    def released(self) -> list[ProcessEnded]:
        """Return the ends that may be reported now."""
        due = [event for since, event in self._held if not self._waits(event, since)]
        self._held = [(since, event) for since, event in self._held if event not in due]
        return due

    def given_up(self) -> list[ProcessEnded]:
        """Return all ends that were not reported, and hold back none from now on."""
        self._closing = True
        held, self._held = self._held, []
        return [event for _, event in held]

    def close(self) -> None:
        """Stop moving files. Idempotent."""
        if self._transfers is not None:
            self._transfers.close()

    def _waits(self, end: ProcessEnded, since: float) -> bool:
        if self._transfers is None or self._closing or not self._transfers.pending(run_of(end.bootstrap)):
            return False
        return time.monotonic() < max(since, self._transfers.moved_at) + STALLED_S


SEND_LIMIT_S = 10.0
GREETING_LIMIT_S = 10.0
TAIL_CHARACTERS = messages.TEXT_LIMIT // 2
AGAIN_S = 0.05  # between two searches for the next controller
LAST_STEP_S = 330.0  # how long workers may take to end without any controller: more than the workers' own limit


@dataclass(frozen=True)
class Link:
    """A connection to a controller that has admitted this agent by ``token``.

    Attributes:
        socket: The connection.
        token: The secret that both sides have.
        lines: Cuts the received bytes into lines.
        early: The lines that came together with the welcome.
        welcome: The controller's first message.
    """

    socket: socket.socket
    token: str = field(repr=False)
    lines: Lines
    early: list[bytes]
    welcome: AgentWelcome


def join(address: str, token: str, hello: AgentHello, limit_s: float) -> Link:
    """Connect to the controller at ``address`` ("host:port"), which may start up to ``limit_s`` later.

    Raises:
        UserError: If the controller does not admit this agent.
        OSError: If nothing answers, or the controller has no room for newcomers.
    """
    lines, hello_line = Lines(), messages.FROM_AGENT.encode(hello)
    try:
        entered = enter_at(address, lines, token, messages.PURPOSE, hello_line, GREETING_LIMIT_S, dial_s=limit_s)
    except (Unreachable, ServerBusy):
        raise
    except (OSError, ProtocolError) as error:
        raise _not_admitted(f"{address}: {error}") from None
    connection = entered.connection
    try:
        answer = messages.FROM_CONTROLLER.decode(entered.line)
    except ValueError:
        connection.close()
        raise _not_admitted(f"{address}: its answer is not a message") from None
    if isinstance(answer, AgentRefused):
        connection.close()
        raise UserError("an agent must fit its controller", answer.why, "install the same versions on all machines")
    if not isinstance(answer, AgentWelcome):
        connection.close()
        raise UserError("a controller must let its agents in", f"{address} sent {answer.kind!r}", "see the address")
    connection.settimeout(SEND_LIMIT_S)
    return Link(connection, token, lines, entered.early, answer)


def _not_admitted(why: str) -> UserError:
    fix = "give the agent the controller's own token file, and the address that it listens on for agents"
    return UserError("a controller must let its agents in", why, fix)


class Agent:
    """Serves one controller at a time with the workers of one machine.

    Args:
        link: The connection to the first controller.
        launcher: Starts and ends the workers.
        logs: A folder for the logs of runs whose folder is not on this machine, and for their checkpoints until the
            controller has them.
        notices: Sources of notices that the machine will be taken away; the agent polls them.
        leaving: Returns in how many seconds this machine must be free, or None; the agent polls it.
        again: Connects to the next controller, as ``join`` does. Its argument is the number of workers that were kept.
        moves: The file by which workers find the next controller (``ControllerLocator``).
        notify: Called, from any thread, with a line for the person who looks after this machine.
    """

    def __init__(
        self,
        link: Link,
        launcher: Launcher,
        logs: Path,
        *,
        notices: Sequence[NoticeSource] = (),
        leaving: Callable[[], float | None] = lambda: None,
        again: Callable[[int], Link] | None = None,
        moves: str = "",
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._link, self._launcher, self._logs = link, launcher, logs
        self._notices, self._leaving = notices, leaving
        self._workers: dict[int, Bootstrap] = {}
        self._key_of: dict[Bootstrap, int] = {}
        self._pids: dict[int, int] = {}
        self._unreported: dict[int, tuple[Bootstrap, WorkerEnded]] = {}  # ends that were sent to no controller
        self._files = PendingExits(logs, notify)
        self._again, self._moves, self._notify = again, moves, logged(__name__, notify)
        self._received_at = time.monotonic()
        self._next_beat = 0.0
        self._go_by: float | None = None
        self._goes_why = ""

    def serve(self) -> str:
        """Serve until the end, and return why it ended: "" if the controller said so, else why the controller is gone.

        No worker is left then.
        """
        try:
            while True:
                why = self._hold()
                if not why or not self._find_next(why):
                    return why
        finally:
            self._end_all()
            self._files.close()
            self._link.socket.close()

    def _hold(self) -> str:
        """Serve this controller. Return why it is gone; "" if it needs this agent no more."""
        try:
            self._files.use(self._link.socket.getpeername()[0], self._link.welcome.files_port, self._link.token)
            for line in self._link.early:
                if self._obey(line):
                    return ""
            while True:
                if self._serve_once() or self._gone():
                    return ""
        except (OSError, ValueError, ProtocolError) as error:
            LOG.warning("the connection to the controller ended: %s", error)
            return str(error) or type(error).__name__

    def _find_next(self, why: str) -> bool:
        """Keep the workers and look for the next controller, because this one is gone (``why``).

        If none comes in time, the workers end by themselves. If this machine will be taken away, they have until then:
        no worker can leave its run without a controller.
        """
        self._link.socket.close()
        grace_s = self._link.welcome.grace_s
        if self._again is not None and grace_s:
            self._notify(f"the controller is gone ({why}): looking for the next one for up to {grace_s:g} s")
        until = time.monotonic() + grace_s
        while self._again is not None and self._may_stay(until):
            self._look()
            try:
                self._link = self._again(len(self._workers) + len(self._unreported))
                self._report_all()
            except (OSError, UserError) as error:
                LOG.debug("no controller yet: %s", error)
                time.sleep(AGAIN_S)
            else:
                self._received_at, self._next_beat = time.monotonic(), 0.0
                self._notify("serving the next controller")
                return True
        until += LAST_STEP_S if grace_s else 0.0
        while self._workers and self._may_stay(until):
            self._look()
            time.sleep(AGAIN_S)
        return False

    def _may_stay(self, until: float) -> bool:
        """Whether there is time left without a controller: ``until`` then, or until this machine is taken away."""
        if self._go_by is None and (notice := self._notice()) is not None:
            self._goes(notice)
        if self._go_by is None:
            return time.monotonic() < until
        return bool(self._workers or self._unreported) and time.monotonic() < min(until, self._go_by)

    def _report_all(self) -> None:
        """Report all workers, their ends and a notice about this machine to a new controller."""
        for key, worker in self._workers.items():
            self._send(WorkerKept(key, _public(worker), self._pids.get(key)))
        for key, (worker, end) in list(self._unreported.items()):
            self._send(WorkerKept(key, _public(worker), None))
            self._send(end)
            del self._unreported[key]
        if self._go_by is not None:
            self._send(PreemptionNoticed(max(0.0, self._go_by - time.monotonic()), self._goes_why))

    def _look(self) -> None:
        """Note the events of workers while the agent has no controller."""
        for event in self._launcher.poll():
            if event.bootstrap in self._key_of:
                self._note(event)
                if isinstance(event, ProcessEnded):  # if no controller comes, nothing else reports it
                    how = f"code {event.code}" if event.code is not None else event.why
                    self._notify(f"worker {event.bootstrap.worker} has ended without a controller: {how}")

    @property
    def leaves(self) -> bool:
        """Whether this machine will be taken away."""
        return self._go_by is not None

    def _serve_once(self) -> bool:
        """Receive and report once. Return whether the controller needs this agent no more."""
        poll = select.poll()
        poll.register(self._link.socket, select.POLLIN)
        descriptor = self._launcher.fileno()
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
        wait_s = max(0.0, min(self._next_beat - time.monotonic(), self._files.look_s, self._link.welcome.beat_s))
        ready = [number for number, _ in poll.poll(wait_s * 1000)]
        for event in self._launcher.poll():
            if not self._files.holds(event):
                self._report(event)
        for event in self._files.released():
            self._report(event)
        if self._link.socket.fileno() in ready:
            data = self._link.socket.recv(READ_BYTES)
            if not data:
                raise ConnectionError("the controller closed the connection")
            self._received_at = time.monotonic()
            for line in self._link.lines.feed(data):
                if self._obey(line):
                    return True
        if time.monotonic() > self._received_at + self._link.welcome.silence_s:
            raise ConnectionError(f"the controller has been silent for {self._link.welcome.silence_s:g} s")
        if time.monotonic() >= self._next_beat:
            self._beat()
        return False

    def _obey(self, line: bytes) -> bool:
        match messages.FROM_CONTROLLER.decode(line):
            case StartWorker() as order:
                self._start(order)
            case EndWorker(key=key, why=why) if key in self._workers:
                self._launcher.end([self._workers[key]], why)
            case HostFactsRequest() as request:
                self._send(facts(request))
            case FolderProbeRequest() as request:
                self._send(probe_folder(request))
            case TakeFiles(port=port):
                self._files.use(self._link.socket.getpeername()[0], port, self._link.token)
            case AgentBye():
                return True
        return False

    def _start(self, order: StartWorker) -> None:
        bootstrap, run = order.bootstrap, run_of(order.bootstrap)
        token, spool = derived(self._link.token, bootstrap.token), self._files.spool_of(run)
        worker = replace(bootstrap, token=token, spool=spool, moves=self._moves)
        self._workers[order.key], self._key_of[worker] = worker, order.key
        shared = Path(order.logs)
        logs = self._logs / shared.parent.name if worker.spool or not shared.parent.is_dir() else shared
        LOG.info("starting worker %d", worker.worker)
        try:
            self._files.begin(run)
            self._launcher.start([worker], Needs(order.device, logs))
        except (UserError, OSError) as error:
            for event in self._launcher.poll():
                self._report(event)
            if order.key in self._workers:
                self._report(ProcessEnded(worker, None, "", f"it could not be started: {error}"))

    def _report(self, event: ProcessEvent) -> None:
        if event.bootstrap not in self._key_of:
            return
        key = self._note(event)
        match event:
            case ProcessStarted(pid=pid):
                LOG.info("worker %d runs as process %d", event.bootstrap.worker, pid)
                self._send(WorkerStarted(key, pid))
            case ProcessEnded(code=code, why=why):
                LOG.info("worker %d has ended: code %s %s", event.bootstrap.worker, code, why)
                self._send(self._unreported[key][1])
                del self._unreported[key]

    def _note(self, event: ProcessEvent) -> int:
        """Note ``event`` of a worker of this agent. Return the worker's key."""
        key = self._key_of[event.bootstrap]
        match event:
            case ProcessStarted(pid=pid):
                self._pids[key] = pid
            case ProcessEnded(bootstrap=worker, code=code, log=log, why=why):
                end = WorkerEnded(key, code, log[-TAIL_CHARACTERS:], why[-TAIL_CHARACTERS:])
                del self._workers[key], self._key_of[worker]
                self._pids.pop(key, None)
                self._unreported[key] = worker, end
                if not any(other.token == worker.token for other in self._workers.values()):
                    self._files.leave(run_of(worker))
        return key

    def _beat(self) -> None:
        self._next_beat = time.monotonic() + self._link.welcome.beat_s
        sights = []
        for key, worker in self._workers.items():
            if (vitals := self._launcher.vitals(worker)) is not None:
                line = self._launcher.last_line(worker)[:200]
                sights.append(WorkerSeen(key, vitals.state, vitals.cpu_s, line))
        self._send(AgentBeat(sights))

    def _gone(self) -> bool:
        """Whether this machine will be taken away and either has no worker left or has no time left."""
        if self._go_by is None and (notice := self._notice()) is not None:
            self._goes(notice)
            self._send(notice)
        return self._go_by is not None and (not self._workers or time.monotonic() >= self._go_by)

    def _goes(self, notice: PreemptionNoticed) -> None:
        LOG.warning("this machine will be taken away in %.0f s: %s", notice.seconds, notice.why)
        self._go_by, self._goes_why = time.monotonic() + notice.seconds, notice.why

    def _notice(self) -> PreemptionNoticed | None:
        if (seconds := self._leaving()) is not None:
            return PreemptionNoticed(seconds, "its agent was asked to end")
        for source in self._notices:
            if (notice := source.poll()) is not None:
                return PreemptionNoticed(notice.seconds, notice.why)
        return None

    def _send(self, message: messages.AgentMessage) -> None:
        self._link.socket.sendall(messages.FROM_AGENT.encode(message))

    def _end_all(self) -> None:
        """End all workers, and report each end to the controller if it still listens."""
        self._launcher.end(list(self._key_of), "its agent ended")
        held: list[ProcessEvent] = list(self._files.given_up())
        while self._workers:
            descriptor = self._launcher.fileno()
            select.select([descriptor] if descriptor is not None else [], [], [], 0.05)
            for event in (*held, *self._launcher.poll()):
                try:
                    self._report(event)
                except OSError:  # the controller is gone; its workers have ended nevertheless
                    continue


def _public(worker: Bootstrap) -> Bootstrap:
    """``worker`` as it crosses a network: the salt in place of its token, and no paths of this machine."""
    return replace(worker, token=run_of(worker), spool="", moves="")


def hello_of(
    versions: Mapping[str, str], host: str, workers: int, host_kind: str = ON_DEMAND, label: str = ""
) -> AgentHello:
    """Return an agent's first message.

    Raises:
        UserError: For a value that the message may not have.
    """
    try:
        return AgentHello(dict(versions), host, workers, host_kind, label=label)  # type: ignore[arg-type]  # it checks
    except ValueError:
        rule = f"an agent has a host's name, room for 1 to 65536 workers, and is {' or '.join(KINDS)}"
        raise UserError(rule, f"{host!r}, {workers}, {host_kind}", "such as --workers 4 --kind spot") from None
