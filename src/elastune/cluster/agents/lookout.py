"""Which agents may get workers: those that see the run's folder, and whose workers reach the others'."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastune.cluster.agents.host import AgentHost
from elastune.cluster.agents.messages import HostLooked, LookFor


class Lookout:
    """Of ``agents``, by their numbers. ``ask`` sends one of them a message, ``say`` takes a line for the user."""

    def __init__(
        self, agents: Mapping[int, AgentHost], ask: Callable[[int, LookFor], None], say: Callable[[str], None]
    ) -> None:
        self._agents, self._ask, self._say = agents, ask, say
        self._wanted: LookFor | None = None
        self._strangers: list[str] = []

    def begin(self, path: str, text: str) -> None:
        """All are asked from now on, those that are there too, whether the file ``path`` ("": none) holds ``text``."""
        self._wanted = LookFor(path, text)
        for number, agent in self._agents.items():
            agent.looks = 0
            self.greet(number)

    def greet(self, number: int) -> None:
        """Ask this one, if any is asked."""
        if self._wanted is not None:
            self._agents[number].asked_to_look()
            self._ask(number, self._wanted)

    def again(self) -> None:
        """Ask those that may see it by now."""
        for number in [number for number, agent in self._agents.items() if agent.looks_again]:
            self.greet(number)

    def hear(self, agent: AgentHost, found: HostLooked) -> None:
        """An answer; what nobody has asked for is no answer."""
        if not agent.looks:
            return
        others = {other.looked.ip for other in self._agents.values() if other.usable and other.looked is not None}
        agent.has_looked(found, others)
        if agent.mixes:
            has = f"its interface has IPv{found.ip}, those of the other hosts have not"
            self._say(f"host {agent.host} gets no workers: {has}; choose another one there by --interface")
        elif agent.blind:
            self._strangers.append(agent.host)

    def strangers(self) -> list[str]:
        """Hosts that do not see the file, each once."""
        found, self._strangers = self._strangers, []
        return found
