"""A program's own DataLoader and sampler: the same bits on any number of workers, whoever dies."""

from __future__ import annotations

from pathlib import Path

from tests.support.elastic_runs import Runs

from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "loaders.py")


def test_a_weighted_sampler_draws_alike_for_all_workers(cluster: LocalCluster, tmp_path: Path) -> None:
    runs = Runs(cluster, tmp_path, PROGRAM)
    alone, three = runs(1), runs(3, faults=["kill 1 3 after"])
    assert three.lost == [1]
    assert three.sha256 == alone.sha256
    assert three.reports == alone.reports
    for ran in (alone, three):
        assert ran.ledger.exact
        assert [epoch.length for epoch in ran.ledger.epochs] == [80, 80]
        assert [report["seen"] for report in ran.reports] == [60, 60]
