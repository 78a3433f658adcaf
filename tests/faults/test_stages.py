"""Stages of a pipeline die at every place of a step; weights and the ledger must not show it, and nobody may wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs, check_kept_on, check_same, together

from elastune.core.journal.records import MembershipEvent, Record
from elastune.core.mesh import Mesh
from elastune.core.run import Elastic, Program
from elastune.runtime.elastic_run import ElasticRun

PROGRAM = Program(Path(__file__).parent / "programs" / "stages.py")
MESH = Mesh(data=2, pipeline=2)  # workers 0 and 2 are first stages


def killed(runs: Runs, undisturbed: Ran, faults: list[str], **more: Any) -> Ran:
    ran = runs(
        4, execution={"mesh": MESH, **more.pop("execution", {})}, faults=faults, elastic=Elastic(low=1, high=4), **more
    )
    check_kept_on(ran, undisturbed)
    assert sorted(ran.lost) == sorted(int(fault.split()[1]) for fault in faults if fault.startswith("kill"))
    return ran


@pytest.mark.parametrize("place", ["forward", "waiting", *soaked("gate", "applied")])
def test_killed_at_every_place_of_a_step(runs: Runs, undisturbed: Ran, place: str) -> None:
    killed(runs, undisturbed, [f"kill 1 4 {place}"])


@pytest.mark.parametrize(
    ("fault", "schedule"), [("kill 1 0 forward", "zero-bubble"), *soaked(("kill 2 0 forward", "1f1b"))]
)
def test_killed_before_anybody_knows_the_shape_of_an_output(
    runs: Runs, undisturbed: Ran, fault: str, schedule: str
) -> None:
    """In the very first batch: others are in a call of the model that nobody can answer."""
    killed(runs, undisturbed, [fault], execution={"schedule": schedule})


@pytest.mark.parametrize("step", [0, *soaked(4)])
def test_a_model_is_called_again_in_the_rest_of_a_lost_batch(runs: Runs, undisturbed: Ran, step: int) -> None:
    """By some of the survivors, since others are at another place: so none waits."""
    ran = runs(
        4,
        execution={"mesh": MESH},
        faults=[f"kill 3 {step} forward"],
        again=True,
        elastic=Elastic(low=1, high=4),
    )
    check_same(ran, undisturbed)
    assert ran.lost == [3]


def test_killed_in_an_evaluation(runs: Runs, undisturbed: Ran) -> None:
    killed(runs, undisturbed, ["kill 2 6 evaluation"])


def test_reshaped_from_outside_into_more_stages_than_it_began_with(runs: Runs, undisturbed: Ran) -> None:
    """In the first view: nothing has told the coordinator of the model's layers but the workers' first words of it."""
    asked: list[Mesh] = []

    def act(handle: ElasticRun, records: list[Record]) -> None:
        results = [r.event["event"] for r in records if isinstance(r, MembershipEvent)]
        if not asked and "layers_found" in results:
            asked.append(Mesh(pipeline=3))
            handle.reshape(asked[0])

    ran = runs(2, execution={"mesh": Mesh(pipeline=2)}, act=act, slow_until=together(3), elastic=Elastic(low=1, high=3))
    check_same(ran, undisturbed)
    assert 3 in {len(r.members) for r in ran.regrouped if r.planned}, ran.records


def test_reshaped_live(runs: Runs, undisturbed: Ran) -> None:
    """The joiner has not heard what those who stay know."""
    wishes = ["1 pipeline=3", "9 pipeline=2"]
    ran = runs(2, execution={"mesh": Mesh(pipeline=2)}, reshape=wishes, elastic=Elastic(low=1, high=3))
    check_same(ran, undisturbed)
    assert 3 in {len(r.members) for r in ran.regrouped if r.planned}, ran.records
