"""The agent of one machine: it owns the workers there and executes the requests of its controller.

Workers are forked from a warm server, as on a controller's own machine. All of them end with the agent, however it
ends. An agent knows no runs: each worker finds the coordinator of its run by itself. When its controller dies, an
agent may keep its workers for a while and serve the next controller at the same address.
A worker that has ended well may have written the last checkpoint of its run. ``PendingExits`` reports its end only once
the files have arrived, because whoever hears of the end goes on from that checkpoint.
"""

from __future__ import annotations

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
from elastune.elastic.wire.handshake import SALT_DIGITS, ServerBusy, derived, enter_at
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

# A worker that ended well may have written the run's last checkpoint. So the agent reports a worker's end only after
# the controller has received all of the worker's files.

WELL = (0, ABANDONED_CODE)  # how a worker ends that has written what it had to
HELD_LOOK_S = 0.05
STALLED_S = 30.0  # nothing has been moved for so long: nobody waits any more


def run_of(worker: Bootstrap) -> str:
    """The run of ``worker``, by the salt of its token."""
    return worker.token[:SALT_DIGITS]


class PendingExits:
    """Of the workers of one agent. ``folder``: where their files may lie; nothing is made there before it is needed.

    ``notify``: is called with a line that whoever looks after this machine should see.
    """

    def __init__(self, folder: Path, notify: Callable[[str], None]) -> None:
        self._folder, self._notify = folder, notify
        self._mover: FileTransferClient | None = None
        self._used = False
        self._held: list[tuple[float, ProcessEnded]] = []
        self._closing = False

    def use(self, host: str, port: int, token: str) -> None:
        """The controller takes files at this ``port``; 0: its workers write into their runs' folders."""
        self._used = port > 0
        if not self._used:
            return
        if self._mover is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._mover = FileTransferClient(Path(tempfile.mkdtemp(prefix="files-", dir=self._folder)), self._notify)
        self._mover.use(f"{host}:{port}", token)

    def spool_of(self, run: str) -> str:
        """The folder by which new workers of ``run`` pass files on; "": they write into the run's own."""
        return str(self._mover.spool_of(run)) if self._used and self._mover is not None else ""

    def begin(self, run: str) -> None:
        """Before a worker of ``run`` begins here. Raises ``OSError``."""
        if self._used and self._mover is not None:
            self._mover.begin(run)

    def leave(self, run: str) -> None:
        """No worker of ``run`` is left here."""
        if self._mover is not None:
            self._mover.leave(run)

    @property
    def look_s(self) -> float:
        """After how long ``released`` is to be asked."""
        return HELD_LOOK_S if self._held else math.inf

    def holds(self, event: ProcessEvent) -> bool:
        """Whether ``event`` is an end that must not be reported yet."""
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
        """Move no more. Idempotent."""
        if self._mover is not None:
            self._mover.close()

    def _waits(self, end: ProcessEnded, since: float) -> bool:
        if self._mover is None or self._closing or not self._mover.pending(run_of(end.bootstrap)):
            return False
        return time.monotonic() < max(since, self._mover.moved_at) + STALLED_S


# Workers are forked from a warm server, and all of them end with the agent, however the agent ends. An agent knows no
# runs: each worker connects to its run's coordinator itself. After the death of its controller, an agent may keep its
# workers for a while, and serve the next controller at the same address.

SEND_LIMIT_S = 10.0
GREETING_LIMIT_S = 10.0
TAIL_CHARACTERS = messages.TEXT_LIMIT // 2
AGAIN_S = 0.05  # between two looks for the next controller
LAST_STEP_S = (
    330.0  # how long workers that nobody has come for may take to end by themselves: a little more than theirs
)


@dataclass(frozen=True)
class Link:
    """A connection to a controller that has let this agent in by ``token``. ``early``: what it has said already."""

    socket: socket.socket
    token: str = field(repr=False)
    lines: Lines
    early: list[bytes]
    welcome: AgentWelcome


def join(address: str, token: str, hello: AgentHello, limit_s: float) -> Link:
    """Go to the controller at ``address`` ("host:port"), which may start up to ``limit_s`` later.

    Raises ``UserError`` where it does not let this agent in, ``OSError`` where nobody answers or too many have come.
    """
    lines, words = Lines(), messages.encode(hello)
    try:
        entered = enter_at(address, lines, token, messages.PURPOSE, words, GREETING_LIMIT_S, dial_s=limit_s)
    except (Unreachable, ServerBusy):
        raise
    except (OSError, ProtocolError) as error:
        raise _kept_out(f"{address}: {error}") from None
    connection = entered.connection
    try:
        answer = messages.decode_from_controller(entered.line)
    except ValueError:
        connection.close()
        raise _kept_out(f"{address}: it said what is no message") from None
    if isinstance(answer, AgentRefused):
        connection.close()
        raise UserError("an agent must fit its controller", answer.why, "install the same versions on all machines")
    if not isinstance(answer, AgentWelcome):
        connection.close()
        raise UserError("a controller must let its agents in", f"{address} said {answer.kind!r}", "see the address")
    connection.settimeout(SEND_LIMIT_S)
    return Link(connection, token, lines, entered.early, answer)


def _kept_out(why: str) -> UserError:
    fix = "give the agent the controller's own token file, and the address that it listens on for agents"
    return UserError("a controller must let its agents in", why, fix)


class Agent:
    """Serves one controller over ``link`` with workers of ``launcher``.

    ``logs``: a folder for logs of runs whose own folder is not on this machine, and for their checkpoints until they
    are with the controller. ``leaving``: whether this machine is to
    be given up, and in how many seconds: asked again and again, as ``notices`` are. ``again``: goes to the controller
    after this one with so many workers that were kept, as ``join`` does; ``moves``: the file by which workers find it,
    too (``ControllerLocator``). ``notify``: is called, from any thread, with a
    line that whoever looks after this machine should see.
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
        self._unreported: dict[int, tuple[Bootstrap, WorkerEnded]] = {}  # ends that no controller has been sent
        self._files = PendingExits(logs, notify)
        self._again, self._moves, self._notify = again, moves, notify
        self._received_at = time.monotonic()
        self._next_beat = 0.0
        self._go_by: float | None = None
        self._goes_why = ""

    def serve(self) -> str:
        """Until the controller needs this agent no more ("") or is gone (why). Its workers have ended then."""
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
        """Serve this controller: why it is gone; "" where nothing more is wanted here."""
        try:
            self._files.use(self._link.socket.getpeername()[0], self._link.welcome.files_port, self._link.token)
            for line in self._link.early:
                if self._heed(line):
                    return ""
            while True:
                if self._round() or self._gone():
                    return ""
        except (OSError, ValueError, ProtocolError) as error:
            return str(error) or type(error).__name__

    def _find_next(self, why: str) -> bool:
        """This controller is gone (``why``): keep the workers and find the next one; where none comes in time they end
        by themselves.

        Where this machine is to go they have until then: none of them can leave its run without a controller.
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
                self._report_workers()
            except (OSError, UserError):
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
        """Whether there is time left, without a controller, ``until`` then or until this machine goes."""
        if self._go_by is None and (notice := self._notice()) is not None:
            self._goes(notice)
        if self._go_by is None:
            return time.monotonic() < until
        return bool(self._workers or self._unreported) and time.monotonic() < min(until, self._go_by)

    def _report_workers(self) -> None:
        """Tell a controller that knows nothing of them which workers are here, which have ended, and what is known of
        this machine's own end."""
        for key, worker in self._workers.items():
            self._send(WorkerKept(key, _public(worker), self._pids.get(key)))
        for key, (worker, end) in list(self._unreported.items()):
            self._send(WorkerKept(key, _public(worker), None))
            self._send(end)
            del self._unreported[key]
        if self._go_by is not None:
            self._send(PreemptionNoticed(max(0.0, self._go_by - time.monotonic()), self._goes_why))

    def _look(self) -> None:
        """Note the events of workers while there is no controller."""
        for event in self._launcher.poll():
            if event.bootstrap in self._key_of:
                self._note(event)
                if isinstance(event, ProcessEnded):  # should nobody come, nobody else would ever say so
                    how = f"code {event.code}" if event.code is not None else event.why
                    self._notify(f"worker {event.bootstrap.worker} has ended without a controller: {how}")

    @property
    def leaves(self) -> bool:
        """Whether this machine is given up."""
        return self._go_by is not None

    def _round(self) -> bool:
        """Hear and tell; True at the controller's farewell."""
        poll = select.poll()
        poll.register(self._link.socket, select.POLLIN)
        descriptor = self._launcher.fileno()
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
        wait_s = max(0.0, min(self._next_beat - time.monotonic(), self._files.look_s, self._link.welcome.beat_s))
        ready = [number for number, _ in poll.poll(wait_s * 1000)]
        for event in self._launcher.poll():
            if not self._files.holds(event):
                self._report_event(event)
        for event in self._files.released():
            self._report_event(event)
        if self._link.socket.fileno() in ready:
            data = self._link.socket.recv(READ_BYTES)
            if not data:
                raise ConnectionError("the controller closed the connection")
            self._received_at = time.monotonic()
            for line in self._link.lines.feed(data):
                if self._heed(line):
                    return True
        if time.monotonic() > self._received_at + self._link.welcome.silence_s:
            raise ConnectionError(f"the controller has been silent for {self._link.welcome.silence_s:g} s")
        if time.monotonic() >= self._next_beat:
            self._beat()
        return False

    def _heed(self, line: bytes) -> bool:
        match messages.decode_from_controller(line):
            case StartWorker() as wanted:
                self._start(wanted)
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

    def _start(self, wanted: StartWorker) -> None:
        bootstrap, run = wanted.bootstrap, run_of(wanted.bootstrap)
        token, spool = derived(self._link.token, bootstrap.token), self._files.spool_of(run)
        worker = replace(bootstrap, token=token, spool=spool, moves=self._moves)
        self._workers[wanted.key], self._key_of[worker] = worker, wanted.key
        shared = Path(wanted.logs)
        logs = self._logs / shared.parent.name if worker.spool or not shared.parent.is_dir() else shared
        try:
            self._files.begin(run)
            self._launcher.start([worker], Needs(wanted.device, logs))
        except (UserError, OSError) as error:
            for event in self._launcher.poll():
                self._report_event(event)
            if wanted.key in self._workers:
                self._report_event(ProcessEnded(worker, None, "", f"it could not be started: {error}"))

    def _report_event(self, event: ProcessEvent) -> None:
        if event.bootstrap not in self._key_of:
            return
        key = self._note(event)
        match event:
            case ProcessStarted(pid=pid):
                self._send(WorkerStarted(key, pid))
            case ProcessEnded():
                self._send(self._unreported[key][1])
                del self._unreported[key]

    def _note(self, event: ProcessEvent) -> int:
        """Keep ``event``, of a worker here; the worker's key."""
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
        """Whether this machine is given up, and nothing is left on it, or it is time."""
        if self._go_by is None and (notice := self._notice()) is not None:
            self._goes(notice)
            self._send(notice)
        return self._go_by is not None and (not self._workers or time.monotonic() >= self._go_by)

    def _goes(self, notice: PreemptionNoticed) -> None:
        self._go_by, self._goes_why = time.monotonic() + notice.seconds, notice.why

    def _notice(self) -> PreemptionNoticed | None:
        if (seconds := self._leaving()) is not None:
            return PreemptionNoticed(seconds, "its agent was asked to end")
        for source in self._notices:
            if (notice := source.poll()) is not None:
                return PreemptionNoticed(notice.seconds, notice.why)
        return None

    def _send(self, message: messages.AgentMessage) -> None:
        self._link.socket.sendall(messages.encode(message))

    def _end_all(self) -> None:
        """None is left here, and the controller, where it still listens, has heard how each ended."""
        self._launcher.end(list(self._key_of), "its agent ended")
        held: list[ProcessEvent] = list(self._files.given_up())
        while self._workers:
            descriptor = self._launcher.fileno()
            select.select([descriptor] if descriptor is not None else [], [], [], 0.05)
            for event in (*held, *self._launcher.poll()):
                try:
                    self._report_event(event)
                except OSError:  # the controller has gone: its workers are forgotten all the same
                    continue


def _public(worker: Bootstrap) -> Bootstrap:
    """As it crosses a network: with the salt of its token alone."""
    return replace(worker, token=run_of(worker), spool="", moves="")


def hello_of(
    versions: Mapping[str, str], host: str, workers: int, host_kind: str = ON_DEMAND, label: str = ""
) -> AgentHello:
    """What an agent begins with. Raises ``UserError`` for what no agent may say."""
    try:
        return AgentHello(dict(versions), host, workers, host_kind, label=label)  # type: ignore[arg-type]  # it checks
    except ValueError:
        rule = f"an agent has a host's name, room for 1 to 65536 workers, and is {' or '.join(KINDS)}"
        raise UserError(rule, f"{host!r}, {workers}, {host_kind}", "such as --workers 4 --kind spot") from None
