"""Spot and on-demand hosts: which workers go where, and which are given back. The agents here start nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastune.adapt.policies.library.spot import SpotRules
from elastune.core.cost import Prices
from elastune.core.errors import UserError
from elastune.runtime.agents.agent import Link, hello_of, join
from elastune.runtime.agents.launcher import AgentLauncher
from elastune.runtime.clusters.fleet import FleetCluster, FleetSize, Phase, Starter
from elastune.runtime.clusters.kind import Access, CapacityRequest, ClusterRequest, opened
from elastune.runtime.clusters.local import LocalKind
from elastune.runtime.clusters.ray import RayKind
from elastune.runtime.clusters.slurm import SlurmKind
from elastune.runtime.clusters.slurm_commands import agent_command
from elastune.runtime.launcher import Bootstrap, Needs, ProcessNoticed
from elastune.runtime.spot import SpotWatch
from elastune.train.machine import software

TOKEN, VERSIONS = "a token of this test", {"elastune": "1", "torch": "2"}
NEEDS = Needs("cpu", Path("/nowhere"))


@contextmanager
def agents(**rooms: int) -> Iterator[AgentLauncher]:
    """A launcher, and an agent of each kind of host with so much room that hears and does nothing."""
    launcher = AgentLauncher("127.0.0.1", 0, TOKEN, versions=VERSIONS)
    links: list[Link] = []

    def come(kind: str, room: int) -> None:
        links.append(join(f"127.0.0.1:{launcher.port}", TOKEN, hello_of(VERSIONS, kind, room, kind), 20.0))

    try:
        for kind, room in rooms.items():
            thread = threading.Thread(target=come, args=(kind.replace("_", "-"), room))
            thread.start()
            while thread.is_alive():
                launcher.poll()
                thread.join(0.01)
        yield launcher
    finally:
        for link in links:
            link.socket.close()
        launcher.close()


def started(launcher: AgentLauncher, count: int, first: int = 0) -> list[Bootstrap]:
    token = launcher.new_token()
    workers = [Bootstrap(first + n, "127.0.0.1:1", token) for n in range(count)]
    launcher.start(workers, NEEDS)
    return workers


def host_of(launcher: AgentLauncher, worker: Bootstrap) -> str:
    return next(agent.host for agent in launcher._agents.values() if worker in agent.workers.values())


def test_spot_hosts_are_filled_first() -> None:
    with agents(on_demand=3, spot=2) as launcher:
        assert launcher.room.by_kind == {"spot": 2, "on-demand": 3}
        workers = started(launcher, 4)
        assert [host_of(launcher, worker) for worker in workers] == ["spot", "spot", "on-demand", "on-demand"]
        assert (launcher.free, launcher.room.on_demand) == (1, 2)


def test_on_demand_hosts_have_no_more_workers_than_they_may() -> None:
    with agents(on_demand=3, spot=1) as launcher:
        launcher.bound_on_demand(1, "enough")
        assert launcher.free == 2
        started(launcher, 2)
        with pytest.raises(UserError, match="0 free"):
            started(launcher, 1, first=2)
        launcher.bound_on_demand(None, "")
        assert launcher.free == 2


def test_those_beyond_the_bound_are_told_to_leave_once_the_newest_first() -> None:
    with agents(on_demand=3) as launcher:
        workers = started(launcher, 3)
        for _ in range(2):
            launcher.bound_on_demand(1, "the deadline can be met without it")
        noticed = [event for event in launcher.poll() if isinstance(event, ProcessNoticed)]
        assert [event.bootstrap for event in noticed] == workers[1:]
        assert (launcher.room.on_demand, launcher.free) == (1, 0)


def test_an_agent_is_of_a_known_kind() -> None:
    with pytest.raises(UserError, match="spot or on-demand"):
        hello_of(VERSIONS, "host", 1, "reserved")


def test_only_hosts_that_tell_their_kind_can_be_chosen_among(tmp_path: Path) -> None:
    spot = SpotWatch(SpotRules(3600.0, 4), Prices.constant(1.0))
    room = CapacityRequest(tmp_path, 1, 4, spot=spot)
    for cluster, told in ((None, "another cluster"), (ClusterRequest(LocalKind(), Access()), "local")):
        with pytest.raises(UserError, match=f"hosts that report their kind .got {told}"), opened(cluster, room):
            pass


@pytest.mark.parametrize("kind", [SlurmKind, RayKind])
def test_jobs_and_actors_tell_their_kind_where_it_is_said(kind: type[SlurmKind | RayKind]) -> None:
    spot, usual = kind.parse("kind=spot"), kind.parse("")
    assert (spot.kind, spot.reports_host_kind) == ("spot", True)
    assert (usual.kind, usual.reports_host_kind) == ("on-demand", False)
    with pytest.raises(UserError, match="kind: input should be 'spot' or 'on-demand'"):
        kind.parse("kind=cheap")
    command = agent_command("python", "10.0.0.1:7", None, 4, spot.kind)
    assert command[command.index("--kind") + 1] == "spot"


class Waiting(Starter):
    """Nothing that is started here ever comes."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.cancelled: list[str] = []

    def start(self, count: int) -> None:
        self.waiting += [f"job{len(self.waiting) + n}" for n in range(count)]

    def look(self) -> dict[str, Phase]:
        return dict.fromkeys(self.waiting, "waiting")

    def cancel(self, labels: Sequence[str]) -> None:
        self.cancelled += labels
        self.waiting = [label for label in self.waiting if label not in labels]

    def why(self, label: str) -> str:
        return ""

    def waits(self) -> str:
        return ""

    def close(self) -> None:
        self.waiting = []


@pytest.mark.parametrize("spot", [False, True])
def test_an_on_demand_agent_takes_no_spot_job_s_place(spot: bool) -> None:
    """One that came by itself: without the policy ``spot`` it is as good as a job."""
    starter, watch = Waiting(), SpotWatch(SpotRules(3600.0, 4), Prices.constant(1.0))
    cluster = FleetCluster(
        "127.0.0.1", 0, TOKEN, starter=lambda where: starter, size=FleetSize(2, 1), expected=2,
        spot=watch if spot else None,
    )  # fmt: skip
    with cluster:
        hello = hello_of(software(), "mine", 1, "on-demand")
        link: list[Link] = []
        thread = threading.Thread(
            target=lambda: link.append(join(f"127.0.0.1:{cluster.launcher.port}", TOKEN, hello, 20.0))
        )
        thread.start()
        while thread.is_alive():
            cluster.pump(0.01)
        until = time.monotonic() + (60.0 if not spot else 2.0)
        while time.monotonic() < until and not starter.cancelled:
            cluster.pump(0.05)
        assert starter.cancelled == ([] if spot else ["job1"])
        assert cluster.rooms == {"on-demand": 1}
        link[0].socket.close()


def test_an_agent_shows_the_label_that_it_was_given() -> None:
    hello = hello_of(VERSIONS, "host", 1, label="actor-1")
    assert (hello.label, hello.kept) == ("actor-1", 0)
