"""Agents of this machine, over loopback, keep the contract of a launcher; and what is theirs alone."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastune.core.errors import UserError
from elastune.elastic.wire import server as connections
from elastune.elastic.wire.contact import Contact
from elastune.elastic.wire.transport import MARK, fingerprint_of
from elastune.runtime.agents.agent import Agent, Link, hello_of, join
from elastune.runtime.agents.credentials import SHORTEST, Credentials, credentials
from elastune.runtime.agents.launcher import AgentLauncher, find_run
from elastune.runtime.clusters import fleet as elder
from elastune.runtime.clusters.fork import ForkLauncher
from elastune.runtime.launcher import Launcher, ProcessEnded, ProcessNoticed
from elastune.runtime.preemption import FileNotice
from elastune.testing.kits.launcher import LauncherKit, Scene

TOKEN = "a token of this test"
OWN = Credentials(TOKEN)
VERSIONS = {"elastune": "1", "torch": "2", "python": "3"}


class Hosted(AgentLauncher):
    """A launcher and agents, each a thread of this process with a fork server of its own."""

    def __init__(
        self, *rooms: int, own: Credentials = OWN, silence_s: float = 15.0, notice: Path | None = None
    ) -> None:
        self.told: list[str] = []
        told = self.told.append
        super().__init__("127.0.0.1", 0, own.token, tls=own.tls, versions=VERSIONS, silence_s=silence_s, notify=told)
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
        link = join(f"127.0.0.1:{self.port}", self._token, hello_of(VERSIONS, f"host{number}", room), 5.0)
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
    def hosted(
        self, logs: Path, launcher: Hosted, entry: str = "work_until_stopped", **config: object
    ) -> Iterator[Scene]:
        self.make = lambda capacity: launcher  # type: ignore[method-assign]
        with self.scene(logs, entry, **config) as scene:
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

    def test_hosts_tell_what_they_are_like(self, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        mark.write_text("this")
        with self.hosted(tmp_path, Hosted(1, 2)) as scene:
            first, second = scene.launcher._agents.values()
            assert [report.unfit for report in scene.launcher.reports] == ["it has not answered"] * 2
            second.probed_s = 0.0  # has been asked
            scene.launcher.probe(str(mark), "this")
            scene.until(lambda: first.report is not None)
            second.probed_s = None
            scene.launcher.probe(str(mark), "that")
            scene.until(lambda: second.report is not None)
            fit, unfit = scene.launcher.reports
            assert fit.facts is not None
            assert (fit.unfit, fit.workers, fit.facts.shared) == ("", first.room, True)
            assert abs(fit.skew_s) <= fit.skew_error_s < 60
            assert f"elastune 1, torch 2; room for {first.room} workers on " in fit.line
            assert unfit.unfit == "it does not see the output folder"
            assert "output folder not there; unfit: " in unfit.line

    def test_workers_that_cannot_be_started_end_with_the_reason(self, tmp_path: Path) -> None:
        with self.hosted(tmp_path, Hosted(1)) as scene:
            scene.launcher.start(scene.workers[:1], type(scene.needs)("cuda:7", tmp_path))
            scene.until(lambda: 0 in scene.ends())
            assert "the device must be one that this machine has" in scene.ends()[0].why
            assert scene.launcher.free == 1


def refusal(launcher: Hosted, token: str, versions: dict[str, str] = VERSIONS) -> str:
    """What an agent with ``token`` is told."""
    found: list[UserError] = []

    def come() -> None:
        with pytest.raises(UserError) as refused:
            join(f"127.0.0.1:{launcher.port}", token, hello_of(versions, "host", 1), 5.0)
        found.append(refused.value)

    thread = threading.Thread(target=come)
    thread.start()
    while thread.is_alive():
        launcher.poll()
        time.sleep(0.01)
    return str(found[0])


@pytest.mark.parametrize("young_s", [0.0, 60.0])
def test_agents_that_come_all_at_once_all_get_in(monkeypatch: pytest.MonkeyPatch, young_s: float) -> None:
    """Those who are too many wait until they are looked at; and whoever is pushed out comes again."""
    monkeypatch.setattr(connections, "GUESTS_LIMIT", 2)
    monkeypatch.setattr(connections, "YOUNG_S", young_s)
    launcher, links = Hosted(), list[Link]()

    def come(number: int) -> None:
        links.append(join(f"127.0.0.1:{launcher.port}", TOKEN, hello_of(VERSIONS, f"host{number}", 1), 20.0))

    threads = [threading.Thread(target=come, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # they are all there before the first is looked at
    while any(thread.is_alive() for thread in threads):
        launcher.poll()
        time.sleep(0.01)
    assert any("too many came at once" in line for line in launcher.told) == (not young_s)
    assert sorted(launcher.hosts) == sorted(f"host{number}" for number in range(12))
    for link in links:
        link.socket.close()
    launcher.close()


def test_strangers_and_agents_of_other_versions_are_not_let_in() -> None:
    launcher = Hosted()
    assert re.search("must let its agents in.*it has another token", refusal(launcher, "another token, wrong"))
    assert "torch 1.9" in refusal(launcher, TOKEN, {**VERSIONS, "torch": "1.9"})
    assert "it does not encrypt" in refusal(launcher, TOKEN + MARK + "0" * 64)
    assert launcher.capacity == 0
    launcher.close()


def test_encrypted_connections_carry_all_that_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those who expect another certificate, or none, do not get so far as to say who they are."""
    monkeypatch.setattr(connections, "GUEST_LIMIT_S", 1.5)
    own, other = (credentials(tmp_path / name, tls=True) for name in ("own", "other"))
    launcher = Hosted(1, own=own)
    with TestAgents().hosted(tmp_path, launcher, "speak", count=3, code=17) as scene:
        assert scene.coordinator.token.endswith(MARK + fingerprint_of(own.token))
        launcher.start(scene.workers[:1], scene.needs)
        scene.until(lambda: 0 in scene.ends())
        assert scene.ends()[0].code == 17
        assert scene.reports() == [(0, step) for step in range(3)]
        swapped = own.token.partition(MARK)[0] + MARK + fingerprint_of(other.token)
        assert "its certificate is not the one that the token names" in refusal(launcher, swapped)
        assert "the other side closed the connection" in refusal(launcher, TOKEN)
        assert "it has another token" in refusal(launcher, "x" * 16 + MARK + fingerprint_of(own.token))


@pytest.mark.parametrize("tls", [False, True])
def test_a_controller_that_lives_is_seen_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, tls: bool
) -> None:
    """One that encrypts, too, which says nothing before."""
    monkeypatch.setattr(elder, "REACH_S", 0.5)
    launcher = Hosted(own=credentials(tmp_path / "own", tls=tls))
    left = elder.ControllerAddress("elastune-0123abcd", "127.0.0.1", launcher.port)
    over = threading.Event()

    def live() -> None:
        while not over.wait(0.01):
            launcher.poll()

    lives = threading.Thread(target=live)
    lives.start()
    try:
        with pytest.raises(UserError, match=f"one controller at a time .got one listens at 127.0.0.1:{left.port}"):
            elder.check_no_controller(left)
    finally:
        over.set()
        lives.join()
        launcher.close()
    elder.check_no_controller(left)


def test_an_agent_that_says_nothing_is_lost() -> None:
    launcher = Hosted(silence_s=0.3)
    thread = threading.Thread(
        target=lambda: links.append(join(f"127.0.0.1:{launcher.port}", TOKEN, hello_of(VERSIONS, "mute", 3), 5.0))
    )
    links: list[Link] = []
    thread.start()
    deadline = time.monotonic() + 10
    while launcher.told[-1:] != ["host mute has gone: it has been silent for 0.3 s"]:
        assert time.monotonic() < deadline, launcher.told
        assert not [event for event in launcher.poll() if isinstance(event, ProcessEnded)]
        time.sleep(0.01)
    assert launcher.capacity == 0
    thread.join()
    links[0].socket.close()
    launcher.close()


@pytest.mark.parametrize("tls", [False, True])
def test_a_run_is_found_by_who_has_the_token(tmp_path: Path, tls: bool) -> None:
    """And by nobody else; who asks is no agent."""
    own = credentials(tmp_path / "token", tls=tls)
    launcher = Hosted(own=own)
    contact = Contact("127.0.0.1:9", launcher.new_token())
    launcher.runs = lambda: {Path("/shared/run"): contact}
    another = "x" * SHORTEST + own.token[own.token.index(MARK) :] if tls else "x" * SHORTEST
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            launcher.poll()
            over.wait(0.01)

    looks = threading.Thread(target=look)
    looks.start()
    try:
        at = f"127.0.0.1:{launcher.port}"
        assert find_run(at, own.token, Path("run")) == contact
        with pytest.raises(UserError, match="other; it has /shared/run"):
            find_run(at, own.token, Path("other"))
        with pytest.raises(UserError, match="another token"):
            find_run(at, another, Path("run"))
    finally:
        over.set()
        looks.join()
        launcher.close()
    assert not launcher.hosts
    with pytest.raises(UserError, match="a controller must answer there"):
        find_run(at, own.token, Path("run"))
