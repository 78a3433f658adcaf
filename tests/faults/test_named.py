"""Named collectives in runs whose workers come, go and die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.elastic_runs import Runs

from elastune.core.mesh import Mesh
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "named.py")
LEFT = Program(Path(__file__).parent / "programs" / "left.py")
SHARDED: dict[str, Any] = {"mechanism": "sharded"}
TRUNK: dict[str, Any] = {"mechanism": "tensor", "mesh": Mesh(tensor=3)}
LIMIT_S = 60.0


def test_they_go_on_through_changes_and_a_death(runs: Runs) -> None:
    """The program checks each result; here only that it went through crews of several sizes."""
    ran = runs(3, resize=["12 1", "22 3"], faults=["kill 1 5 before"])
    assert ran.ledger.exact, ran.ledger
    assert ran.lost == [1]
    assert ran.reports[-1]["most"] == 3
    assert ran.reports[-1]["fewest"] < 3, "the mean over workers"


@pytest.fixture
def left(cluster: LocalCluster, tmp_path: Path) -> Runs:
    return Runs(cluster, tmp_path, LEFT)


@pytest.mark.sampled(3)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "seen"),
    [("breaks", 1 + 2 + 3), ("holds", 1 + 2 + 3), ("asks", 1 + 2 + 3), ("first", 1 + 4 + 4)],
    ids=["breaks", "holds", "asks", "first"],
)
@pytest.mark.parametrize("execution", [SHARDED, TRUNK], ids=["sharded", "trunk"])
def test_waited_for_behind_an_evaluation_that_was_left_early(
    left: Runs, execution: dict[str, Any], how: str, seen: int
) -> None:
    """Each worker leaves it at another batch, or one alone: who waits takes part in the passes that others still make,
    and who comes to the loop's end does not stay with those that only wait, for the call that he makes behind it.
    """
    ran = left(3, execution=execution, how=how, limit_s=LIMIT_S)
    assert ran.ledger.exact, ran.ledger
    assert [(r["seen"], r["workers"]) for r in ran.reports] == [(seen, 3)] * 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("execution", [SHARDED, TRUNK], ids=["sharded", "trunk"])
def test_waited_for_within_an_evaluation(left: Runs, execution: dict[str, Any]) -> None:
    ran = left(3, execution=execution, how="inside", limit_s=LIMIT_S)
    assert ran.ledger.exact, ran.ledger
    assert [(r["seen"], r["inside"]) for r in ran.reports] == [(12, 12)] * 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("execution", [SHARDED, TRUNK], ids=["sharded", "trunk"])
def test_a_worker_dies_while_others_wait_behind_an_evaluation(left: Runs, execution: dict[str, Any]) -> None:
    """Those that are left evaluate again."""
    ran = left(3, execution=execution, how="holds", faults=["kill 2 3 evaluation"], limit_s=LIMIT_S)
    assert ran.lost == [2]
    assert ran.ledger.exact, ran.ledger
    seen = [(r["seen"], r["workers"]) for r in ran.reports]
    assert seen[0] == (1 + 2, 2)
    assert seen[1:] in ([(1 + 2, 2)], [(1 + 2 + 3, 3)]), "another may have come in place of the one that died"
