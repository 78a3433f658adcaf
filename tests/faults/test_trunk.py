"""Workers whose trunk is data parallel within a replica die in the middle of it; weights do not show it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs, check_kept_on

from elastune.core.mesh import Mesh
from elastune.core.run import Elastic, Program

PROGRAM = Program(Path(__file__).parent / "programs" / "trunk.py")
ALONE = {"mechanism": "tensor"}  # one worker with all blocks
MEANS = {**ALONE, "mesh": Mesh(data=2, tensor=2)}


@pytest.mark.parametrize("place", ["trunk", "tail", *soaked("backward", "gate")])
def test_killed_in_the_middle_of_a_replica(runs: Runs, undisturbed: Ran, place: str) -> None:
    ran = runs(4, execution=MEANS, faults=[f"kill 1 5 {place}"], elastic=Elastic(low=1, high=4))
    check_kept_on(ran, undisturbed)
    assert ran.lost == [1]


def test_killed_in_an_evaluation(runs: Runs, undisturbed: Ran) -> None:
    check_kept_on(
        runs(4, execution=MEANS, faults=["kill 2 10 evaluation"], elastic=Elastic(low=1, high=4)), undisturbed
    )


def test_reshaped_live(runs: Runs, undisturbed: Ran) -> None:
    """To a width at which some workers have no slot in a pass, to plain data parallelism, and back; one joins."""
    wishes = ["3 data=1,tensor=3", "6 data=4", "12 data=1,tensor=2", "16 data=2,tensor=2"]
    ran = runs(4, execution=MEANS, reshape=wishes, elastic=Elastic(low=1, high=4))
    check_kept_on(ran, undisturbed)
    assert len([r for r in ran.regrouped if r.planned]) >= len(wishes) - 1
