"""Hosts as their controller knows them: which may get workers, and how much room each has. No input or output.

A host may get workers if it sees the folder of the run and its workers can reach those of the other hosts. Workers
of one run are packed on few hosts, or spread over many if the run asks for that; spot hosts come first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastune.core.cost import KINDS, ON_DEMAND, SPOT
from elastune.elastic.wire.contact import at_host
from elastune.elastic.wire.handshake import derived
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

LOOKS = 3


@dataclass
class AgentHost:
    """One that was let in. ``workers``: those that it has, by key, and ``unnamed``: so many more that it kept from a
    controller before; ``notice``: it will go, and gets no more; ``kind``: of its machine (``core.cost.KINDS``);
    ``label``: what whoever started it calls it. ``looks``: how often it was asked to look for the run's folder, and
    what it ``probe_result`` last; ``lacks_folder``: it does not see that; ``mixes``: its address is of another kind
    than others'."""

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
    looks: int = 0
    probe_result: FolderProbeResult | None = None
    looks_again: bool = False
    lacks_folder: bool = False
    mixes: bool = False

    @classmethod
    def greeted(cls, hello: AgentHello, connection: Connection, now: float) -> AgentHost:
        """One that begins with ``hello`` at the time ``now``."""
        kept, label = hello.kept, hello.label
        return cls(hello.host, hello.workers, connection, now, kind=hello.host_kind, unnamed=kept, label=label)

    @property
    def usable(self) -> bool:
        """Whether it may get workers, as far as it is known."""
        return not (self.notice or self.lacks_folder or self.mixes or (self.looks and self.probe_result is None))

    def start_probe(self) -> None:
        """Until it answers it gets no workers."""
        self.looks += 1
        self.probe_result, self.looks_again, self.lacks_folder, self.mixes = None, False, False, False

    def set_probe_result(self, result: FolderProbeResult, others: Collection[int]) -> None:
        """It sees what is ``result``. ``others``: the kinds of address (4, 6; 0 is not known) of usable hosts.

        The folder of a network may show a new file late: it is to look again before it counts as blind.
        """
        kinds = set(others) - {0}
        self.looks_again = result.sees is False and self.looks < LOOKS
        if not self.looks_again:
            self.probe_result, self.lacks_folder = result, result.sees is False
            self.mixes = bool(result.ip and kinds) and result.ip not in kinds

    @property
    def free(self) -> int:
        """The room that is left."""
        return max(0, self.room - len(self.workers) - self.unnamed) if self.usable else 0


def as_kept(worker: Bootstrap, host: str, token: str) -> Bootstrap:
    """A worker of the controller before, as its agent names it, for this one at ``host``, whose agents have ``token``:
    its run's coordinator listens there by now, too."""
    return replace(worker, coordinator=at_host(worker.coordinator, host), token=derived(token, worker.token))


# An agent may get workers if it sees the run's folder and its workers can connect to those of the other agents.


class FolderProbe:
    """Of ``agents``, by their numbers. ``ask`` sends one of them a message, ``notify`` takes a line for the user."""

    def __init__(
        self,
        agents: Mapping[int, AgentHost],
        ask: Callable[[int, FolderProbeRequest], None],
        notify: Callable[[str], None],
    ) -> None:
        self._agents, self._ask, self._notify = agents, ask, notify
        self._wanted: FolderProbeRequest | None = None
        self._strangers: list[str] = []

    def begin(self, path: str, text: str) -> None:
        """All are asked from now on, those that are there too, whether the file ``path`` ("": none) holds ``text``."""
        self._wanted = FolderProbeRequest(path, text)
        for number, agent in self._agents.items():
            agent.looks = 0
            self.greet(number)

    def greet(self, number: int) -> None:
        """Ask this one, if any is asked."""
        if self._wanted is not None:
            self._agents[number].start_probe()
            self._ask(number, self._wanted)

    def again(self) -> None:
        """Ask those that may see it by now."""
        for number in [number for number, agent in self._agents.items() if agent.looks_again]:
            self.greet(number)

    def record_answer(self, agent: AgentHost, result: FolderProbeResult) -> None:
        """An answer; what nobody has asked for is no answer."""
        if not agent.looks:
            return
        others = {
            other.probe_result.ip for other in self._agents.values() if other.usable and other.probe_result is not None
        }
        agent.set_probe_result(result, others)
        if agent.mixes:
            has = f"its interface has IPv{result.ip}, those of the other hosts have not"
            self._notify(f"host {agent.host} gets no workers: {has}; choose another one there by --interface")
        elif agent.lacks_folder:
            self._strangers.append(agent.host)

    def hosts_without_folder(self) -> list[str]:
        """Hosts that do not see the file, each once."""
        hosts, self._strangers = self._strangers, []
        return hosts


def pack(free: Mapping[int, int], count: int, used: Mapping[int, int] | None = None) -> list[int]:
    """The agent of each of ``count`` workers, host by host, on as few hosts as it takes.

    ``free``: the room of each agent; ``used``: how many of the run's workers an agent has. Agents that have some come
    first; then the smallest that takes all the rest, else the largest. Raises ``ValueError`` where there is no room.
    """
    if count > sum(free.values()):
        raise ValueError(f"{count} workers, room for {sum(free.values())}")
    left = {agent: room for agent, room in free.items() if room > 0}
    chosen: list[int] = []
    while len(chosen) < count:
        rest = count - len(chosen)
        ours = {agent: room for agent, room in left.items() if used and used.get(agent)} or left
        enough = [agent for agent in ours if ours[agent] >= rest]
        agent = min(enough, key=lambda agent: ours[agent]) if enough else max(ours, key=lambda agent: ours[agent])
        chosen += [agent] * min(rest, left.pop(agent))
    return chosen


def spread(free: Mapping[int, int], count: int) -> list[int]:
    """The agent of each of ``count`` workers, host by host, on as many hosts as possible and evenly.

    ``free``: the room of each agent. Raises ``ValueError`` where there is no room.
    """
    if count > sum(free.values()):
        raise ValueError(f"{count} workers, room for {sum(free.values())}")
    taken = dict.fromkeys(free, 0)
    for _ in range(count):
        taken[min((agent for agent in free if free[agent] > taken[agent]), key=lambda agent: taken[agent])] += 1
    return [agent for agent, workers in taken.items() for _ in range(workers)]


class AgentRoom:
    """The room of ``agents``, by their numbers. Whoever changes an agent or its workers says so by ``changed``."""

    def __init__(self, agents: Mapping[int, AgentHost]) -> None:
        self._agents = agents
        self._free_now: int | None = None  # until something of it changes
        self._most_on_demand: int | None = None
        self._going: set[Bootstrap] = set()  # on-demand workers that were asked to leave

    def changed(self) -> None:
        """Agents, or their workers, are not those that they were."""
        self._free_now = None

    def ended(self, worker: Bootstrap) -> None:
        """This one uses no room any more."""
        self._going.discard(worker)

    @property
    def by_kind(self) -> dict[str, int]:
        """Room for so many workers, used or not, by kind of host; without hosts that will go."""
        staying = [agent for agent in self._agents.values() if agent.usable]
        return {kind: sum(agent.room for agent in staying if agent.kind == kind) for kind in KINDS}

    @property
    def by_host(self) -> tuple[int, ...]:
        """Room for so many workers on each host that stays, used or not, the largest first."""
        rooms: dict[str, int] = {}
        for agent in self._agents.values():
            if agent.usable:
                rooms[agent.host] = rooms.get(agent.host, 0) + agent.room
        return tuple(sorted(rooms.values(), reverse=True))

    @property
    def free(self) -> int:
        """Workers that could be started now."""
        if self._free_now is None:
            self._free_now = sum(self._free().values())
        return self._free_now

    @property
    def on_demand(self) -> int:
        """Workers on on-demand hosts that are to stay."""
        return len(self._on_demand())

    def bound_on_demand(self, most: int | None) -> list[Bootstrap]:
        """At most so many workers may be on on-demand hosts; None: as many as there is room for.

        Returns those beyond, which are to leave.
        """
        self._most_on_demand = most
        self.changed()
        surplus = [] if most is None else self._on_demand()[most:]
        self._going.update(surplus)
        return surplus

    def places(self, workers: Sequence[Bootstrap], *, apart: bool) -> list[int]:
        """The agent of each of ``workers``, for which there is room: beside those of their runs, or, if they are to be
        ``apart``, on as many hosts as possible. Spot hosts come first."""
        if apart:
            return spread(self._free(), len(workers))
        runs = {worker.coordinator for worker in workers}
        workers_of = {n: sum(b.coordinator in runs for b in a.workers.values()) for n, a in self._agents.items()}
        spot = self._free([SPOT])
        cheap = min(len(workers), sum(spot.values()))
        return pack(spot, cheap, workers_of) + pack(self._free([ON_DEMAND]), len(workers) - cheap, workers_of)

    def _on_demand(self) -> list[Bootstrap]:
        """The oldest first."""
        hosts = (agent for agent in self._agents.values() if agent.kind == ON_DEMAND)
        keyed = dict(pair for agent in hosts for pair in agent.workers.items())
        return [keyed[key] for key in sorted(keyed) if keyed[key] not in self._going]

    def _free(self, kinds: Sequence[str] = KINDS) -> dict[int, int]:
        """The room of each agent that may be used now."""
        free = {n: agent.free for n, agent in self._agents.items() if agent.kind in kinds}
        if self._most_on_demand is None:
            return free
        left = max(0, self._most_on_demand - self.on_demand)
        for number in free:
            if self._agents[number].kind == ON_DEMAND:
                free[number] = min(free[number], left)
                left -= free[number]
        return free
