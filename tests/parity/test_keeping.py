"""What a program tracks, and when it stops itself: the same on any number of workers, whoever dies, and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tests.support.elastic_runs import Ran, Runs

from elastune.core.journal.records import RunFinished
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.parallel.mechanisms.tensor_storage import whole
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.checkpoints.start_from import weights_in

PROGRAM = Program(Path(__file__).parent / "programs" / "keeping.py")


def _ended(ran: Ran) -> tuple[str, str, int]:
    assert isinstance(ran.outcome, RunFinished)
    return ran.outcome.stopped, ran.outcome.stop_why, ran.outcome.epoch


def test_tracked_state_and_the_program_s_end_survive_deaths(cluster: LocalCluster, tmp_path: Path) -> None:
    runs = Runs(cluster, tmp_path, PROGRAM)
    alone, three = runs(1), runs(3, faults=["kill 1 3 after", "kill 0 8 evaluated"])
    assert sorted(three.lost) == [0, 1]
    assert three.sha256 == alone.sha256
    assert three.reports == alone.reports
    assert [report["steps"] for report in alone.reports[:-1]] == [4.0 * n for n in range(1, 6)]
    assert alone.reports[-1]["best"] == 3.0
    for ran in (alone, three):
        assert _ended(ran) == ("program", "no better loss for 2 epochs", 5)


def test_a_resumed_run_has_what_was_tracked_and_the_best(cluster: LocalCluster, tmp_path: Path) -> None:
    spec = RunSpec(PROGRAM, tmp_path / "whole", execution=ExecutionSettings(workers=2, num_slots=4))
    undisturbed = run_job(spec, cluster=cluster)
    halted = replace(spec, out=tmp_path / "halted")
    run_job(replace(halted, max_steps=10), cluster=cluster)
    resumed = run_job(replace(halted, resume=True), cluster=cluster)
    assert (resumed.sha256, resumed.metrics) == (undisturbed.sha256, undisturbed.metrics)
    assert resumed.stopped == "program"
    for out in (spec.out, halted.out):
        (kept,) = (out / "best" / "loss" / "checkpoints").iterdir()
        assert kept.name.endswith("12")  # after three of the epochs
    with weights_in(spec.out / "best" / "loss") as (one, _), weights_in(halted.out / "best" / "loss") as (other, _):
        assert all(torch.equal(whole(one[name]), whole(other[name])) for name in one)
    again = run_job(replace(halted, resume=True), cluster=cluster)
    assert (again.stopped, again.steps) == ("program", resumed.steps)
