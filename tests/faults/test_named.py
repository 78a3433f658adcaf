"""Named collectives in runs whose workers come, go and die."""

from __future__ import annotations

from pathlib import Path

from elastune.core.run import Program
from elastune.testing.elastic_runs import Runs

PROGRAM = Program(Path(__file__).parent / "programs" / "named.py")


def test_they_go_on_through_changes_and_a_death(runs: Runs) -> None:
    """The program checks each result; here only that it went through crews of several sizes."""
    ran = runs(3, resize=["12 1", "22 3"], faults=["kill 1 5 before"])
    assert ran.ledger.exact, ran.ledger
    assert ran.lost == [1]
    assert ran.reports[-1]["most"] == 3
    assert ran.reports[-1]["fewest"] < 3, "the mean over workers"
