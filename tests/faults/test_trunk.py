"""Workers whose trunk is data parallel within a replica die in the middle of it; weights do not show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.cluster.local import LocalCluster
from elastune.core.mesh import Mesh
from elastune.core.run import Elastic, Program
from elastune.journal.records import Restarted, StateLost
from elastune.testing.elastic_runs import Ran, Runs

PROGRAM = Program(Path(__file__).parent / "programs" / "trunk.py")
MEANS = {"mechanism": "tensor", "mesh": Mesh(data=2, tensor=2)}


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One worker with all blocks."""
    return Runs(cluster, tmp_path_factory.mktemp("undisturbed"), PROGRAM)(1, means={"mechanism": "tensor"})


def same(ran: Ran, undisturbed: Ran) -> None:
    """Equal to the bit, every sample once, and nobody went back to a checkpoint."""
    assert ran.sha256 == undisturbed.sha256
    assert ran.ledger.exact, ran.ledger
    assert [r["loss"] for r in ran.reports if "loss" in r] == [r["loss"] for r in undisturbed.reports if "loss" in r]
    assert not [r for r in ran.records if isinstance(r, Restarted | StateLost)]


@pytest.mark.parametrize("place", ["trunk", "tail", "backward", "gate"])
def test_killed_in_the_middle_of_a_replica(runs: Runs, undisturbed: Ran, place: str) -> None:
    ran = runs(4, means=MEANS, faults=[f"kill 1 5 {place}"], elastic=Elastic(low=1, high=4))
    same(ran, undisturbed)
    assert ran.lost == [1]


def test_killed_in_an_evaluation(runs: Runs, undisturbed: Ran) -> None:
    same(runs(4, means=MEANS, faults=["kill 2 10 evaluation"], elastic=Elastic(low=1, high=4)), undisturbed)


def test_reshaped_live(runs: Runs, undisturbed: Ran) -> None:
    """To a width at which some workers have no slot in a pass, to plain data parallelism, and back; one joins."""
    wishes = ["3 data=1,tensor=3", "6 data=4", "12 data=1,tensor=2", "16 data=2,tensor=2"]
    ran = runs(4, means=MEANS, reshape=wishes, elastic=Elastic(low=1, high=4))
    same(ran, undisturbed)
    assert len([r for r in ran.regrouped if r.planned]) >= len(wishes) - 1
