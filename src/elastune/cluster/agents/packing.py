"""Which agents get a run's next workers: a pure decision."""

from __future__ import annotations

from collections.abc import Mapping


def pack(free: Mapping[int, int], count: int, own: Mapping[int, int] | None = None) -> list[int]:
    """The agent of each of ``count`` workers, host by host, on as few hosts as it takes.

    ``free``: the room of each agent; ``own``: how many of the run's workers an agent has. Agents that have some come
    first; then the smallest that takes all the rest, else the largest. Raises ``ValueError`` where there is no room.
    """
    if count > sum(free.values()):
        raise ValueError(f"{count} workers, room for {sum(free.values())}")
    left = {agent: room for agent, room in free.items() if room > 0}
    found: list[int] = []
    while len(found) < count:
        rest = count - len(found)
        ours = {agent: room for agent, room in left.items() if own and own.get(agent)} or left
        enough = [agent for agent in ours if ours[agent] >= rest]
        agent = min(enough, key=lambda agent: ours[agent]) if enough else max(ours, key=lambda agent: ours[agent])
        found += [agent] * min(rest, left.pop(agent))
    return found


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
