"""As many agents as a cluster has use for: something starts them, and the idle ones are let go.

What to do is decided by ``plan``, purely; a thread of its own does it, because batch systems answer when they like.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

LOOK_S = 10.0  # between looks, but for those that news ask for: a queue is shared with others
RETRY_S = 60.0  # after a start was refused
TRIES = 3  # starts in a row of which no agent has come, before there are no more
JOIN_LIMIT_S = 30.0

Phase = Literal["waiting", "running"]


@dataclass(frozen=True)
class Never:
    """What was started will never come, however long one waits: ``value`` says what it is, ``fix`` what to do."""

    value: str
    fix: str


class NotStarted(Exception):
    """Whatever starts agents did not do what it was asked for; why, in one line."""


class Starter(ABC):
    """Starts agents somewhere, each with a label of its own, which the agent shows (``elastune agent --label``).

    One thread uses it at a time. Every method raises ``NotStarted`` where it cannot do its work.
    """

    @abstractmethod
    def start(self, count: int) -> None:
        """Have ``count`` more agents started."""

    @abstractmethod
    def look(self) -> dict[str, Phase]:
        """What was started and has not ended, by label, oldest first."""

    @abstractmethod
    def cancel(self, labels: Sequence[str]) -> None:
        """End these, which wait."""

    @abstractmethod
    def why(self, label: str) -> str:
        """What is known of the end of ``label``, of which no agent has come."""

    @abstractmethod
    def waits(self) -> str:
        """What those that wait are waiting for, as of the last look; "" where none waits."""

    def never(self) -> Never | None:
        """Why those that wait will never start, as of the last look; None where they may."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End all that is left. Idempotent."""


@dataclass(frozen=True)
class AgentSeen:
    """An agent that is there. ``idle_s``: how long it has had no workers, 0 where it has some; ``going``: it will end
    soon."""

    idle_s: float = 0.0
    going: bool = False


@dataclass(frozen=True)
class Orders:
    """``start``: how many more; ``cancel``: what waits and is wanted no more; ``dismiss``: agents to be let go."""

    start: int = 0
    cancel: tuple[str, ...] = ()
    dismiss: tuple[str, ...] = ()


def plan(
    needed: int, starts: Mapping[str, Phase], agents: Mapping[str, AgentSeen], came: Collection[str], idle_s: float
) -> Orders:
    """What makes ``needed`` agents of those that are there and those that come.

    ``starts``: what was started and has not ended; ``came``: the labels of all agents that ever came: a start whose
    agent has gone brings none any more, whatever the queue says. ``idle_s``: how long an agent stays without workers.
    """
    there = {label: agent for label, agent in agents.items() if not agent.going}
    coming = [label for label in starts if label not in agents and label not in came]
    surplus = len(there) + len(coming) - needed
    if surplus <= 0:
        return Orders(start=-surplus)
    cancel = [label for label in coming if starts[label] == "waiting"][-surplus:]
    idle = sorted((label for label in there if there[label].idle_s >= idle_s), key=lambda name: -there[name].idle_s)
    most = min(surplus - len(cancel), len(there) - needed)
    return Orders(cancel=tuple(cancel), dismiss=tuple(idle[: max(0, most)]))


class Fleet:
    """Has ``starter`` keep as many agents as are needed. ``steer``, ``news`` and ``close`` are one thread's.

    ``idle_s``: how long an agent stays without workers where fewer are needed.
    """

    def __init__(self, starter: Starter, idle_s: float) -> None:
        self._starter = starter
        self._idle_s = idle_s
        self._needed = 0
        self._agents: Mapping[str, AgentSeen] = {}
        self._came: frozenset[str] = frozenset()
        self._starts: dict[str, Phase] = {}
        self._news: deque[str] = deque()
        self._told = ""
        self._failed = 0  # starts in a row that came to nothing
        self._cancelled: set[str] = set()
        self._retry_at = 0.0
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fleet", daemon=True)

    def begin(self, needed: int) -> None:
        """Start the first, beside those that the controller before has started.

        Raises ``NotStarted`` where there is none then.
        """
        self._needed = needed
        try:
            self._starter.start(max(0, needed - len(self._starter.look())))
        except NotStarted as error:
            if not self._starter.look():
                raise
            self._news.append(str(error))
        self._starts = self._starter.look()
        self._thread.start()

    def steer(self, needed: int, agents: Mapping[str, AgentSeen]) -> tuple[str, ...]:
        """From now on ``needed`` of them; ``agents`` are there. The labels of those that are to be let go now."""
        news = needed != self._needed or agents.keys() != self._agents.keys()
        news = news or any(agents[label].going != self._agents[label].going for label in agents)
        if agents.keys() - self._came:
            self._failed = 0
        self._needed, self._agents, self._came = needed, dict(agents), self._came | agents.keys()
        if news:
            self._wake.set()
        return plan(needed, self._starts, agents, self._came, self._idle_s).dismiss

    @property
    def given_up(self) -> bool:
        """Whether nothing more is started, because nothing came of it."""
        return self._failed >= TRIES

    def waits(self) -> str:
        """What the missing agents wait for."""
        return self._starter.waits()

    def never(self) -> Never | None:
        """Why they will never come, where that is known."""
        return self._starter.never()

    def news(self) -> list[str]:
        """What is to be told, each once."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def stop(self) -> None:
        """Start no more. Idempotent."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_LIMIT_S)

    def close(self) -> None:
        """Start no more, and end what has not ended. Raises ``NotStarted`` where something may be left."""
        self.stop()
        self._starter.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                self._round()
            except NotStarted as error:
                self._retry_at = time.monotonic() + RETRY_S
                self._tell(str(error))
            self._wake.wait(LOOK_S)
            self._wake.clear()

    def _round(self) -> None:
        before, self._starts = self._starts, self._starter.look()
        for label in before.keys() - self._starts.keys() - self._came - self._cancelled:
            self._failed += 1
            self._news.append(f"{label} has ended before its agent came: {self._starter.why(label)}")
            if self._failed == TRIES:
                self._news.append(f"no more agents are started: {TRIES} in a row came to nothing")
        orders = plan(self._needed, self._starts, self._agents, self._came, self._idle_s)
        if orders.cancel:
            self._starter.cancel(orders.cancel)
            self._cancelled.update(orders.cancel)
        if orders.start and not self.given_up and time.monotonic() >= self._retry_at and not self._closing.is_set():
            self._starter.start(orders.start)
            self._starts = self._starter.look()
        self._tell(self._starter.waits())

    def _tell(self, line: str) -> None:
        if line and line != self._told:
            self._news.append(line)
        self._told = line
