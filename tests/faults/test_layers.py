"""Workers that compute a part of each layer die in the middle of it; weights and the ledger must not show it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs, check_kept_on

from elastune.core.mesh import Mesh
from elastune.core.run import Elastic, Program

PROGRAM = Program(Path(__file__).parent / "programs" / "shares.py")
ALONE = {"mechanism": "tensor"}  # one worker with all blocks
MEANS = {**ALONE, "mesh": Mesh(data=2, tensor=2)}


@pytest.mark.parametrize("place", ["forward", "applied", *soaked("backward", "gate")])
def test_killed_in_the_middle_of_a_replica(runs: Runs, undisturbed: Ran, place: str) -> None:
    """In the program's forward pass too, where others wait for its blocks."""
    ran = runs(4, execution=MEANS, faults=[f"kill 1 5 {place}"], elastic=Elastic(low=1, high=4))
    check_kept_on(ran, undisturbed)
    assert ran.lost == [1]


def test_killed_in_an_evaluation(runs: Runs, undisturbed: Ran) -> None:
    check_kept_on(
        runs(4, execution=MEANS, faults=["kill 2 10 evaluation"], elastic=Elastic(low=1, high=4)), undisturbed
    )


def test_reshaped_live(runs: Runs, undisturbed: Ran) -> None:
    """To other widths, three of four blocks included."""
    wishes = ["3 data=1,tensor=3", "6 data=4", "12 data=1,tensor=2", "16 data=2,tensor=2"]
    ran = runs(4, execution=MEANS, reshape=wishes, elastic=Elastic(low=1, high=4))
    check_kept_on(ran, undisturbed)
    assert len([r for r in ran.regrouped if r.planned]) >= len(wishes) - 1


def test_a_group_that_breaks_in_an_evaluation_without_a_loss(runs: Runs, undisturbed: Ran) -> None:
    """What the rest of that pass computes means nothing, and is not in what is summed: all evaluate again."""
    execution = {**MEANS, "mesh": Mesh(tensor=2)}
    ran = runs(2, execution=execution, faults=["break 1 10 scatter"], elastic=Elastic(low=1, high=2))
    check_kept_on(ran, undisturbed)
    assert not ran.lost
    assert ran.regrouped
