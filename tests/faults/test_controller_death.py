"""The controller dies or freezes, or a worker does that has data loaders: nothing stays behind, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.elastic_runs import SLOTS, Ran, Runs

from elastune.core.journal.files import read
from elastune.core.journal.records import Checkpointed, Record, RunFailed, RunStarted, WorkerGone
from elastune.core.run import Elastic, ExecutionSettings, Place, Program, RunSpec
from elastune.elastic.coordinator.controller_interface import ListenOptions, Timeouts, WorkerBounds, WorkerLookups
from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.elastic.wire.messages import WorkerSpec
from elastune.elastic.worker.client import ORPHANED_CODE
from elastune.report.sample_ledger import ledger
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.runtime.launcher import VARIABLE, Bootstrap
from elastune.runtime.worker import WORK

HERE = Path(__file__).parent / "programs"
PROGRAM = Program(HERE / "elastic.py")
SAMPLES, STEPS, EVERY = 1000, 48, 4
LIMIT_S = 120.0


def spec(out: Path, workers: int = 3) -> RunSpec:
    execution, elastic = ExecutionSettings(workers=workers, num_slots=SLOTS), Elastic(heartbeat_s=2.0)
    every = {"checkpoint_every_steps": EVERY, "elastic": elastic}
    return RunSpec(PROGRAM, out, {"pause_s": 0.1}, seed=3, execution=execution, **every)


def records(out: Path) -> list[Record]:
    journal = out / "journal.jsonl"
    return [entry.record for entry in read(journal)] if journal.exists() else []


def saved(out: Path) -> int:
    """The step of the newest checkpoint that the journal knows of."""
    recorded = records(out)
    assert not any(isinstance(record, RunFailed) for record in recorded), recorded[-1]
    return max((record.step for record in recorded if isinstance(record, Checkpointed)), default=0)


def on_disk(out: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(path.name.split("-")[1]) for path in (out / "checkpoints").glob("step-*")), default=0)


def goes_on_as_if_nothing_had_happened(out: Path, workers: int, cluster: LocalCluster, undisturbed: Ran) -> int:
    """Resume the run in ``out``; the step from which it went on."""
    resumed = run_job(replace(spec(out, workers), resume=True), cluster=cluster)
    assert (resumed.sha256, resumed.steps) == (undisturbed.sha256, STEPS)
    seen = ledger(read(out / "journal.jsonl"))
    assert seen.exact, seen
    assert [epoch.once for epoch in seen.epochs] == [SAMPLES] * 3
    started = [record for record in records(out) if isinstance(record, RunStarted)]
    return started[-1].resumed_step or 0


def test_the_controller_is_killed(cluster: LocalCluster, tmp_path: Path, undisturbed, controller, until, all_gone):
    out = tmp_path / "out"
    running = controller(lambda: run_job(spec(out)))
    until(lambda: saved(out) >= 3 * EVERY, LIMIT_S)
    family = running.family()
    assert len(family) >= 4
    running.signal(signal.SIGKILL)
    assert running.end() == -9
    all_gone(family)
    assert goes_on_as_if_nothing_had_happened(out, 2, cluster, undisturbed) >= 3 * EVERY


@pytest.mark.soak
def test_checkpoints_that_the_journal_does_not_know(
    cluster: LocalCluster, tmp_path: Path, undisturbed, controller, until, all_gone
):
    """The workers train on while the controller is frozen, and what they say of it dies with the controller."""
    out = tmp_path / "out"
    running = controller(lambda: run_job(spec(out)))
    until(lambda: saved(out) >= EVERY, LIMIT_S)
    running.signal(signal.SIGSTOP)
    known = saved(out)
    until(lambda: on_disk(out) > known + 2 * EVERY, LIMIT_S)  # what the journal knows of is not kept any more
    family, saved_by_then = running.family(), saved(out)
    running.signal(signal.SIGKILL)
    assert running.end() == -9
    all_gone(family)
    newest = on_disk(out)
    assert goes_on_as_if_nothing_had_happened(out, 4, cluster, undisturbed) == newest > saved_by_then


@pytest.mark.soak
def test_the_controller_is_frozen_for_a_while(tmp_path: Path, undisturbed, controller, until, all_gone):
    """For longer than a heartbeat: silence was its own."""
    out = tmp_path / "out"
    running = controller(lambda: run_job(spec(out)))
    until(lambda: saved(out) >= EVERY, LIMIT_S)
    family = running.family()
    running.signal(signal.SIGSTOP)
    time.sleep(3.0)
    running.signal(signal.SIGCONT)
    assert running.end(LIMIT_S) == 0
    all_gone(family)
    assert not [record for record in records(out) if isinstance(record, WorkerGone) and record.how == "lost"]
    assert records(out)[-1].sha256 == undisturbed.sha256
    assert ledger(read(out / "journal.jsonl")).exact


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_data_loaders_end_with_a_worker_that_is_killed(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Ran, all_gone: Callable[..., None]
) -> None:
    loaders: list[int] = []

    def act(handle, result: list[Record]) -> None:
        if not loaders and handle.step >= 5 and len(processes := children(handle.pids[1])) == 2:
            loaders.extend(processes)
            os.kill(handle.pids[1], signal.SIGKILL)
            all_gone(loaders)

    ran = Runs(cluster, tmp_path, PROGRAM)(3, act=act, loaders=2, pause_s=0.05)
    assert loaders
    assert ran.lost == [1]
    assert ran.sha256 == undisturbed.sha256
    assert ran.ledger.exact


@pytest.mark.soak
def test_data_loaders_end_with_a_worker_that_is_orphaned(tmp_path: Path, until, all_gone) -> None:
    """Started by a launcher of somebody else's, which does nothing for it."""
    loaders: list[int] = []
    alone = RunSpec(PROGRAM, tmp_path, {"pause_s": 0.2, "loaders": 2}, seed=3)
    task = WorkerSpec(WORK, alone, Place(), dict(os.environ), str(Path.cwd()), sys.path)
    lookups = WorkerLookups(spec_of=lambda worker: task)
    coordinator = Coordinator([0], WorkerBounds(1, 1), Timeouts(5.0), ListenOptions(), lookups)
    bootstrap = Bootstrap(0, coordinator.address, coordinator.token)
    command = [sys.executable, "-m", "elastune.runtime.worker"]
    with subprocess.Popen(command, env={**os.environ, VARIABLE: bootstrap.to_json()}) as worker:
        try:
            until(lambda: coordinator.step >= 2, LIMIT_S)
            loaders += children(worker.pid)
            assert len(loaders) == 2
            for loader in loaders:  # else it may find out by itself
                os.kill(loader, signal.SIGSTOP)
            coordinator.close()
            assert worker.wait(LIMIT_S) == ORPHANED_CODE
            all_gone(loaders)
        finally:
            worker.kill()
            coordinator.close()
            for loader in loaders:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(loader, signal.SIGKILL)
