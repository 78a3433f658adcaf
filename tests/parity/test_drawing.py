"""What a program draws outside of its batches, and what it steers by the loss: alike on any workers, whoever dies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Runs

from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job

PROGRAM = Program(Path(__file__).parent / "programs" / "drawing.py")


def test_draws_do_not_show_workers_nor_deaths(cluster: LocalCluster, tmp_path: Path) -> None:
    runs = Runs(cluster, tmp_path, PROGRAM)
    alone, four = runs(1), runs(4)
    three = runs(3, faults=["kill 1 3 after", "kill 0 7 before"])
    assert sorted(three.lost) == [0, 1]
    for ran in (four, three):
        assert ran.sha256 == alone.sha256
        assert ran.reports == alone.reports
        assert ran.ledger.exact
    assert len({report["coin"] for report in alone.reports}) == 3
    assert all(report["loss"] != report["again"] for report in alone.reports), "dropout is drawn anew"


@pytest.mark.parametrize("at", [6, *soaked(8)], ids=["within an epoch", "at its end"])
def test_a_resumed_run_draws_the_same(cluster: LocalCluster, tmp_path: Path, at: int) -> None:
    spec = RunSpec(PROGRAM, tmp_path / "whole", execution=ExecutionSettings(workers=2, num_slots=4))
    undisturbed = run_job(spec, cluster=cluster)
    halted = replace(spec, out=tmp_path / "halted")
    run_job(replace(halted, max_steps=at), cluster=cluster)
    resumed = run_job(replace(halted, resume=True), cluster=cluster)
    assert (resumed.sha256, resumed.metrics) == (undisturbed.sha256, undisturbed.metrics)
