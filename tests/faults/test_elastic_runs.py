"""Runs whose workers come, freeze, leave and die: the result is that of a run that nothing happens to."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from elastune.core.journal.files import read
from elastune.core.journal.records import FaultInjected, Record, Regrouped, RunFinished, WorkerGone
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.fault_injection import Injector, parse_chaos
from elastune.runtime.job.run import JobSupervisor, run_job

EPOCHS = 6


def spec(program: Program, out: Path, workers: int, elastic: Elastic | None = None, pause_s: float = 0.06) -> RunSpec:
    config = {"epochs": EPOCHS, "pause_s": pause_s}
    execution = ExecutionSettings(workers=workers, num_slots=4)
    return RunSpec(program, out, config=config, seed=5, execution=execution, elastic=elastic or Elastic())


def records(out: Path) -> list[Record]:
    return [entry.record for entry in read(out / "journal.jsonl")]


def test_whatever_happens_the_weights_are_the_same(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    whole = run_job(spec(tiny, tmp_path / "whole", 1, pause_s=0.0), cluster=cluster)
    faults = "join@step:4,kill@step:14,leave@step:24,stop@step:34,notice@step:44"
    disturbed = spec(tiny, tmp_path / "out", 2, Elastic(high=3, heartbeat_s=1.0))
    finished = run_job(disturbed, cluster=cluster, injector=Injector(parse_chaos(faults), seed=1))
    assert (finished.sha256, finished.steps, finished.stopped) == (whole.sha256, whole.steps, "complete")
    kept = records(tmp_path / "out")
    injected = [record.fault for record in kept if isinstance(record, FaultInjected)]
    assert injected[:2] == ["join", "kill"]
    assert set(injected) <= {"join", "kill", "leave", "stop", "notice"}
    assert any(len(record.members) == 3 for record in kept if isinstance(record, Regrouped))
    assert any(record.how == "lost" and record.code == -9 for record in kept if isinstance(record, WorkerGone))
    seen = ledger(read(tmp_path / "out" / "journal.jsonl"))
    assert seen.exact
    assert seen.steps == finished.steps
    assert not list((tmp_path / "out").glob(".coordinator*"))
    assert cluster.free == cluster.capacity


def test_a_run_grows_only_into_what_others_leave(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    """A run that wants 4 of 4 workers, beside one that has 2 of them for a while."""
    grown = tmp_path / "grown"
    slow = spec(tiny, tmp_path / "large", 2, Elastic(high=4), pause_s=0.3)
    large = JobSupervisor(cluster.start(replace(slow, config={**slow.config, "until": str(grown)})))
    small = JobSupervisor(cluster.start(replace(spec(tiny, tmp_path / "small", 2), max_steps=10)))
    large.handle.resize(4, "test")  # type: ignore[attr-defined]
    members: list[set[int]] = []
    deadline = time.monotonic() + 120
    while large.outcome is None or small.outcome is None:
        assert time.monotonic() < deadline
        cluster.wait(0.1)
        results = [record for record in large.pump() if isinstance(record, Regrouped)]
        assert cluster.free >= 0
        members += [set(record.members) for record in results]
        if any(len(result) == 4 for result in members):
            grown.touch()  # and end
        small.pump()
    assert isinstance(large.outcome, RunFinished)
    assert isinstance(small.outcome, RunFinished)
    assert max(len(result) for result in members) == 4
