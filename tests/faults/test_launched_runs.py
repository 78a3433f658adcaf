"""Under torchrun workers stay as they are: the same program, the same weights, and a ledger as exact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.launched import launched

from elastune.core.journal.files import read
from elastune.core.journal.records import Decided, RunFailed, RunFinished
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")
SAMPLES, STEPS = 1000, 48


def torchrun(out: Path, *more: str, workers: int = 2, program: Program = PROGRAM) -> RunFinished:
    """torchrun itself is in the tests of the command line, and of ranks that differ."""
    run = ["run", str(program.path), "--out", str(out), "--seed", "3", "--slots", "4", *more]
    assert launched(run, workers, out.parent / "errors") == [0] * workers
    *_, end = (entry.record for entry in read(out / "journal.jsonl"))
    assert isinstance(end, RunFinished)
    return end


def test_parameters_change_under_torchrun(cluster: LocalCluster, tmp_path: Path) -> None:
    """Nothing of it needs a coordinator."""
    change = ["6 batch_size 128", "9 lr 0.01"]
    spec = RunSpec(
        PROGRAM, tmp_path / "elastic", {"change": change}, seed=3, execution=ExecutionSettings(workers=1, num_slots=4)
    )
    whole = run_job(spec, cluster=cluster)
    out = tmp_path / "launched"
    assert torchrun(out, "--set", f"change={json.dumps(change)}").sha256 == whole.sha256
    decided = [entry.record for entry in read(out / "journal.jsonl") if isinstance(entry.record, Decided)]
    assert [(d.policy, d.step, d.outcome) for d in decided] == [("program", 8, "applied"), ("program", 11, "applied")]


def exact(out: Path, epochs: int = 3) -> bool:
    seen = ledger(read(out / "journal.jsonl"))
    return seen.exact and [epoch.once for epoch in seen.epochs] == [SAMPLES] * epochs


@pytest.mark.soak
def test_torchrun_and_back(cluster: LocalCluster, tmp_path: Path) -> None:
    """A part of the run under torchrun, the rest on elastic workers; and the other way round."""
    spec = RunSpec(PROGRAM, tmp_path / "whole", seed=3, execution=ExecutionSettings(workers=1, num_slots=4))
    whole = run_job(spec, cluster=cluster)
    first = tmp_path / "launched first"
    assert torchrun(first, "--max-steps", "20").steps == 20
    end = run_job(
        replace(spec, out=first, execution=ExecutionSettings(workers=3, num_slots=4), resume=True), cluster=cluster
    )
    assert (end.sha256, end.steps) == (whole.sha256, STEPS)
    assert exact(first)
    last = tmp_path / "launched last"
    assert (
        run_job(
            replace(spec, out=last, execution=ExecutionSettings(workers=3, num_slots=4), max_steps=20), cluster=cluster
        ).steps
        == 20
    )
    end = torchrun(last, "--resume")
    assert (end.sha256, end.steps, end.workers) == (whole.sha256, STEPS, 2)
    assert exact(last)


def test_workers_of_torchrun_stand_as_the_mesh_says(cluster: LocalCluster, tmp_path: Path) -> None:
    """State in shares on two replicas of two workers: the weights of one worker, and half of the state on each."""
    program = Program(PROGRAM.path.parent / "shares.py")
    whole = run_job(
        RunSpec(program, tmp_path / "whole", seed=3, execution=ExecutionSettings(workers=1, num_slots=4), max_steps=12),
        cluster=cluster,
    )
    out = tmp_path / "launched"
    end = torchrun(out, "--mesh", "data=2,shard=2", "--max-steps", "12", workers=4, program=program)
    assert end.sha256 == whole.sha256
    assert max(row.optimizer for row in end.memory) < 0.7 * whole.memory[0].optimizer


def test_survivors_of_a_rank_name_it(tmp_path: Path) -> None:
    out, errors = tmp_path / "run", tmp_path / "errors"
    execution = ["--slots", "4", "--workers", "3", "--seed", "3", "--set", 'faults=["kill 1 5 gather"]']
    assert launched(["run", str(PROGRAM.path), *execution, "--json", "--out", str(out)], 3, errors) == [1, -9, 1]
    failed = [entry.record for entry in read(out / "journal.jsonl") if isinstance(entry.record, RunFailed)]
    words = "rank 1 is lost: its process or its host has ended (what failed here: "
    assert [(record.reason, record.detail.startswith(words)) for record in failed] == [("worker_lost", True)]
    assert f"worker 2, worker_lost: {words}" in errors.read_text()
