"""What a worker's memory held: measured, by kind; and memory that runs out says how much was wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.soaked import soaked

from elastune.core.journal.files import read
from elastune.core.journal.records import RunFinished, TrialFinished, WorkerMemory
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.report.overviews import gather_run
from elastune.report.tables import memory_line, memory_table
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job
from elastune.train.progress import StepMemory, memory_of_workers
from elastune.train.worker import lacks_memory, memory_detail, wanted_bytes
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

MIB = 2**20
WIDE = 700
PROGRAM = """
import resource
import torch
from torch import nn

config = {"extra_mib": 0, "limit_gib": 0, "wanted_gib": 0, "epochs": 2}
objectives = {"loss": "min"}

def space(trial):
    return {"wanted_gib": trial.suggest_categorical("wanted_gib", [0, 8])}

def train(session):
    config = session.config
    if config["limit_gib"]:
        resource.setrlimit(resource.RLIMIT_AS, (config["limit_gib"] * 2**30, resource.RLIM_INFINITY))
    model = nn.Sequential(nn.Linear(8, 700), nn.BatchNorm1d(700), nn.ReLU(), nn.Linear(700, 700), nn.Linear(700, 1))
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters()))
    data = torch.utils.data.TensorDataset(torch.ones(64, 8), torch.ones(64, 1))
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(data, 16):
            extra = torch.ones(config["extra_mib"] * 2**18)
            loss = nn.functional.mse_loss(model(x), y) + 0.0 * extra.sum()
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if config["wanted_gib"]:
            torch.empty(config["wanted_gib"] * 2**28)
        session.report(loss=1.0)
"""


def run_of(
    program: Program, out: Path, cluster: LocalCluster, execution: ExecutionSettings, **config: Any
) -> list[WorkerMemory]:
    return run_job(RunSpec(program, out, config, execution=execution), cluster=cluster).memory


def test_state_and_activations_of_each_worker_are_measured(program: Any, tmp_path: Path, cluster: LocalCluster) -> None:
    mine = program(PROGRAM)
    sizes = [8 * WIDE, WIDE, WIDE, WIDE, WIDE * WIDE, WIDE, WIDE, 1]
    whole = 4 * sum(sizes)
    plain = run_of(mine, tmp_path / "plain", cluster, ExecutionSettings(workers=2))
    assert [each.rank for each in plain] == [0, 1]
    for each in plain:
        assert each.parameters == whole + 2 * 4 * WIDE + 8, "buffers of BatchNorm are among them"
        assert each.gradients == pytest.approx(whole, rel=0.01)
        assert each.optimizer == pytest.approx(2 * whole, rel=0.001)
        assert each.copies == 0
        assert each.peak > each.parameters + each.gradients + each.optimizer
    held = run_of(mine, tmp_path / "held", cluster, ExecutionSettings(workers=2), extra_mib=64)
    more = [each.activations - before.activations for each, before in zip(held, plain, strict=True)]  # type: ignore[operator]
    assert all(50 * MIB < each < 90 * MIB for each in more), "what a step needs beside its state"
    divided = run_of(mine, tmp_path / "divided", cluster, ExecutionSettings(workers=2, mechanism="zero", copies=1))
    for each in divided:
        assert each.optimizer == pytest.approx(2 * whole / 2, rel=0.05)
        assert each.copies == 0
    copied = run_of(mine, tmp_path / "copied", cluster, ExecutionSettings(workers=2, mechanism="zero", copies=2))
    for each in copied:
        assert each.optimizer == pytest.approx(2 * whole, rel=0.01)
        assert each.copies == pytest.approx(whole, rel=0.05)
    story = gather_run(read(tmp_path / "copied" / "journal.jsonl"))
    assert story is not None
    table = memory_table(story)
    assert [row[0] for row in table.rows] == ["0", "1"]
    assert "of optimizer state (2 holders / 2 workers of the whole); the fullest worker has 1 x that" in table.note
    notes = []
    for name in ("plain", "divided"):
        story = gather_run(read(tmp_path / name / "journal.jsonl"))
        assert story is not None
        notes.append(memory_table(story).note)
    assert "Modelled" not in notes[0]
    assert "(1 holder / 2 workers of the whole); the fullest worker has 1" in notes[1]
    assert "of it copies)" in memory_line(copied)
    assert "copies" not in memory_line(plain)


@pytest.mark.parametrize(
    ("mechanism", "copies"), [("zero", 2), ("sharded", 3), *soaked(("zero", 1), ("sharded", 1), ("sharded", 2))]
)
def test_each_of_four_workers_has_its_share_of_the_state_and_of_its_copies(
    program: Any, tmp_path: Path, cluster: LocalCluster, mechanism: str, copies: int
) -> None:
    """``copies / 4`` of what is divided, on the fullest worker, too; what is not divided whole."""
    execution = ExecutionSettings(workers=4, mechanism=mechanism, copies=copies)
    result = run_of(program(PROGRAM), tmp_path / "run", cluster, execution, epochs=1)
    numbers, buffers = 8 * WIDE + 5 * WIDE + WIDE * WIDE + 1, 2 * 4 * WIDE + 8
    share, of_values = copies / 4, copies / 4 if mechanism == "sharded" else 1.0
    assert [each.rank for each in result] == [0, 1, 2, 3]
    for each in result:
        assert each.optimizer == pytest.approx(share * 8 * numbers, rel=0.05)
        assert each.parameters - buffers == pytest.approx(of_values * 4 * numbers, rel=0.05)
        assert each.copies == pytest.approx((share - 1 / 4) * 8 * numbers, rel=0.05, abs=200)


def test_a_trial_that_runs_out_of_memory_tells_what_it_wanted(
    program: Any, tmp_path: Path, cluster: LocalCluster
) -> None:
    mine, limited = program(PROGRAM), {"limit_gib": 6, "epochs": 1}
    with pytest.raises(JobFailed) as error:
        run_of(mine, tmp_path / "run", cluster, ExecutionSettings(), **limited, wanted_gib=8)
    assert error.value.failure.reason == "out_of_memory"
    assert error.value.failure.wanted_bytes == 8 * 2**30
    request = StudyRequest(mine, tmp_path / "study", sampler="grid", trials=2, config=limited)
    tune(request, cluster=cluster)
    ended = [e.record for e in read(tmp_path / "study" / "journal.jsonl") if isinstance(e.record, TrialFinished)]
    assert sorted(each.state for each in ended) == ["complete", "infeasible"]
    (reason,) = [each.reason for each in ended if each.state == "infeasible"]
    assert reason.startswith("out_of_memory: wanted 8 GiB more (8,589,934,592 bytes); RuntimeError: ")


@pytest.mark.parametrize(
    ("error", "lacks", "wanted"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes. Error"), True, 400),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has"), True, 1_610_612_736),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 1.00 GiB total"), True, 2 * MIB),
        (np._core._exceptions._ArrayMemoryError((10,), np.dtype("f8")), True, 80),
        (MemoryError(), True, None),
        (RuntimeError("std::bad_alloc"), True, None),
        (ValueError("a shape"), False, None),
    ],
)
def test_texts_of_memory_that_ran_out(error: Exception, lacks: bool, wanted: int | None) -> None:
    assert (lacks_memory(error), wanted_bytes(error)) == (lacks, wanted)
    result = memory_detail(wanted, "said")
    assert result.endswith("said")
    assert (result != "said") == (wanted is not None)


def test_an_error_is_looked_for_behind_others() -> None:
    error = RuntimeError("the loader failed")
    error.__cause__ = MemoryError("Unable to allocate 2.00 MiB for an array")
    assert lacks_memory(error)
    assert wanted_bytes(error) == 2 * MIB


def test_one_step_of_a_view_is_looked_at(tmp_path: Path) -> None:
    """On a system of files: the peak above what was there when the step began, less its gradients."""
    state = {"parameters": 10, "gradients": 1024, "optimizer": 20, "copies": 5}

    def says(now: int, peak: int) -> None:
        (tmp_path / "status").write_text(f"Name:\tx\nVmHWM:\t{peak} kB\nVmRSS:\t{now} kB\n")

    memory = StepMemory(status=tmp_path)
    memory.begin_view(1)
    due = []
    for now, peak in [(100, 900), (100, 900), (100, 900), (500, 900)]:
        says(now, peak)
        memory.begin_step()
        due.append(memory.due)
        if memory.due:
            says(now, 160)
            memory.reduced(state)
        memory.end_step()
        memory.begin_view(1)
    assert due == [False, False, True, False]
    assert (tmp_path / "clear_refs").read_text() == "5"
    (result,) = memory_of_workers([memory.row()])
    assert result == WorkerMemory(0, 10, 1024, 20, 5, activations=59 * 1024, peak=900 * 1024)
    memory.begin_view(2)
    assert not memory.due
    assert memory_of_workers([StepMemory(status=tmp_path).row()]) == [], "too few steps"


def test_a_system_that_does_not_tell_is_not_guessed_at(tmp_path: Path) -> None:
    memory = StepMemory(status=tmp_path / "none")
    for _ in range(3):
        memory.begin_step()
    memory.reduced({"parameters": 1, "gradients": 0, "optimizer": 2, "copies": 0})
    memory.end_step()
    assert memory_of_workers([memory.row()]) == [WorkerMemory(0, 1, 0, 2, 0, activations=None, peak=0)]
    finished = RunFinished("", 1, 1, 1, 1.0, {}, memory=memory_of_workers([memory.row()]))
    assert "activations –" in memory_line(finished.memory)
