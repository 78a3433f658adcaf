"""Where a replica is alone, no two workers compute with a block or a stage: another worker holds it for them.

kill -9 at the named places of a step: the survivors go on, with the same bits and without a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs, check_kept_on
from tests.support.host_runs import HostRun, HostRuns, NamespaceLauncher
from tests.support.hosts import Network

from elastune.core.mesh import Mesh
from elastune.core.run import Elastic, Program
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "shares.py")
ALONE = {"mechanism": "tensor"}  # one worker with all blocks


@pytest.mark.parametrize("place", ["lending", "gated", *soaked("forward", "gate", "stepped")])
def test_killed_in_a_replica_that_is_alone(runs: Runs, undisturbed: Ran, place: str) -> None:
    """Of two workers, each with half of the blocks, one is left with all of them."""
    execution = {"mechanism": "tensor", "mesh": Mesh(tensor=2), "virtual_tensor": 4}
    ran = runs(2, execution=execution, faults=[f"kill 1 5 {place}"], elastic=Elastic(low=1, high=2))
    check_kept_on(ran, undisturbed)
    assert ran.lost == [1]


def test_one_after_the_other(runs: Runs, undisturbed: Ran) -> None:
    """Four blocks on four workers."""
    faults = ["kill 3 4 lending", "kill 0 8 gated", "kill 1 13 backward"]
    ran = runs(4, execution={"mechanism": "tensor", "mesh": Mesh(tensor=4)}, faults=faults)
    check_kept_on(ran, undisturbed)
    assert ran.lost == [3, 0, 1]


@pytest.fixture(scope="module")
def unpiped(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One worker with all layers."""
    return Runs(cluster, tmp_path_factory.mktemp("unpiped"), PROGRAM)(1, late=False)


@pytest.mark.parametrize(
    ("dies", "place"),
    [
        *((1, "lending"), (0, "gated")),
        *soaked((1, "backward"), (0, "launched"), (1, "applied")),
    ],
)
def test_killed_in_a_pipeline_that_is_alone(runs: Runs, unpiped: Ran, dies: int, place: str) -> None:
    """BatchNorm, a frozen layer and one without gradients among what only one of two stages computes with."""
    execution = {"mechanism": "pipeline", "mesh": Mesh(pipeline=2)}
    ran = runs(2, execution=execution, faults=[f"kill {dies} 5 {place}"], elastic=Elastic(low=1, high=2), late=False)
    check_kept_on(ran, unpiped)
    assert ran.lost == [dies]


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[NamespaceLauncher]:
    """With room for two workers each."""
    with Network(2) as network:
        launcher = NamespaceLauncher(network, 2)
        yield launcher
        launcher.close()


@pytest.mark.parametrize("place", ["lending", *soaked("gated")])
def test_a_whole_host_is_lost(two_hosts: NamespaceLauncher, tmp_path: Path, undisturbed: Ran, place: str) -> None:
    """Two of four blocks with it, at once: the other host has a copy of each."""

    def act(run: HostRun) -> None:
        if len(run.processes) == 4:
            assert [run.processes[worker].host for worker in range(4)] == [run.network.hosts[at] for at in (0, 0, 1, 1)]
            run.launcher.limit = 2  # nobody is replaced: one host is left

    runs = HostRuns(two_hosts, tmp_path, PROGRAM)
    execution = {"mechanism": "tensor", "mesh": Mesh(tensor=4)}
    ran = runs(4, act=act, execution=execution, faults=[f"kill {worker} 5 {place}" for worker in (0, 1)])
    check_kept_on(ran, undisturbed)
    assert sorted(ran.lost) == [0, 1]
