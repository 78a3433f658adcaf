"""Agents of this machine, over loopback, keep the contract of a launcher; and what is theirs alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastune.cluster.agents import messages
from elastune.cluster.agents.agent import Agent, hello_of, join
from elastune.cluster.agents.launcher import AgentLauncher
from elastune.cluster.fork.launcher import ForkLauncher
from elastune.cluster.launcher import Launcher, ProcessEnded, ProcessNoticed
from elastune.cluster.notices import FileNotice
from elastune.core.errors import UserError
from elastune.elastic.protocol.transport import dial
from elastune.testing.kits.launcher import LauncherKit, Scene

TOKEN = "a token of this test"
VERSIONS = {"elastune": "1", "torch": "2", "python": "3"}


class Hosted(AgentLauncher):
    """A launcher and agents, each a thread of this process with a fork server of its own."""

    def __init__(self, *rooms: int, silence_s: float = 15.0, notice: Path | None = None) -> None:
        self.told: list[str] = []
        super().__init__("127.0.0.1", 0, TOKEN, versions=VERSIONS, silence_s=silence_s, tell=self.told.append)
        self.threads: list[threading.Thread] = []
        self.whys: list[str] = []
        self._notice = notice
        for number, room in enumerate(rooms):
            self.threads.append(threading.Thread(target=self._live, args=(number, room)))
            self.threads[-1].start()
        deadline = time.monotonic() + 30
        while self.free < sum(rooms) and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.01)

    def _live(self, number: int, room: int) -> None:
        link = join(f"127.0.0.1:{self.port}", hello_of(TOKEN, VERSIONS, f"host{number}", room), 5.0)
        own = ForkLauncher(room, preload=())
        notices = [FileNotice(self._notice, 5.0)] if self._notice is not None else []
        try:
            self.whys.append(Agent(link, own, Path("/nowhere"), notices=notices).serve())
        finally:
            own.close()

    def close(self) -> None:
        super().close()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


class TestAgents(LauncherKit):
    def make(self, capacity: int) -> Launcher:
        return Hosted(*[1] * capacity)

    @contextmanager
    def hosted(self, logs: Path, launcher: Hosted, entry: str = "work_until_stopped") -> Iterator[Scene]:
        self.make = lambda capacity: launcher  # type: ignore[method-assign]
        with self.scene(logs, entry) as scene:
            yield scene

    def test_an_agent_that_is_told_of_its_end_gets_no_more(self, tmp_path: Path) -> None:
        notice = tmp_path / "notice"
        with self.hosted(tmp_path, Hosted(2, notice=notice)) as scene:
            scene.launcher.start(scene.workers[:1], scene.needs)
            scene.until(lambda: bool(scene.reports()))
            notice.write_text("7")
            scene.until(lambda: any(isinstance(event, ProcessNoticed) for event in scene.news))
            assert (scene.launcher.capacity, scene.launcher.free) == (0, 0)
            with pytest.raises(UserError, match="0 free"):
                scene.launcher.start(scene.workers[1:2], scene.needs)
            scene.coordinator.stop()
            scene.until(lambda: 0 in scene.ends())
            assert scene.ends()[0].code == 3
            scene.until(lambda: not scene.launcher.hosts)  # nothing left to do there: the agent has ended by itself

    def test_a_lost_agent_is_the_loss_of_its_workers(self, tmp_path: Path) -> None:
        launcher = Hosted(1, 1)
        with self.hosted(tmp_path, launcher) as scene:
            launcher.start(scene.workers[:2], scene.needs)
            scene.until(lambda: len(scene.reports()) == 2)
            lost = next(agent for agent in launcher._agents.values() if agent.host == "host0")
            worker = next(iter(lost.workers.values())).worker
            lost.connection.socket.shutdown(2)
            scene.until(lambda: worker in scene.ends())
            end = scene.ends()[worker]
            assert end.code is None
            assert "host host0 was lost" in end.why
            assert launcher.capacity == 1
            assert list(scene.ends()) == [worker]
            scene.until(lambda: bool(launcher.whys))

    def test_workers_that_cannot_be_started_end_with_the_reason(self, tmp_path: Path) -> None:
        with self.hosted(tmp_path, Hosted(1)) as scene:
            scene.launcher.start(scene.workers[:1], type(scene.needs)("cuda:7", tmp_path))
            scene.until(lambda: 0 in scene.ends())
            assert "the device must be one that this machine has" in scene.ends()[0].why
            assert scene.launcher.free == 1


def test_strangers_and_agents_of_other_versions_are_not_let_in() -> None:
    launcher = Hosted()
    found: list[UserError] = []

    def come(token: str, versions: dict[str, str]) -> None:
        with pytest.raises(UserError) as refused:
            join(f"127.0.0.1:{launcher.port}", hello_of(token, versions, "host", 1), 5.0)
        found.append(refused.value)

    for token, versions in (("another token, wrong", VERSIONS), (TOKEN, {**VERSIONS, "torch": "1.9"})):
        thread = threading.Thread(target=come, args=(token, versions))
        thread.start()
        while thread.is_alive():
            launcher.poll()
            time.sleep(0.01)
    assert "must let its agents in" in str(found[0])
    assert "torch 1.9" in str(found[1])
    assert launcher.capacity == 0
    launcher.close()


def test_an_agent_that_says_nothing_is_lost() -> None:
    launcher = Hosted(silence_s=0.3)
    connection = dial(f"127.0.0.1:{launcher.port}")
    connection.sendall(messages.encode(hello_of(TOKEN, VERSIONS, "mute", 3)))
    deadline = time.monotonic() + 10
    while launcher.told[-1:] != ["host mute has gone: it has been silent for 0.3 s"]:
        assert time.monotonic() < deadline, launcher.told
        assert not [event for event in launcher.poll() if isinstance(event, ProcessEnded)]
        time.sleep(0.01)
    assert launcher.capacity == 0
    connection.close()
    launcher.close()
