"""A run whose controller is asked to stop, interrupted twice or killed: nothing is lost, nothing stays behind."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elastune.core.journal.files import read
from elastune.core.journal.records import Record, Reported, RunFailed, RunFinished, RunStarted
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job

EPOCHS = 4


def spec(program: Program, out: Path, workers: int, pause_s: float = 0.0) -> RunSpec:
    config = {"epochs": EPOCHS, "pause_s": pause_s}
    return RunSpec(program, out, config=config, seed=5, execution=ExecutionSettings(workers=workers, num_slots=4))


def records(out: Path) -> list[Record]:
    journal = out / "journal.jsonl"
    return [entry.record for entry in read(journal)] if journal.exists() else []


def reported(out: Path) -> bool:
    return any(isinstance(record, Reported) for record in records(out))


def undisturbed(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> RunFinished:
    return run_job(spec(tiny, tmp_path / "whole", 1), cluster=cluster)


def test_sigterm_saves_and_another_number_of_workers_goes_on(
    cluster: LocalCluster, tmp_path: Path, tiny: Program, controller, until, all_gone
) -> None:
    out = tmp_path / "out"
    running = controller(lambda: run_job(spec(tiny, out, 2, 0.02)))
    until(lambda: reported(out))
    family = running.family()
    running.signal(signal.SIGTERM)
    assert running.end() == 0
    all_gone(family)
    stopped = records(out)[-1]
    assert isinstance(stopped, RunFinished)
    assert stopped.stopped == "requested"
    assert 10 <= stopped.steps < 10 * EPOCHS

    resumed = run_job(replace(spec(tiny, out, 3, 0.02), resume=True), cluster=cluster)
    started = [record for record in records(out) if isinstance(record, RunStarted)]
    assert [record.resumed_step for record in started] == [None, stopped.steps]
    assert (resumed.stopped, resumed.steps) == ("complete", 10 * EPOCHS)
    whole = undisturbed(cluster, tmp_path, tiny)
    assert resumed.sha256 == whole.sha256 != stopped.sha256


def test_fast_mode_hears_it_within_a_second_too(tmp_path: Path, tiny: Program, controller, until, all_gone) -> None:
    """The wish travels beside DDP's reduction, and not with every step."""
    out = tmp_path / "out"
    run_spec = spec(tiny, out, 2, 0.02)
    run_spec = replace(
        run_spec, execution=replace(run_spec.execution, mode="fast"), config={**run_spec.config, "epochs": 1000}
    )
    running = controller(lambda: run_job(run_spec))
    until(lambda: reported(out))
    family = running.family()
    running.signal(signal.SIGTERM)
    assert running.end() == 0
    all_gone(family)
    stopped = records(out)[-1]
    assert isinstance(stopped, RunFinished)
    assert stopped.stopped == "requested"
    assert (out / "checkpoints" / f"step-{stopped.steps:010d}").is_dir()


def test_a_second_interrupt_ends_it(tmp_path: Path, tiny: Program, controller, until, all_gone) -> None:
    """The step takes a minute, so a graceful end is not in sight."""
    out = tmp_path / "out"
    running = controller(lambda: run_job(replace(spec(tiny, out, 2, 60.0), max_steps=3)))
    until(lambda: list((out / "logs").glob("worker-1.log")))
    until(lambda: len(running.family()) >= 3)
    family = running.family()
    running.signal(signal.SIGINT)
    time.sleep(0.7)  # two signals at once may count as one
    assert running.family() >= family
    running.signal(signal.SIGINT)
    assert running.end() == 1
    all_gone(family)
    failure = records(out)[-1]
    assert isinstance(failure, RunFailed)
    assert (failure.reason, failure.detail) == ("interrupted", "ended by a second interrupt")


@pytest.mark.soak
def test_a_killed_controller_takes_its_workers_along_and_the_run_goes_on(
    cluster: LocalCluster, tmp_path: Path, tiny: Program, controller, until, all_gone
) -> None:
    out = tmp_path / "out"
    running = controller(lambda: run_job(spec(tiny, out, 2, 0.02)))
    until(lambda: reported(out))
    family = running.family()
    assert len(family) >= 3
    running.signal(signal.SIGKILL)
    assert running.end() == -9
    all_gone(family)
    resumed = run_job(replace(spec(tiny, out, 4, 0.02), resume=True), cluster=cluster)
    assert resumed.sha256 == undisturbed(cluster, tmp_path, tiny).sha256
