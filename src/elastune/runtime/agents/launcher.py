"""The launcher of workers on other machines: it listens for agents and sends them what to start and to end.

Agents come and go at any time. A new agent is room for its workers; a lost agent is the loss of all its workers.
A command that has the token but does not see the folder of a run asks the same listener (``find_run``). The answer
is the address of the run's coordinator and the salt of its token. The token itself does not cross the network.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from elastune.core.errors import UserError
from elastune.core.journal import logs
from elastune.core.journal.records import ConnectionsRefused
from elastune.elastic.coordinator.liveness import ProcessStatus
from elastune.elastic.wire.contact import (
    ANSWER_LIMIT_S,
    ASK_DIAL_LIMIT_S,
    SALT_DIGITS,
    Contact,
    TokenRefused,
    derived,
    enter_at,
)
from elastune.elastic.wire.server import Closed, Connection, ConnectionServer, Greeted, Heard, refusal_line
from elastune.elastic.wire.transport import Lines, ProtocolError, WakeupPipe
from elastune.runtime.agents import messages
from elastune.runtime.agents.host_report import HostReport
from elastune.runtime.agents.hosts import AgentHost, AgentRoom, FolderProbe, as_kept
from elastune.runtime.agents.messages import (
    AgentBeat,
    AgentBye,
    AgentHello,
    AgentRefused,
    AgentWelcome,
    EndWorker,
    FolderProbeResult,
    HostFacts,
    HostFactsRequest,
    PreemptionNoticed,
    RunAsked,
    RunFound,
    StartWorker,
    TakeFiles,
    WorkerEnded,
    WorkerKept,
    WorkerSeen,
    WorkerStarted,
)
from elastune.runtime.launcher import (
    Bootstrap,
    Launcher,
    Needs,
    ProcessEnded,
    ProcessEvent,
    ProcessNoticed,
    ProcessStarted,
)

RULE = "the run must be one of that controller's"
MOST_NAMED = 8


def answer(request: RunAsked, runs: Mapping[Path, Contact]) -> RunFound | AgentRefused:
    """Return the coordinator of the requested run.

    Args:
        request: Names a run's folder, by its whole path or by its last parts if no other folder ends with them.
        runs: All runs, by their folders.
    """
    name = PurePath(request.out)
    matches = [out for out in runs if out == name or (not name.is_absolute() and _ends(out, name))]
    if len(matches) == 1:
        contact = runs[matches[0]]
        return RunFound(contact.address, contact.token[:SALT_DIGITS])
    named = ", ".join(str(out) for out in (matches or list(runs))[:MOST_NAMED]) or "none"
    return AgentRefused(f"{request.out} may be each of {named}" if matches else f"{request.out}; it has {named}")


def _ends(out: PurePath, name: PurePath) -> bool:
    count = len(name.parts)
    return out.parts[len(out.parts) - count :] == name.parts


def find_run(address: str, token: str, out: Path) -> Contact:
    """Ask a controller for the coordinator of one of its runs.

    Args:
        address: The address at which the controller listens for agents ("host:port").
        token: The token of its agents.
        out: The folder of the run.

    Returns:
        The address and token of the run's coordinator.

    Raises:
        UserError: If the controller does not answer, or does not have that run.
    """
    rule, fix = "a controller must answer there", "start it, or see the address and firewalls"
    request = messages.FROM_AGENT.encode(RunAsked(str(out)))
    try:
        entered = enter_at(address, Lines(), token, messages.PURPOSE, request, ANSWER_LIMIT_S, dial_s=ASK_DIAL_LIMIT_S)
        entered.connection.close()
        reply = messages.FROM_CONTROLLER.decode(entered.line)
    except TokenRefused as error:
        fix = "give the controller's own token file, and the address that it listens on for agents"
        raise UserError("a controller must let in who asks it", f"{address}: {error}", fix) from None
    except OSError as error:
        raise UserError(rule, f"{address}: {error.strerror or error}", fix) from None
    except (ValueError, ProtocolError) as error:
        fix = "use the same version of elastune as the controller, and the address that it listens on for agents"
        raise UserError(rule, f"{address}: {error}", fix) from None
    if isinstance(reply, RunFound):
        return Contact(reply.address, derived(token, reply.salt))
    why = reply.why if isinstance(reply, AgentRefused) else f"{address} sent {reply.kind!r}"
    raise UserError(RULE, why, "name the folder of its results as the controller does, or its last part")


BEAT_S, SILENCE_S = 1.0, 15.0
PAUSE_S, LONGEST_PAUSE_S = 5e-5, 0.05  # between two readings of messages: for each agent, and at most
BEAT = messages.FROM_CONTROLLER.encode(AgentBeat())
CLOSE_LIMIT_S = 10.0
LEAVE_S = 60.0  # the time that on-demand workers have to leave when they are no longer needed
SAME = ("elastune", "torch")
"""Packages that must have one version everywhere: the first decides the protocol, the second the bits."""


class AgentLauncher(Launcher):
    """Starts workers on the hosts of agents. It has as much room as all agents that have connected.

    Args:
        host: The address at which it listens for agents.
        port: The port; 0: any free one.
        token: The secret of the agents.
        versions: The versions of the packages in ``SAME`` here. Agents with other versions are refused.
        tls: The certificate that ``token`` names, if it names one.
        silence_s: After a silence of this length an agent counts as lost.
        grace_s: How long agents keep their workers without a controller.
        files_port: The port for files of workers that do not see their run's folder; 0: all workers see it.
        notify: Called with a line whenever an agent comes or goes.

    Raises:
        UserError: If it cannot listen.
    """

    own_environment = True

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        *,
        versions: Mapping[str, str],
        tls: ssl.SSLContext | None = None,
        silence_s: float = SILENCE_S,
        grace_s: float = 0.0,
        files_port: int = 0,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._wakeup = WakeupPipe()
        try:
            self._server = ConnectionServer(
                host,
                token,
                self._wakeup,
                purpose=messages.PURPOSE,
                tls=tls,
                port=port,
                greeting=(AgentHello, RunAsked),
                decode=messages.FROM_AGENT.decode,
            )
        except OSError as error:
            self._wakeup.close()
            rule = "the controller must be able to listen for agents"
            raise UserError(rule, f"{host}:{port}: {error.strerror}", "choose another address or port") from None
        self._host, self.port = host, self._server.port
        self._versions = {name: versions[name] for name in SAME}
        self._silence_s, self._grace_s, self._files_port = silence_s, grace_s, files_port
        self._notify = notify = logs.logged(__name__, notify)
        self._token, self.tls = token, tls
        self._agents: dict[int, AgentHost] = {}  # by their numbers, in the order of their arrival
        self._number_of: dict[Connection, int] = {}
        self._place: dict[Bootstrap, tuple[int, int]] = {}  # agent and key
        self._events: list[ProcessEvent] = []
        self._refused: list[HostReport] = []
        self._numbers = self._keys = 0
        self._next_beat = 0.0
        self._closed = False
        self.room = AgentRoom(self._agents)
        self._folder_probe = FolderProbe(self._agents, self._send, notify)
        self.runs: Callable[[], Mapping[Path, Contact]] = dict
        """Returns the runs that commands may ask for, by their folders."""

    @property
    def capacity(self) -> int:
        return sum(self.room.by_kind.values())

    @property
    def free(self) -> int:
        return self.room.free

    @property
    def pause_s(self) -> float:
        return min(LONGEST_PAUSE_S, PAUSE_S * len(self._agents))

    def bound_on_demand(self, most: int | None, why: str) -> None:
        """Allow at most so many workers on on-demand hosts; None: as many as they have room for. The others leave."""
        surplus = self.room.bound_on_demand(most)
        self._events += [ProcessNoticed(worker, LEAVE_S, why) for worker in surplus]

    @property
    def hosts(self) -> list[str]:
        """The names of the agents' machines."""
        return [agent.host for agent in self._agents.values()]

    @property
    def reports(self) -> list[HostReport]:
        """What the controller knows about the hosts that have connected, including those that it refused."""
        admitted = [agent.report or HostReport(agent.host, agent.room) for agent in self._agents.values()]
        return [*admitted, *self._refused]

    def probe(self, path: str, text: str) -> None:
        """Ask each new agent for the facts of its host, and whether the file ``path`` there holds ``text``."""
        for number, agent in self._agents.items():
            if agent.probed_s is None:
                agent.probed_s = time.time()
                self._send(number, HostFactsRequest(path, text))

    def look_for(self, path: str = "", text: str = "") -> None:
        """Give an agent workers only once it has reported that it sees the file ``path`` ("": none) with ``text``.

        Its workers must also have the same kind of address as the workers of the other agents.
        """
        self.room.changed()
        self._folder_probe.begin(path, text)

    def take_files(self, port: int) -> None:
        """Receive the files of all workers that start from now on at ``port``: no agent needs to see a folder."""
        self._files_port = port
        for number in self._agents:
            self._send(number, TakeFiles(port))
        self.look_for()

    def hosts_without_folder(self) -> list[str]:
        """The hosts that do not see the file of ``look_for``, each once."""
        return self._folder_probe.hosts_without_folder()

    def new_token(self) -> str:
        return derived(self._token)

    def ring(self) -> None:
        """Wake the controller, so that it polls. Any thread may call this."""
        self._wakeup.ring()

    @property
    def agents(self) -> Mapping[int, AgentHost]:
        """All connected agents, by their numbers, in the order of their arrival."""
        return self._agents

    def dismiss(self, number: int) -> None:
        """End an agent if it has no workers."""
        agent = self._agents.get(number)
        if agent is not None and not (agent.workers or agent.unnamed) and agent.notice is None:
            agent.notice = PreemptionNoticed(0.0, "it is not needed")
            self.room.changed()
            self._send(number, AgentBye())

    def fileno(self) -> int | None:
        return None if self._closed else self._server.fileno()

    def start(self, workers: Sequence[Bootstrap], needs: Needs) -> None:
        if len(workers) > self.free:
            raise UserError("a worker must find room at an agent", f"{self.free} free", "start more agents")
        if any(worker.token != derived(self._token, worker.token[:SALT_DIGITS]) for worker in workers):
            raise ValueError("the token of a worker must come from new_token")
        self.room.changed()
        for worker, number in zip(workers, self.room.places(workers, apart=needs.spread), strict=True):
            self._keys += 1
            self._place[worker] = number, self._keys
            self._agents[number].workers[self._keys] = worker
            public = replace(worker, token=worker.token[:SALT_DIGITS])
            self._send(number, StartWorker(self._keys, public, needs.device, str(needs.logs)))

    def end(self, workers: Sequence[Bootstrap], why: str = "") -> None:
        for worker in workers:
            if worker in self._place:
                number, key = self._place[worker]
                self._send(number, EndWorker(key, why))

    def mark(self, worker: Bootstrap) -> None:
        if worker in self._place:
            agent = self._agents[self._place[worker][0]]
            agent.marked = True
            self.room.changed()
            self._notify(f"host {agent.host} gets no more workers: worker {worker.worker} computed wrong there")

    def poll(self) -> list[ProcessEvent]:
        self._read(0.0)
        events, self._events = self._events, []
        return events

    def host(self, worker: Bootstrap) -> str:
        return self._agents[self._place[worker][0]].host if worker in self._place else ""

    def last_line(self, worker: Bootstrap) -> str:
        sight = self._sight(worker)
        return sight.line if sight is not None else ""

    def vitals(self, worker: Bootstrap) -> ProcessStatus | None:
        sight = self._sight(worker)
        return ProcessStatus(sight.state, sight.cpu_s) if sight is not None else None

    def close(self) -> None:
        """End all agents with everything that they have started. Waits for them for a limited time. Idempotent."""
        if self._closed:
            return
        for number in self._agents:
            self._send(number, AgentBye())
        until = time.monotonic() + CLOSE_LIMIT_S
        while self._agents and (left_s := until - time.monotonic()) > 0:
            self._read(left_s)
        for number in list(self._agents):
            self._lose(number, "the cluster was closed")
        self._closed = True
        self._server.close()
        self._wakeup.close()

    # -- messages of agents -------------------------------------------------------------------------------------------

    def _read(self, timeout_s: float) -> None:
        if self._closed:
            return
        if due := time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_S
            self._server.send([agent.connection for agent in self._agents.values()], BEAT)
        for event in self._server.wait(min(timeout_s, BEAT_S)):
            match event:
                case Greeted(connection, RunAsked() as request):
                    self._server.send([connection], messages.FROM_CONTROLLER.encode(answer(request, self.runs())))
                    self._server.end(connection)
                case Greeted(connection, hello):
                    self._greet(connection, hello)
                case Heard(connection, message, _) if connection in self._number_of:
                    self._handle(self._number_of[connection], message)
                case Closed(connection, why) if connection in self._number_of:
                    self._lose(self._number_of[connection], why)
                case ConnectionsRefused():
                    self._notify(refusal_line(event))
        if due:  # after all messages were read, however long this process did not read
            self._lose_silent(time.monotonic())
            self._folder_probe.again()

    def _lose_silent(self, now: float) -> None:
        for number in [n for n, agent in self._agents.items() if now > agent.received_at + self._silence_s]:
            connection = self._agents[number].connection
            self._lose(number, f"it has been silent for {self._silence_s:g} s")
            self._server.end(connection)

    def _greet(self, connection: Connection, hello: AgentHello) -> None:
        versions = {name: hello.versions.get(name, "none") for name in SAME}
        if versions != self._versions:
            its, required = (", ".join(f"{name} {v[name]}" for name in SAME) for v in (versions, self._versions))
            why = f"it has {its}; the controller has {required}"
            self._server.send([connection], messages.FROM_CONTROLLER.encode(AgentRefused(why)))
            self._server.end(connection)
            self._refused.append(HostReport(hello.host, hello.workers, refused=why))
            self._notify(f"host {hello.host} was refused: {why}")
            return
        self._numbers += 1
        self._agents[self._numbers] = AgentHost.greeted(hello, connection, time.monotonic())
        self.room.changed()
        self._number_of[connection] = self._numbers
        self._send(self._numbers, AgentWelcome(BEAT_S, self._silence_s, self._grace_s, self._files_port))
        self._folder_probe.greet(self._numbers)
        has = f", and {hello.kept} that it has kept" if hello.kept else ""
        self._notify(f"host {hello.host} has come, with room for {hello.workers} workers{has}")

    def _handle(self, number: int, message: messages.AgentMessage) -> None:
        agent = self._agents[number]
        agent.received_at = time.monotonic()
        if not isinstance(message, AgentBeat):
            self.room.changed()
        match message:
            case WorkerStarted(key=key, pid=pid) if key in agent.workers:
                self._events.append(ProcessStarted(agent.workers[key], pid))
            case WorkerKept(key=key, bootstrap=worker, pid=pid) if agent.unnamed:
                agent.unnamed -= 1
                self._keys = max(self._keys, key)
                worker = as_kept(worker, self._host, self._token)
                agent.workers[key], self._place[worker] = worker, (number, key)
                self._events += [] if pid is None else [ProcessStarted(worker, pid)]
            case WorkerEnded(key=key, code=code, log=log, why=why) if key in agent.workers:
                self._finish(agent, key, code, log, why)
            case AgentBeat(sights=sights):
                agent.sights = {sight.key: sight for sight in sights}
            case HostFacts() if agent.probed_s is not None:
                now_s, versions = time.time(), ", ".join(f"{name} {self._versions[name]}" for name in SAME)
                skew_s, error_s = message.clock_s - (agent.probed_s + now_s) / 2, (now_s - agent.probed_s) / 2
                agent.report = HostReport(agent.host, agent.room, versions, message, skew_s, error_s)
            case FolderProbeResult():
                self._folder_probe.record_answer(agent, message)
            case PreemptionNoticed(seconds=seconds, why=why):
                agent.notice = message
                self._notify(f"host {agent.host} will go in {seconds:g} s: {why}")
                line = f"host {agent.host}: {why}"
                self._events += [ProcessNoticed(worker, seconds, line) for worker in agent.workers.values()]

    def _finish(self, agent: AgentHost, key: int, code: int | None, log: str, why: str) -> None:
        worker = agent.workers.pop(key)
        agent.sights.pop(key, None)
        self.room.ended(worker)
        del self._place[worker]
        self._events.append(ProcessEnded(worker, code, log, why))

    def _lose(self, number: int, why: str) -> None:
        agent = self._agents.pop(number)
        self.room.changed()
        del self._number_of[agent.connection]
        for key in list(agent.workers):
            self._finish(agent, key, None, "", f"host {agent.host} was lost: {why}")
        self._notify(f"host {agent.host} has gone" + ("" if agent.notice else f": {why}"))

    def _send(self, number: int, message: messages.ControllerMessage) -> None:
        self._server.send([self._agents[number].connection], messages.FROM_CONTROLLER.encode(message))

    def _sight(self, worker: Bootstrap) -> WorkerSeen | None:
        number, key = self._place.get(worker, (0, 0))
        agent = self._agents.get(number)
        return agent.sights.get(key) if agent is not None else None
