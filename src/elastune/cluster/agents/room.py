"""The room that agents have for workers: on which hosts, of which kind, and how much of it may be used now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastune.cluster.agents.host import AgentHost
from elastune.cluster.agents.packing import pack, spread
from elastune.cluster.launcher import Bootstrap
from elastune.core.cost import KINDS, ON_DEMAND, SPOT


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
        own = {n: sum(b.coordinator in runs for b in a.workers.values()) for n, a in self._agents.items()}
        spot = self._free([SPOT])
        cheap = min(len(workers), sum(spot.values()))
        return pack(spot, cheap, own) + pack(self._free([ON_DEMAND]), len(workers) - cheap, own)

    def _on_demand(self) -> list[Bootstrap]:
        """The oldest first."""
        hosts = (agent for agent in self._agents.values() if agent.kind == ON_DEMAND)
        keyed = dict(pair for agent in hosts for pair in agent.workers.items())
        return [keyed[key] for key in sorted(keyed) if keyed[key] not in self._going]

    def _free(self, kinds: Sequence[str] = KINDS) -> dict[int, int]:
        """The room of each agent that may be used now."""
        found = {n: agent.free for n, agent in self._agents.items() if agent.kind in kinds}
        if self._most_on_demand is None:
            return found
        left = max(0, self._most_on_demand - self.on_demand)
        for number in found:
            if self._agents[number].kind == ON_DEMAND:
                found[number] = min(found[number], left)
                left -= found[number]
        return found
