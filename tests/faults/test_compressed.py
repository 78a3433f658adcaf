"""Runs with compressed gradients whose workers come, go and die."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.elastic_runs import Runs

from elastune.core.journal.records import RunFinished
from elastune.core.run import Program

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")


@pytest.mark.parametrize("compress", ["powersgd:rank=2", "topk:ratio=0.05"])
def test_workers_come_go_and_die(runs: Runs, compress: str) -> None:
    """Each sample counts once, weights end equal on all workers (or the run fails), and the bytes are told."""
    ran = runs(
        3,
        mode="fast",
        plain=True,
        resize=["8 1", "16 3"],
        faults=["kill 1 4 reduced"],
        execution={"compress": compress},
    )
    assert ran.ledger.exact, ran.ledger
    assert ran.lost == [1]
    end = ran.records[-1]
    assert isinstance(end, RunFinished)
    assert end.metrics["accuracy"] > 0.5, "of ten digits"
    assert end.sent_bytes > 0
