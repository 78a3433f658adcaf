"""An agent between two controllers: what it keeps, what it tells the next one, and when it gives up."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from elastune.elastic.wire.transport import Lines
from elastune.runtime.agents.agent import Agent, Link
from elastune.runtime.agents.messages import (
    FROM_AGENT,
    FROM_CONTROLLER,
    AgentMessage,
    AgentWelcome,
    PreemptionNoticed,
    StartWorker,
    WorkerEnded,
    WorkerKept,
)
from elastune.runtime.launcher import Bootstrap, Launcher, Needs, ProcessEnded, ProcessEvent

GRACE_S, LIMIT_S = 60.0, 20.0
WORKER = StartWorker(1, Bootstrap(0, "127.0.0.1:1", "a" * 32), "cpu", "/nowhere/logs")


class Processes(Launcher):
    """One that starts nothing: a worker lives until it is ended, or a test has it end."""

    capacity = free = 4

    def __init__(self) -> None:
        self.lives: list[Bootstrap] = []
        self.ended: list[str] = []
        self.events: list[ProcessEvent] = []

    def start(self, workers: Sequence[Bootstrap], needs: Needs) -> None:
        self.lives += workers

    def end(self, workers: Sequence[Bootstrap], why: str = "") -> None:
        self.ended += [why for _ in workers]
        self.events += [ProcessEnded(worker, -9) for worker in workers]

    def poll(self) -> list[ProcessEvent]:
        events, self.events = self.events, []
        return events

    def fileno(self) -> None:
        return None

    def close(self) -> None:
        pass


class Controller:
    """What an agent is connected to. ``link``: the agent's end."""

    def __init__(self, early: Sequence[bytes] = ()) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            there = socket.create_connection(listener.getsockname())
            self.socket = listener.accept()[0]
        self.link = Link(there, "a secret of this test", Lines(), list(early), AgentWelcome(0.1, 60.0, GRACE_S))
        self._lines = Lines()

    def received(self, kind: type, limit_s: float = LIMIT_S) -> list[AgentMessage]:
        """What the agent says until something of ``kind``."""
        heard: list[AgentMessage] = []
        self.socket.settimeout(limit_s)
        while not any(isinstance(message, kind) for message in heard):
            heard += [FROM_AGENT.decode(line) for line in self._lines.feed(self.socket.recv(1 << 16))]
        return heard


def serving(
    processes: Processes, leaves: list[float], again: Callable[[int], Link], tell: Callable[[str], None] = print
) -> tuple[threading.Thread, list[str]]:
    """An agent with a worker whose controller has died, and why it ended."""
    first, whys = Controller([FROM_CONTROLLER.encode(WORKER).strip()]), []
    agent = Agent(
        first.link, processes, Path("/nowhere"), leaving=lambda: min(leaves, default=None), again=again, notify=tell
    )
    thread = threading.Thread(target=lambda: whys.append(agent.serve()), daemon=True)
    first.socket.close()
    thread.start()
    return thread, whys


def test_who_is_noticed_without_a_controller_tells_the_next_one() -> None:
    processes, leaves, following, looks = Processes(), [], Controller(), []

    def again(kept: int) -> Link:
        looks.append(kept)
        leaves[:] = [30.0]
        if len(looks) < 4:
            raise ConnectionRefusedError
        return following.link

    told: list[str] = []
    thread, whys = serving(processes, leaves, again, told.append)
    kept, noticed = (m for m in following.received(PreemptionNoticed) if isinstance(m, WorkerKept | PreemptionNoticed))
    assert isinstance(kept, WorkerKept)
    assert isinstance(noticed, PreemptionNoticed)
    assert (looks, kept.key, noticed.why) == ([1] * 4, WORKER.key, "its agent was asked to end")
    assert 0 < noticed.seconds <= 30.0
    assert processes.ended == []
    processes.events.append(ProcessEnded(processes.lives[0], 0))  # it has left its run
    (end,) = (message for message in following.received(WorkerEnded) if isinstance(message, WorkerEnded))
    thread.join(LIMIT_S)
    assert (end.code, whys, processes.ended) == (0, [""], [])
    gone, found = told
    assert re.fullmatch(r"the controller is gone \(.+\): looking for the next one for up to 60 s", gone)
    assert found == "serving the next controller"


def test_who_is_noticed_and_finds_no_controller_ends_then_and_not_before() -> None:
    processes, began = Processes(), time.monotonic()

    def again(kept: int) -> Link:
        raise ConnectionRefusedError

    thread, whys = serving(processes, [0.5], again)
    thread.join(LIMIT_S)
    assert time.monotonic() - began >= 0.5
    assert (len(whys), processes.ended) == (1, ["its agent ended"])
