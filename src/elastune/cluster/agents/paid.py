"""Hosts that have come, by their kind: what is paid for (all their room, used or not), and whom they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from elastune.cluster.agents.host import AgentHost
from elastune.core.cost import SPOT


def rooms_paid(agents: Iterable[AgentHost]) -> dict[str, int]:
    """Workers that there is room for on all hosts that are there, those too that will go and get no more workers."""
    found: Counter[str] = Counter()
    for agent in agents:
        found[agent.kind] += max(agent.room, len(agent.workers) + agent.unnamed)
    return dict(found)


def members_on_spot(agents: Iterable[AgentHost], coordinator: str, members: Collection[int]) -> int:
    """How many ``members`` of the run whose coordinator listens at that address are on spot hosts that stay."""
    staying = (agent for agent in agents if agent.kind == SPOT and not agent.notice)
    own = (worker for agent in staying for worker in agent.workers.values() if worker.coordinator == coordinator)
    return sum(worker.worker in members for worker in own)


def workers_held(agents: Iterable[AgentHost], coordinator: str) -> dict[str, int]:
    """Workers of the run whose coordinator listens at that address, from the moment that a host was told to start
    them until it has told of their end."""
    found: Counter[str] = Counter()
    for agent in agents:
        found[agent.kind] += sum(worker.coordinator == coordinator for worker in agent.workers.values())
    return {kind: workers for kind, workers in found.items() if workers}
