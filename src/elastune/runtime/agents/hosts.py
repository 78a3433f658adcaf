"""Hosts as their controller knows them: which may get workers, and how much room each has. No input or output.

A host may get workers if it sees the folder of the run and its workers can reach those of the other hosts. Workers
of one run are packed on few hosts, or spread over many if the run asks for that; spot hosts come first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastune.core.cost import KINDS, ON_DEMAND, SPOT
from elastune.elastic.wire.contact import at_host, derived
from elastune.elastic.wire.server import Connection
from elastune.runtime.agents.host_report import HostReport
from elastune.runtime.agents.messages import (
    AgentHello,
    FolderProbeRequest,
    FolderProbeResult,
    PreemptionNoticed,
    WorkerSeen,
)
from elastune.runtime.launcher import Bootstrap

PROBES = 3


@dataclass
class AgentHost:
    """A host whose agent the controller has admitted: its workers, and whether it may get more.

    Attributes:
        host: The host's name.
        room: The number of workers that it has room for.
        connection: The connection to its agent.
        received_at: When the agent sent its last message.
        workers: Its workers, by key.
        kind: The kind of machine (``core.cost.KINDS``).
        sights: The last state of each worker, by key.
        notice: The notice that the host will be taken away. It gets no more workers then.
        probed_s: When the controller asked for the host's facts.
        report: The host's facts, once they are known.
        unnamed: The number of workers that it kept from an earlier controller and has not named yet.
        label: The name that the process which started the agent uses for it.
        probes: How often the agent was asked to look for the run's folder.
        probe_result: The agent's last answer.
        probes_again: Whether the agent has to look again, because the file may appear late.
        lacks_folder: Whether it does not see the folder.
        mixes: Whether its address is of another kind than those of the other hosts.
        marked: Whether a worker has computed wrong there.
    """

    host: str
    room: int
    connection: Connection
    received_at: float
    workers: dict[int, Bootstrap] = field(default_factory=dict)
    kind: str = ON_DEMAND
    sights: dict[int, WorkerSeen] = field(default_factory=dict)
    notice: PreemptionNoticed | None = None
    probed_s: float | None = None
    report: HostReport | None = None
    unnamed: int = 0
    label: str = ""
    probes: int = 0
    probe_result: FolderProbeResult | None = None
    probes_again: bool = False
    lacks_folder: bool = False
    mixes: bool = False
    marked: bool = False

    @classmethod
    def greeted(cls, hello: AgentHello, connection: Connection, now: float) -> AgentHost:
        """The host of an agent that sent ``hello`` at the time ``now``."""
        kept, label = hello.kept, hello.label
        return cls(hello.host, hello.workers, connection, now, kind=hello.host_kind, unnamed=kept, label=label)

    @property
    def usable(self) -> bool:
        """Whether it may get workers, as far as the controller knows."""
        away = self.notice or self.lacks_folder or self.mixes or self.marked
        return not (away or (self.probes and self.probe_result is None))

    def start_probe(self) -> None:
        """Give it no workers until it has answered."""
        self.probes += 1
        self.probe_result, self.probes_again, self.lacks_folder, self.mixes = None, False, False, False

    def set_probe_result(self, result: FolderProbeResult, others: Collection[int]) -> None:
        """Take in the agent's answer.

        A network file system may show a new file late. So the agent probes several times before it counts as one that
        does not see the folder.

        Args:
            result: The answer.
            others: The versions of the addresses of usable hosts: 4, 6, or 0 for unknown.
        """
        versions = set(others) - {0}
        self.probes_again = result.sees is False and self.probes < PROBES
        if not self.probes_again:
            self.probe_result, self.lacks_folder = result, result.sees is False
            self.mixes = bool(result.ip and versions) and result.ip not in versions

    @property
    def free(self) -> int:
        """The number of workers that it could start now."""
        return max(0, self.room - len(self.workers) - self.unnamed) if self.usable else 0


def as_kept(worker: Bootstrap, host: str, token: str) -> Bootstrap:
    """Return ``worker``, which was started for an earlier controller, as this controller at ``host`` names it.

    The coordinator of its run listens at ``host`` now, too. ``token``: the token of this controller's agents.
    """
    return replace(worker, coordinator=at_host(worker.coordinator, host), token=derived(token, worker.token))


class FolderProbe:
    """Asks agents whether they see the run's folder and how their workers reach others. Until then they get no workers.

    Args:
        agents: All agents, by their numbers.
        ask: Sends a message to one of them.
        notify: Called with a line for the user.
    """

    def __init__(
        self,
        agents: Mapping[int, AgentHost],
        ask: Callable[[int, FolderProbeRequest], None],
        notify: Callable[[str], None],
    ) -> None:
        self._agents, self._ask, self._notify = agents, ask, notify
        self._request: FolderProbeRequest | None = None
        self._without_folder: list[str] = []

    def begin(self, path: str, text: str) -> None:
        """Ask all agents, present and later, whether the file ``path`` ("": none) holds ``text``."""
        self._request = FolderProbeRequest(path, text)
        for number, agent in self._agents.items():
            agent.probes = 0
            self.greet(number)

    def greet(self, number: int) -> None:
        """Ask this agent, once ``begin`` was called."""
        if self._request is not None:
            self._agents[number].start_probe()
            self._ask(number, self._request)

    def again(self) -> None:
        """Ask the agents again that may see the file by now."""
        for number in [number for number, agent in self._agents.items() if agent.probes_again]:
            self.greet(number)

    def record_answer(self, agent: AgentHost, result: FolderProbeResult) -> None:
        """Take in the answer of ``agent``. Ignore it if the agent was not asked."""
        if not agent.probes:
            return
        others = {
            other.probe_result.ip for other in self._agents.values() if other.usable and other.probe_result is not None
        }
        agent.set_probe_result(result, others)
        if agent.mixes:
            has = f"its interface has IPv{result.ip}, those of the other hosts have not"
            self._notify(f"host {agent.host} gets no workers: {has}; choose another one there by --interface")
        elif agent.lacks_folder:
            self._without_folder.append(agent.host)

    def hosts_without_folder(self) -> list[str]:
        """The hosts that do not see the file, since the last call."""
        hosts, self._without_folder = self._without_folder, []
        return hosts


def pack(free: Mapping[int, int], count: int, workers_of: Mapping[int, int] | None = None) -> list[int]:
    """Return the agent of each of ``count`` workers, host by host, on as few hosts as possible.

    Agents that already have workers of the run come first; then the smallest that takes all others, else the largest.

    Args:
        free: The room of each agent.
        count: The number of workers.
        workers_of: The number of the run's workers that each agent has.

    Raises:
        ValueError: If the room does not suffice.
    """
    if count > sum(free.values()):
        raise ValueError(f"{count} workers, room for {sum(free.values())}")
    left = {agent: room for agent, room in free.items() if room > 0}
    chosen: list[int] = []
    while len(chosen) < count:
        rest = count - len(chosen)
        first = {agent: room for agent, room in left.items() if workers_of and workers_of.get(agent)} or left
        enough = [agent for agent in first if first[agent] >= rest]
        agent = min(enough, key=lambda agent: first[agent]) if enough else max(first, key=lambda agent: first[agent])
        chosen += [agent] * min(rest, left.pop(agent))
    return chosen


def spread(free: Mapping[int, int], count: int) -> list[int]:
    """Return the agent of each of ``count`` workers, host by host, evenly on as many hosts as possible.

    ``free``: the room of each agent. Raises ``ValueError`` if it does not suffice.
    """
    if count > sum(free.values()):
        raise ValueError(f"{count} workers, room for {sum(free.values())}")
    taken = dict.fromkeys(free, 0)
    for _ in range(count):
        taken[min((agent for agent in free if free[agent] > taken[agent]), key=lambda agent: taken[agent])] += 1
    return [agent for agent, workers in taken.items() for _ in range(workers)]


class AgentRoom:
    """The room of all agents, and which agent gets a worker.

    A change of an agent or of its workers must be followed by a call of ``changed``. ``agents``: by their numbers.
    """

    def __init__(self, agents: Mapping[int, AgentHost]) -> None:
        self._agents = agents
        self._free_now: int | None = None  # None after a change
        self._most_on_demand: int | None = None
        self._leaving: set[Bootstrap] = set()  # on-demand workers that were asked to leave

    def changed(self) -> None:
        """Note that agents or their workers have changed."""
        self._free_now = None

    def ended(self, worker: Bootstrap) -> None:
        """Note that ``worker`` needs no more room."""
        self._leaving.discard(worker)

    @property
    def by_kind(self) -> dict[str, int]:
        """The room of hosts that stay, used or free, by kind of host."""
        staying = [agent for agent in self._agents.values() if agent.usable]
        return {kind: sum(agent.room for agent in staying if agent.kind == kind) for kind in KINDS}

    @property
    def by_host(self) -> tuple[int, ...]:
        """The room of each host that stays, used or free, the largest first."""
        rooms: dict[str, int] = {}
        for agent in self._agents.values():
            if agent.usable:
                rooms[agent.host] = rooms.get(agent.host, 0) + agent.room
        return tuple(sorted(rooms.values(), reverse=True))

    @property
    def free(self) -> int:
        """The number of workers that could be started now."""
        if self._free_now is None:
            self._free_now = sum(self._free().values())
        return self._free_now

    @property
    def on_demand(self) -> int:
        """The number of workers on on-demand hosts that are to stay."""
        return len(self._on_demand())

    def bound_on_demand(self, most: int | None) -> list[Bootstrap]:
        """Allow at most so many workers on on-demand hosts; None: as many as they have room for.

        Returns:
            The workers beyond that number, which are to leave.
        """
        self._most_on_demand = most
        self.changed()
        surplus = [] if most is None else self._on_demand()[most:]
        self._leaving.update(surplus)
        return surplus

    def places(self, workers: Sequence[Bootstrap], *, apart: bool) -> list[int]:
        """Return the agent of each of ``workers``, for which the room must suffice. Spot hosts come first.

        Workers get hosts that have workers of the same run or, if ``apart``, as many hosts as possible.
        """
        if apart:
            return spread(self._free(), len(workers))
        runs = {worker.coordinator for worker in workers}
        workers_of = {n: sum(b.coordinator in runs for b in a.workers.values()) for n, a in self._agents.items()}
        spot = self._free([SPOT])
        cheap = min(len(workers), sum(spot.values()))
        return pack(spot, cheap, workers_of) + pack(self._free([ON_DEMAND]), len(workers) - cheap, workers_of)

    def _on_demand(self) -> list[Bootstrap]:
        """The workers on on-demand hosts that are to stay, the oldest first."""
        hosts = (agent for agent in self._agents.values() if agent.kind == ON_DEMAND)
        keyed = dict(pair for agent in hosts for pair in agent.workers.items())
        return [keyed[key] for key in sorted(keyed) if keyed[key] not in self._leaving]

    def _free(self, kinds: Sequence[str] = KINDS) -> dict[int, int]:
        """The free room of each agent whose host is of these kinds."""
        free = {n: agent.free for n, agent in self._agents.items() if agent.kind in kinds}
        if self._most_on_demand is None:
            return free
        left = max(0, self._most_on_demand - self.on_demand)
        for number in free:
            if self._agents[number].kind == ON_DEMAND:
                free[number] = min(free[number], left)
                left -= free[number]
        return free
