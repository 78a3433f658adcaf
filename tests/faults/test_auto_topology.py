"""Links between hosts are measured, one turns slow, workers die in the midst of it: none of it shows.

What is chosen depends on how busy this machine is: tests of the model hold that, and the benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastune.cluster.local import LocalCluster
from elastune.core.run import Program
from elastune.journal.records import Reported
from elastune.testing.elastic_runs import Runs
from elastune.testing.host_runs import HostRun, HostRuns, NamespaceLauncher
from elastune.testing.hosts import Network

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")
WIDE = {"wide": 4096, "epochs": 2}


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
        4, act=act, faults=faults, means={"topology": "auto"}, **WIDE
    )
    assert ran.sha256 == alone.sha256
    assert ran.ledger.exact
    assert sorted(ran.lost) == [1, 2]
    assert slow, "the link turned slow while it trained"
