"""Runs that fail, one way after another, on real workers."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import Record, Regrouped, Reported, RunFailed, RunFinished, RunStarted, WorkerGone
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job


def spec(program: Program, out: Path, workers: int = 2, **config: Any) -> RunSpec:
    return RunSpec(program, out, config=config, execution=ExecutionSettings(workers=workers, num_slots=4))


def records(out: Path) -> list[Record]:
    return [entry.record for entry in read(out / "journal.jsonl")]


def failure_of(spec: RunSpec, cluster: LocalCluster) -> RunFailed:
    started = time.monotonic()
    with pytest.raises(JobFailed) as error:
        run_job(spec, cluster=cluster)
    assert time.monotonic() - started < 30.0
    assert cluster.free == cluster.capacity
    failure = error.value.failure
    assert records(spec.out)[-1] == failure
    return failure


def test_a_run_is_journaled_from_start_to_end(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    seen: list[Record] = []
    finished = run_job(spec(tiny, tmp_path / "out", lr=0.1), cluster=cluster, observe=seen.append)
    kept = records(tmp_path / "out")
    assert seen == kept
    assert isinstance(kept[0], RunStarted)
    assert (kept[0].config, kept[0].execution["workers"], kept[0].resumed_step) == ({"lr": 0.1}, 2, None)
    assert [record.step for record in kept if isinstance(record, Reported)] == [10, 20, 30]
    assert kept[-1] == finished
    assert (finished.steps, finished.samples, finished.workers) == (30, 600, 2)
    assert [each.rank for each in finished.worker_steps] == [0, 1], "steps of each worker"
    assert max(each.share for each in finished.worker_steps) == 1.0
    assert all(0 < each.busy_s <= each.step_s for each in finished.worker_steps)


def test_a_run_survives_a_worker_that_vanishes(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    whole = run_job(spec(tiny, tmp_path / "whole", 1), cluster=cluster)
    marker = str(tmp_path / "done")
    finished = run_job(spec(tiny, tmp_path / "out", 3, act="killed", marker=marker, pause_s=0.01), cluster=cluster)
    assert (finished.sha256, finished.steps, finished.stopped) == (whole.sha256, whole.steps, "complete")
    kept = records(tmp_path / "out")
    (gone,) = (record for record in kept if isinstance(record, WorkerGone) and record.how == "lost")
    assert (gone.worker, gone.code) == (1, -9)
    assert any(isinstance(record, Regrouped) for record in kept)
    assert [record.step for record in kept if isinstance(record, Reported)] == [10, 20, 30], "once each"
    assert ledger(read(tmp_path / "out" / "journal.jsonl")).exact


def test_a_program_that_ends_its_worker_ends_the_run(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    failure = failure_of(spec(tiny, tmp_path / "out", 3, act="leaves", pause_s=0.01), cluster)
    assert (failure.reason, failure.rank, failure.exit_code) == ("exception", 1, 7)
    assert "exit code 7 (os._exit" in failure.detail
    assert not [record for record in records(tmp_path / "out") if isinstance(record, WorkerGone)]


def test_what_kills_every_worker_ends_the_run(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    deadly = spec(tiny, tmp_path / "out", 1, act="killed", misbehaving_rank=0)
    failure = failure_of(replace(deadly, elastic=Elastic(most_losses=2)), cluster)
    assert (failure.reason, failure.exit_code) == ("worker_lost", -9)
    assert "was ended by signal 9" in failure.detail
    assert any(isinstance(record, WorkerGone) for record in records(tmp_path / "out"))


def test_an_exception_tells_its_line_and_log(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    failure = failure_of(spec(tiny, tmp_path / "out", 3, act="raises"), cluster)
    line = next(i for i, t in enumerate(tiny.path.read_text().splitlines(), 1) if "raise ArithmeticError" in t)
    assert (failure.reason, failure.rank, failure.exit_code) == ("exception", 1, 1)
    assert failure.detail == f"ArithmeticError: this worker cannot go on (tiny.py:{line})"
    assert "the last words of the log" in failure.log
    assert failure.log.rstrip().endswith("ArithmeticError: this worker cannot go on")


def test_an_exception_that_reads_like_a_lost_connection(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    failure = failure_of(spec(tiny, tmp_path / "out", act="could not restore"), cluster)
    assert (failure.reason, failure.rank) == ("exception", 1)


def test_divergence_and_memory_have_their_reasons(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    assert failure_of(spec(tiny, tmp_path / "a", act="diverges"), cluster).reason == "diverged"
    assert failure_of(spec(tiny, tmp_path / "b", act="memory"), cluster).reason == "out_of_memory"


def test_what_is_there_already_stays(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    out = tmp_path / "out"
    run_job(spec(tiny, out, 1), cluster=cluster)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="new or empty folder"):
        run_job(spec(tiny, out, 1, lr=0.2), cluster=cluster)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


MEANS = [
    {"workers": -1},
    {"workers": 9, "num_slots": 8},
    {"num_slots": -1},
    {"mode": "quick"},
    {"precision": "fp8"},
    {"micro_batch": 0},
    {"threads": 0},
]


@pytest.mark.parametrize("wrong", MEANS)
def test_wrong_means_are_refused_before_anything_is_made(tmp_path: Path, tiny: Program, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        run_job(RunSpec(tiny, tmp_path / "out", execution=replace(ExecutionSettings(), **wrong)))
    assert not (tmp_path / "out").exists()


def test_an_unknown_setting_is_refused_before_anything_is_made(tmp_path: Path, tiny: Program) -> None:
    with pytest.raises(UserError, match="known: act, batch_size"):
        run_job(spec(tiny, tmp_path / "out", rl=1))
    assert not (tmp_path / "out").exists()


def test_an_observer_that_fails_leaves_no_worker_behind(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    def observe(record: Record) -> None:
        if isinstance(record, Reported):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_job(spec(tiny, tmp_path / "out", pause_s=0.05, epochs=1000), cluster=cluster, observe=observe)
    deadline = time.monotonic() + 30
    while cluster.free < cluster.capacity:
        assert time.monotonic() < deadline
        cluster.wait(0.1)
        cluster.pump(0.0)


def test_a_finished_run_may_be_resumed_for_nothing(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    first = run_job(spec(tiny, tmp_path / "out"), cluster=cluster)
    again = run_job(replace(spec(tiny, tmp_path / "out", 3), resume=True), cluster=cluster)
    assert isinstance(again, RunFinished)
    assert (again.sha256, again.steps, again.metrics) == (first.sha256, first.steps, first.metrics)
