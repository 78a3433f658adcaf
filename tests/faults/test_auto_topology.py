"""Links between hosts are measured, one turns slow, workers die in the midst of it: none of it shows.

What is chosen by measured links depends on how busy this machine is, so where routes are to change links are told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.elastic_runs import Runs
from tests.support.host_runs import HostRun, HostRuns, NamespaceLauncher
from tests.support.hosts import Network

from elastune.core.journal.records import Reported, TopologyChanged
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")
LINKED = Program(Path(__file__).parent / "programs" / "linked.py")
CAUSE = (
    r"links measured: the slowest is that of (\S+), ([0-9.]+) MB/s; modelled: ([0-9.]+) ms, native ([0-9.]+) ms; "
    r"tried: 100 ms, \S+ 200 ms"
)
WIDE = {"wide": 1024, "epochs": 2}


@pytest.fixture(scope="module")
def four_hosts() -> Iterator[NamespaceLauncher]:
    with Network(4) as network:
        launcher = NamespaceLauncher(network, 1)
        yield launcher
        launcher.close()


def test_a_link_turns_slow_and_a_worker_dies(
    cluster: LocalCluster, four_hosts: NamespaceLauncher, tmp_path: Path
) -> None:
    alone = Runs(cluster, tmp_path / "alone", PROGRAM)(1, **WIDE)
    slow: list[int] = []
    faults = ["kill 2 0 probing", "kill 1 30 before"]

    def act(run: HostRun) -> None:
        steps = [record.step for record in run.records if isinstance(record, Reported)]
        if steps and steps[-1] >= 9 and not slow:
            run.network.hosts[3].slow("60mbit")
            slow.append(steps[-1])

    ran = HostRuns(four_hosts, tmp_path / "hosts", PROGRAM)(
        4, act=act, faults=faults, execution={"topology": "auto"}, **WIDE
    )
    assert ran.sha256 == alone.sha256
    assert ran.ledger.exact
    assert sorted(ran.lost) == [1, 2]
    assert slow, "the link turned slow while it trained"


def test_a_worker_dies_while_routes_are_tried(
    cluster: LocalCluster, four_hosts: NamespaceLauncher, tmp_path: Path
) -> None:
    """Nothing is sent along routes before they are tried: its first message of this kind is in the trial."""
    alone = Runs(cluster, tmp_path / "alone", PROGRAM)(1, **WIDE)
    four_hosts.network.hosts[3].slow("60mbit")
    ran = HostRuns(four_hosts, tmp_path / "hosts", PROGRAM)(
        4, faults=["kill 2 0 relaying"], execution={"topology": "auto"}, **WIDE
    )
    assert ran.sha256 == alone.sha256
    assert ran.ledger.exact
    assert ran.lost == [2]


def test_routes_change_where_a_link_turns_slow_and_back_and_the_journal_says_why(
    cluster: LocalCluster, four_hosts: NamespaceLauncher, tmp_path: Path
) -> None:
    """That of the fourth host to 5 MB/s at step 12, and to 125 MB/s as the others at step 30 of 48."""
    config = {"wide": 1024, "epochs": 3, "optimizer": "sgd"}
    alone = Runs(cluster, tmp_path / "alone", PROGRAM)(1, **config)
    ran = HostRuns(four_hosts, tmp_path / "hosts", LINKED)(4, execution={"topology": "auto"}, **config)
    assert ran.sha256 == alone.sha256
    assert ran.ledger.exact
    away, back = (record for record in ran.records if isinstance(record, TopologyChanged))
    assert 12 < away.step <= 12 + 20
    assert 30 < back.step <= 30 + 20
    assert (away.topology == "native", back.topology, away.workers) == (False, "native", 4)
    results = [re.fullmatch(CAUSE, record.cause) for record in (away, back)]
    assert all(results), (away.cause, back.cause)
    (host, *numbers), (_, rate_after, *_) = (each.groups() for each in results if each)
    rate, now_ms, native_ms = map(float, numbers)
    assert (host, rate, float(rate_after)) == (four_hosts.network.hosts[3].address, 5.0, 125.0)
    assert now_ms <= 0.85 * native_ms, "it is expected to pay"
