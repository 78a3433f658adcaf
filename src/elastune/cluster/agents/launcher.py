"""The launcher of workers on other machines: it listens for agents, and tells them what to start and to end.

Agents come and go at any time. A new one is room for its workers; a lost one is the loss of all that it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
from elastune.cluster.agents.packing import pack
from elastune.cluster.launcher import (
    Bootstrap,
    Launcher,
    Needs,
    ProcessEnded,
    ProcessEvent,
    ProcessNoticed,
    ProcessStarted,
)
from elastune.core.errors import UserError
from elastune.elastic.coordinator.connections import Closed, Connection, ConnectionServer, Greeted, Heard
from elastune.elastic.coordinator.liveness import Vitals
from elastune.elastic.protocol.transport import WakeupPipe

BEAT_S, SILENCE_S = 1.0, 15.0
CLOSE_LIMIT_S = 10.0
SAME = ("elastune", "torch")
"""What must be of one version everywhere: the protocol is the first's, the bits are the second's."""


@dataclass
class AgentHost:
    """One that was let in. ``workers``: those that it has, by key; ``notice``: it will go, and gets no more."""

    host: str
    room: int
    connection: Connection
    heard_at: float
    workers: dict[int, Bootstrap] = field(default_factory=dict)
    sights: dict[int, WorkerSeen] = field(default_factory=dict)
    notice: HostNoticed | None = None

    @property
    def free(self) -> int:
        """The room that is left."""
        return 0 if self.notice else self.room - len(self.workers)


class AgentLauncher(Launcher):
    """Room for as many workers as the agents that have come to ``host``:``port`` have.

    ``token``: what lets agents in. ``versions``: this side's, of which an agent's must be the same. ``tell``: is called
    with one line whenever an agent comes or goes. Raises ``UserError`` where it cannot listen.
    """

    own_environment = True

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        *,
        versions: Mapping[str, str],
        silence_s: float = SILENCE_S,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._bell = WakeupPipe()
        try:
            self._hub = ConnectionServer(
                host, token, self._bell, port=port, greeting=AgentHello, decode=messages.decode_said
            )
        except OSError as error:
            self._bell.close()
            rule = "the controller must be able to listen for agents"
            raise UserError(rule, f"{host}:{port}: {error.strerror}", "choose another address or port") from None
        self.port = self._hub.port
        self._versions = {name: versions[name] for name in SAME}
        self._silence_s = silence_s
        self._say = tell
        self._agents: dict[int, AgentHost] = {}  # by their numbers, in the order in which they came
        self._number_of: dict[Connection, int] = {}
        self._place: dict[Bootstrap, tuple[int, int]] = {}  # agent and key
        self._events: list[ProcessEvent] = []
        self._numbers = self._keys = 0
        self._next_beat = 0.0
        self._closed = False

    @property
    def capacity(self) -> int:
        return sum(agent.room for agent in self._agents.values() if not agent.notice)

    @property
    def free(self) -> int:
        return sum(agent.free for agent in self._agents.values())

    @property
    def hosts(self) -> list[str]:
        """The names of the agents' machines."""
        return [agent.host for agent in self._agents.values()]

    def fileno(self) -> int | None:
        return None if self._closed else self._hub.fileno()

    def start(self, workers: Sequence[Bootstrap], needs: Needs) -> None:
        if len(workers) > self.free:
            raise UserError("a worker must find room at an agent", f"{self.free} free", "start more agents")
        runs = {worker.coordinator for worker in workers}
        own = {n: sum(b.coordinator in runs for b in a.workers.values()) for n, a in self._agents.items()}
        places = pack({number: agent.free for number, agent in self._agents.items()}, len(workers), own)
        for worker, number in zip(workers, places, strict=True):
            self._keys += 1
            self._place[worker] = number, self._keys
            self._agents[number].workers[self._keys] = worker
            self._tell(number, StartWorker(self._keys, worker, needs.device, str(needs.logs)))

    def end(self, workers: Sequence[Bootstrap], why: str = "") -> None:
        for worker in workers:
            if worker in self._place:
                number, key = self._place[worker]
                self._tell(number, EndWorker(key, why))

    def poll(self) -> list[ProcessEvent]:
        self._look(0.0)
        events, self._events = self._events, []
        return events

    def last_line(self, worker: Bootstrap) -> str:
        sight = self._sight(worker)
        return sight.line if sight is not None else ""

    def vitals(self, worker: Bootstrap) -> Vitals | None:
        sight = self._sight(worker)
        return Vitals(sight.state, sight.cpu_s) if sight is not None else None

    def close(self) -> None:
        """Agents end with everything that they have started; those that do not say so in time are given up."""
        if self._closed:
            return
        for number in self._agents:
            self._tell(number, AgentBye())
        until = time.monotonic() + CLOSE_LIMIT_S
        while self._agents and (left_s := until - time.monotonic()) > 0:
            self._look(left_s)
        for number in list(self._agents):
            self._lose(number, "the cluster was closed")
        self._closed = True
        self._hub.close()
        self._bell.close()

    # -- what agents say ----------------------------------------------------------------------------------------------

    def _look(self, timeout_s: float) -> None:
        if self._closed:
            return
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            for number in self._agents:
                self._tell(number, AgentBeat())
        for event in self._hub.wait(min(timeout_s, BEAT_S)):
            match event:
                case Greeted(connection, hello):
                    self._greet(connection, hello)
                case Heard(connection, message, _) if connection in self._number_of:
                    self._hear(self._number_of[connection], message)
                case Closed(connection, why) if connection in self._number_of:
                    self._lose(self._number_of[connection], why)
        now = time.monotonic()
        for number in [n for n, agent in self._agents.items() if now > agent.heard_at + self._silence_s]:
            connection = self._agents[number].connection
            self._lose(number, f"it has been silent for {self._silence_s:g} s")
            self._hub.end(connection)

    def _greet(self, connection: Connection, hello: AgentHello) -> None:
        theirs = {name: hello.versions.get(name, "none") for name in SAME}
        if theirs != self._versions:
            there, here = (", ".join(f"{name} {v[name]}" for name in SAME) for v in (theirs, self._versions))
            self._hub.send([connection], messages.encode(AgentRefused(f"it has {there}; the controller has {here}")))
            self._hub.end(connection)
            self._say(f"host {hello.host} was refused: it has {there}; here there is {here}")
            return
        self._numbers += 1
        self._agents[self._numbers] = AgentHost(hello.host, hello.workers, connection, time.monotonic())
        self._number_of[connection] = self._numbers
        self._tell(self._numbers, AgentWelcome(BEAT_S, self._silence_s))
        self._say(f"host {hello.host} has come, with room for {hello.workers} workers")

    def _hear(self, number: int, message: messages.Said) -> None:
        agent = self._agents[number]
        agent.heard_at = time.monotonic()
        match message:
            case WorkerStarted(key=key, pid=pid) if key in agent.workers:
                self._events.append(ProcessStarted(agent.workers[key], pid))
            case WorkerEnded(key=key, code=code, log=log, why=why) if key in agent.workers:
                self._finish(agent, key, code, log, why)
            case AgentBeat(sights=sights):
                agent.sights = {sight.key: sight for sight in sights}
            case HostNoticed(seconds=seconds, why=why):
                agent.notice = message
                self._say(f"host {agent.host} will go in {seconds:g} s: {why}")
                told = f"host {agent.host}: {why}"
                self._events += [ProcessNoticed(worker, seconds, told) for worker in agent.workers.values()]

    def _finish(self, agent: AgentHost, key: int, code: int | None, log: str, why: str) -> None:
        worker = agent.workers.pop(key)
        agent.sights.pop(key, None)
        del self._place[worker]
        self._events.append(ProcessEnded(worker, code, log, why))

    def _lose(self, number: int, why: str) -> None:
        agent = self._agents.pop(number)
        del self._number_of[agent.connection]
        for key in list(agent.workers):
            self._finish(agent, key, None, "", f"host {agent.host} was lost: {why}")
        self._say(f"host {agent.host} has gone" + ("" if agent.notice else f": {why}"))

    def _tell(self, number: int, message: messages.Told) -> None:
        self._hub.send([self._agents[number].connection], messages.encode(message))

    def _sight(self, worker: Bootstrap) -> WorkerSeen | None:
        number, key = self._place.get(worker, (0, 0))
        agent = self._agents.get(number)
        return agent.sights.get(key) if agent is not None else None
