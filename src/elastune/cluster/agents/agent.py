"""The agent of one machine: it owns the workers there, and does what its controller says.

Workers are forked from a warm server, as on a controller's own machine; all of them end with the agent, however it
ends. An agent knows no runs: each worker finds its run's coordinator by itself.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastune.cluster.agents import messages
from elastune.cluster.agents.messages import (
    AgentBeat,
    AgentBye,
    AgentHello,
    AgentRefused,
    AgentWelcome,
    EndWorker,
    HostNoticed,
    StartWorker,
    WorkerEnded,
    WorkerSeen,
    WorkerStarted,
)
from elastune.cluster.launcher import Bootstrap, Launcher, Needs, ProcessEnded, ProcessEvent, ProcessStarted
from elastune.cluster.notices import NoticeSource
from elastune.core.errors import UserError
from elastune.elastic.protocol.transport import READ_BYTES, Lines, ProtocolError, dial, first_line

SEND_LIMIT_S = 10.0
GREETING_LIMIT_S = 10.0
TAIL_CHARACTERS = messages.TEXT_LIMIT // 2


@dataclass(frozen=True)
class Link:
    """A connection to a controller that has let this agent in. ``early``: what it has said already."""

    socket: socket.socket
    lines: Lines
    early: list[bytes]
    welcome: AgentWelcome


def join(address: str, hello: AgentHello, limit_s: float) -> Link:
    """Go to the controller at ``address`` ("host:port"), which may start up to ``limit_s`` later.

    Raises ``UserError`` where it does not let this agent in, ``OSError`` where nobody answers.
    """
    connection = dial(address, limit_s)
    lines = Lines()
    try:
        connection.settimeout(SEND_LIMIT_S)
        connection.sendall(messages.encode(hello))
        line, early = first_line(connection, lines, GREETING_LIMIT_S)
        answer = messages.decode_told(line)
    except (OSError, ValueError, ProtocolError):
        connection.close()
        fix = "give the agent the controller's own token file, and the address that it listens on for agents"
        raise UserError("a controller must let its agents in", address, fix) from None
    if isinstance(answer, AgentRefused):
        connection.close()
        raise UserError("an agent must fit its controller", answer.why, "install the same versions on all machines")
    if not isinstance(answer, AgentWelcome):
        connection.close()
        raise UserError("a controller must let its agents in", f"{address} said {answer.kind!r}", "see the address")
    return Link(connection, lines, early, answer)


class Agent:
    """Serves one controller over ``link`` with workers of ``launcher``.

    ``logs``: a folder for logs of runs whose own folder is not on this machine. ``leaving``: whether this machine is to
    be given up, and in how many seconds: asked again and again, as ``notices`` are.
    """

    def __init__(
        self,
        link: Link,
        launcher: Launcher,
        logs: Path,
        *,
        notices: Sequence[NoticeSource] = (),
        leaving: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._link, self._launcher, self._logs = link, launcher, logs
        self._notices, self._leaving = notices, leaving
        self._workers: dict[int, Bootstrap] = {}
        self._key_of: dict[Bootstrap, int] = {}
        self._heard_at = time.monotonic()
        self._next_beat = 0.0
        self._go_by: float | None = None

    def serve(self) -> str:
        """Until the controller needs this agent no more ("") or is gone (why). Its workers have ended then."""
        try:
            for line in self._link.early:
                if self._heed(line):
                    return ""
            while True:
                if self._round() or self._gone():
                    return ""
        except (OSError, ValueError, ProtocolError) as error:
            return str(error) or type(error).__name__
        finally:
            self._end_all()
            self._link.socket.close()

    def _round(self) -> bool:
        """Hear and tell; True at the controller's farewell."""
        poll = select.poll()
        poll.register(self._link.socket, select.POLLIN)
        descriptor = self._launcher.fileno()
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
        wait_s = max(0.0, min(self._next_beat - time.monotonic(), self._link.welcome.beat_s))
        ready = [number for number, _ in poll.poll(wait_s * 1000)]
        for event in self._launcher.poll():
            self._tell_of(event)
        if self._link.socket.fileno() in ready:
            data = self._link.socket.recv(READ_BYTES)
            if not data:
                raise ConnectionError("the controller closed the connection")
            self._heard_at = time.monotonic()
            for line in self._link.lines.feed(data):
                if self._heed(line):
                    return True
        if time.monotonic() > self._heard_at + self._link.welcome.silence_s:
            raise ConnectionError(f"the controller has been silent for {self._link.welcome.silence_s:g} s")
        if time.monotonic() >= self._next_beat:
            self._beat()
        return False

    def _heed(self, line: bytes) -> bool:
        match messages.decode_told(line):
            case StartWorker() as wanted:
                self._start(wanted)
            case EndWorker(key=key, why=why) if key in self._workers:
                self._launcher.end([self._workers[key]], why)
            case AgentBye():
                return True
        return False

    def _start(self, wanted: StartWorker) -> None:
        worker = wanted.bootstrap
        self._workers[wanted.key], self._key_of[worker] = worker, wanted.key
        shared = Path(wanted.logs)
        logs = shared if shared.parent.is_dir() else self._logs / shared.parent.name
        try:
            self._launcher.start([worker], Needs(wanted.device, logs))
        except (UserError, OSError) as error:
            for event in self._launcher.poll():
                self._tell_of(event)
            if wanted.key in self._workers:
                self._forget(wanted.key)
                self._say(WorkerEnded(wanted.key, None, "", f"it could not be started: {error}"))

    def _tell_of(self, event: ProcessEvent) -> None:
        key = self._key_of.get(event.bootstrap)
        if key is None:
            return
        match event:
            case ProcessStarted(pid=pid):
                self._say(WorkerStarted(key, pid))
            case ProcessEnded(code=code, log=log, why=why):
                self._forget(key)
                self._say(WorkerEnded(key, code, log[-TAIL_CHARACTERS:], why[-TAIL_CHARACTERS:]))

    def _forget(self, key: int) -> None:
        del self._key_of[self._workers.pop(key)]

    def _beat(self) -> None:
        self._next_beat = time.monotonic() + self._link.welcome.beat_s
        sights = []
        for key, worker in self._workers.items():
            if (vitals := self._launcher.vitals(worker)) is not None:
                line = self._launcher.last_line(worker)[:200]
                sights.append(WorkerSeen(key, vitals.state, vitals.cpu_s, line))
        self._say(AgentBeat(sights))

    def _gone(self) -> bool:
        """Whether this machine is given up, and nothing is left on it, or it is time."""
        if self._go_by is None and (notice := self._notice()) is not None:
            self._go_by = time.monotonic() + notice.seconds
            self._say(notice)
        return self._go_by is not None and (not self._workers or time.monotonic() >= self._go_by)

    def _notice(self) -> HostNoticed | None:
        if (seconds := self._leaving()) is not None:
            return HostNoticed(seconds, "its agent was asked to end")
        for source in self._notices:
            if (found := source.poll()) is not None:
                return HostNoticed(found.seconds, found.why)
        return None

    def _say(self, message: messages.Said) -> None:
        self._link.socket.sendall(messages.encode(message))

    def _end_all(self) -> None:
        """None is left here, and the controller, where it still listens, has heard how each ended."""
        self._launcher.end(list(self._key_of), "its agent ended")
        while self._workers:
            descriptor = self._launcher.fileno()
            select.select([descriptor] if descriptor is not None else [], [], [], 0.05)
            for event in self._launcher.poll():
                try:
                    self._tell_of(event)
                except OSError:  # the controller has gone: its workers are forgotten all the same
                    continue


def hello_of(token: str, versions: Mapping[str, str], host: str, workers: int) -> AgentHello:
    """What an agent begins with. Raises ``UserError`` for what no agent may say."""
    try:
        return AgentHello(token, dict(versions), host, workers)
    except ValueError:
        rule = "an agent has a host's name and room for 1 to 65536 workers"
        raise UserError(rule, f"{host!r}, {workers}", "such as --workers 4") from None
