"""Stages of a pipeline die at every place of a step; weights and the ledger must not show it, and nobody may wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastune.cluster.elastic_run import ElasticRun
from elastune.cluster.local import LocalCluster
from elastune.core.mesh import Mesh
from elastune.core.run import Elastic, Program
from elastune.journal.records import MembershipEvent, Record, Restarted, StateLost
from elastune.testing.elastic_runs import Ran, Runs, together

PROGRAM = Program(Path(__file__).parent / "programs" / "stages.py")
MESH = Mesh(data=2, pipeline=2)  # workers 0 and 2 are first stages


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One worker with all layers."""
    return Runs(cluster, tmp_path_factory.mktemp("undisturbed"), PROGRAM)(1)


@pytest.fixture
def runs(cluster: LocalCluster, tmp_path: Path) -> Runs:
    return Runs(cluster, tmp_path, PROGRAM)


def same(ran: Ran, undisturbed: Ran) -> None:
    """Equal to the bit, every sample once."""
    assert ran.sha256 == undisturbed.sha256
    assert ran.ledger.exact, ran.ledger
    assert [r["loss"] for r in ran.reports] == [r["loss"] for r in undisturbed.reports]


def killed(runs: Runs, undisturbed: Ran, faults: list[str], **more: Any) -> Ran:
    """And nobody went back to a checkpoint."""
    ran = runs(4, means={"mesh": MESH, **more.pop("means", {})}, faults=faults, elastic=Elastic(low=1, high=4), **more)
    same(ran, undisturbed)
    assert sorted(ran.lost) == sorted(int(fault.split()[1]) for fault in faults if fault.startswith("kill"))
    assert not [r for r in ran.records if isinstance(r, Restarted | StateLost)]
    return ran


@pytest.mark.parametrize("place", ["forward", "waiting", "gate", "applied"])
def test_killed_at_every_place_of_a_step(runs: Runs, undisturbed: Ran, place: str) -> None:
    killed(runs, undisturbed, [f"kill 1 4 {place}"])


@pytest.mark.parametrize(("fault", "schedule"), [("kill 2 0 forward", "1f1b"), ("kill 1 0 forward", "zero-bubble")])
def test_killed_before_anybody_knows_the_shape_of_an_output(
    runs: Runs, undisturbed: Ran, fault: str, schedule: str
) -> None:
    """In the very first batch: others are in a call of the model that nobody can answer."""
    killed(runs, undisturbed, [fault], means={"schedule": schedule})


@pytest.mark.parametrize("step", [0, 4])
def test_a_model_is_called_again_in_the_rest_of_a_lost_batch(runs: Runs, undisturbed: Ran, step: int) -> None:
    """By some of the survivors, since others are at another place: so none waits."""
    ran = runs(
        4,
        means={"mesh": MESH},
        faults=[f"kill 3 {step} forward"],
        again=True,
        elastic=Elastic(low=1, high=4),
    )
    same(ran, undisturbed)
    assert ran.lost == [3]


def test_killed_in_an_evaluation(runs: Runs, undisturbed: Ran) -> None:
    killed(runs, undisturbed, ["kill 2 6 evaluation"])


def test_reshaped_from_outside_into_more_stages_than_it_began_with(runs: Runs, undisturbed: Ran) -> None:
    """In the first view: nothing has told the coordinator of the model's layers but the workers' first words of it."""
    asked: list[Mesh] = []

    def act(handle: ElasticRun, records: list[Record]) -> None:
        told = [r.event["event"] for r in records if isinstance(r, MembershipEvent)]
        if not asked and "layers_found" in told:
            asked.append(Mesh(pipeline=3))
            handle.reshape(asked[0])

    ran = runs(2, means={"mesh": Mesh(pipeline=2)}, act=act, slow_until=together(3), elastic=Elastic(low=1, high=3))
    same(ran, undisturbed)
    assert 3 in {len(r.members) for r in ran.regrouped if r.planned}, ran.records


def test_reshaped_live(runs: Runs, undisturbed: Ran) -> None:
    """The joiner has not heard what those who stay know."""
    wishes = ["1 pipeline=3", "9 pipeline=2"]
    ran = runs(2, means={"mesh": Mesh(pipeline=2)}, reshape=wishes, elastic=Elastic(low=1, high=3))
    same(ran, undisturbed)
    assert 3 in {len(r.members) for r in ran.regrouped if r.planned}, ran.records
