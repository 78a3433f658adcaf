"""Two workers on each of two hosts, or three: their sums climb by hosts, whoever dies, and the bits do not show it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.elastic_runs import Runs
from tests.support.host_runs import HostRun, HostRuns, NamespaceLauncher
from tests.support.hosts import Network

from elastune.core.journal.records import RunFinished
from elastune.core.run import Program
from elastune.core.sync_plan import SyncPlan
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")
WIDE = {"wide": 4096, "epochs": 1}


@pytest.fixture(scope="module")
def hosts() -> Iterator[NamespaceLauncher]:
    """Three with room for two workers each; one is filled before the next, so that four workers have two of them."""
    with Network(3) as network:
        launcher = NamespaceLauncher(network, 2)
        yield launcher
        launcher.close()


def test_a_host_receives_the_gradients_once(cluster: LocalCluster, hosts: NamespaceLauncher, tmp_path: Path) -> None:
    alone = Runs(cluster, tmp_path / "alone", PROGRAM)(1, **WIDE)
    runs = HostRuns(hosts, tmp_path / "hosts", PROGRAM)
    host = hosts.network.hosts[1]
    before = host.received_bytes
    ran = runs(4, **WIDE)
    received = host.received_bytes - before
    assert (ran.sha256, ran.codes) == (alone.sha256, dict.fromkeys(range(4), 0))
    (end,) = (record for record in ran.records if isinstance(record, RunFinished))
    assert (end.workers, end.hosts) == (4, 2)
    assert 1.0 < received / (end.steps * end.grad_bytes) < 1.5  # all to all: 2


@pytest.mark.parametrize(("send", "part"), [("whole", 1.0), ("int8", 0.25)])
def test_a_host_receives_learners_once(
    cluster: LocalCluster, hosts: NamespaceLauncher, tmp_path: Path, send: str, part: float
) -> None:
    """In ``fast`` mode, too: learners' means are sums in canonical order. What travels rounded does so among hosts."""
    apart = {"sync": SyncPlan.parse(f"local:learners=4,every=2,moments=fresh,send={send}")}
    host = hosts.network.hosts[1]
    before = host.received_bytes
    ran = HostRuns(hosts, tmp_path / "hosts", PROGRAM)(4, mode="fast", spec=apart, **WIDE)
    received = host.received_bytes - before
    (end,) = (record for record in ran.records if isinstance(record, RunFinished))
    assert (end.workers, end.hosts) == (4, 2)
    beside = 0.4  # most of it the programs' own
    assert part < received / (end.steps / 2 * end.grad_bytes) < part + beside  # from each to each: 2 * part + beside


def test_workers_die_on_the_way_up_and_back(cluster: LocalCluster, hosts: NamespaceLauncher, tmp_path: Path) -> None:
    """The three others go on without levels, until another comes in the place of the lost one."""
    alone = Runs(cluster, tmp_path / "alone", PROGRAM)(1)
    ran = HostRuns(hosts, tmp_path / "hosts", PROGRAM)(4, faults=["kill 1 5 scatter", "kill 2 20 gather"])
    assert ran.sha256 == alone.sha256
    assert ran.ledger.exact
    assert ran.lost == [1, 2]


def nobody_else(run: HostRun) -> None:
    """Nobody comes in a lost worker's place."""
    run.launcher.limit = 4


def test_those_left_of_three_hosts_climb_again_after_a_loss(
    cluster: LocalCluster, hosts: NamespaceLauncher, tmp_path: Path
) -> None:
    """First everybody sends to everybody; a few steps later the levels of the two hosts are there."""
    execution = {"num_slots": 8, "topology": "native"}  # what measuring links takes is not counted here
    alone = Runs(cluster, tmp_path / "alone", PROGRAM)(1, execution=execution, **WIDE)
    runs = HostRuns(hosts, tmp_path / "hosts", PROGRAM)
    host = hosts.network.hosts[0]
    before = host.received_bytes
    faults = ["kill 4 2 before", "kill 5 2 before"]
    ran = runs(6, act=nobody_else, high=6, execution=execution, faults=faults, **WIDE)
    received = host.received_bytes - before
    assert ran.sha256 == alone.sha256
    assert ran.ledger.exact
    (end,) = (record for record in ran.records if isinstance(record, RunFinished))
    assert (end.workers, end.hosts) == (4, 2)
    assert received / (end.steps * end.grad_bytes) < 1.7  # all to all: 2
