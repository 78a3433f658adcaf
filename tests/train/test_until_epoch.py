"""Runs that pause after an epoch and go on later: on other workers, to where an undisturbed run would have come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.journal.records import Record, Reported, RunFinished
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.checkpoints.checkpoint import complete
from elastune.train.step import StopTraining

EPOCHS = 4
TEXT = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

config = {"lr": 0.05}

def train(session):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=session.config["lr"], momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(72, 4, generator=generator), torch.randn(72, 1, generator=generator))
    for epoch in session.epochs(4):
        for x, y in session.batches(data, batch_size=16):
            optimizer.zero_grad()
            session.backward(F.mse_loss(model(x), y))
            optimizer.step()
        scheduler.step()
        session.report(epoch=epoch)
    session.report(at_the_end=1.0)
"""


@pytest.fixture
def program(tmp_path: Path) -> Program:
    (tmp_path / "mine.py").write_text(TEXT)
    return Program(tmp_path / "mine.py")


def spec(program: Program, out: Path, workers: int, **changes: Any) -> RunSpec:
    execution = ExecutionSettings(workers=workers, num_slots=4)
    return RunSpec(
        program, out, seed=5, execution=execution, elastic=Elastic(high=3), checkpoint_every_steps=0, **changes
    )


def test_pauses_do_not_show_in_the_result(cluster: LocalCluster, tmp_path: Path, program: Program) -> None:
    whole = run_job(spec(program, tmp_path / "whole", 1), cluster=cluster)
    assert not list(tmp_path.glob("whole/checkpoints/*"))
    ended: list[RunFinished] = []
    results: list[Record] = []
    for until, workers in ((1, 2), (3, 1), (3, 3), (9, 2)):
        part = spec(program, tmp_path / "parts", workers, until_epoch=until, resume=until > 1)
        ended.append(run_job(part, cluster=cluster, observe=results.append))
    assert [(end.stopped, end.steps) for end in ended] == [("until_epoch", n) for n in (5, 15, 15)] + [("complete", 20)]
    assert [end.sha256 == whole.sha256 for end in ended] == [False, False, False, True]
    assert ended[1].sha256 == ended[2].sha256
    reports = [record for record in results if isinstance(record, Reported)]
    assert [(r.epoch, r.epochs) for r in reports] == [(n, EPOCHS) for n in (1, 2, 3, 4, 4)]
    assert reports[-1].metrics == {"at_the_end": 1.0}, "what comes after the loop is run once, at the end"


def test_the_last_epoch_is_the_end(cluster: LocalCluster, tmp_path: Path, program: Program) -> None:
    run_spec = spec(program, tmp_path / "out", 2, epochs=2, until_epoch=2)
    results: list[Record] = []
    assert run_job(run_spec, cluster=cluster, observe=results.append).stopped == "complete"
    assert [record.epochs for record in results if isinstance(record, Reported)] == [2, 2, 2]
    assert not complete(tmp_path / "out" / "checkpoints")
    with pytest.raises(UserError, match="at least 1"):
        next(lone_session(tmp_path, until_epoch=0).epochs(2))


@pytest.mark.parametrize("every", [None, 0, 2])
@pytest.mark.parametrize("why", ["requested", "until_epoch"])
def test_a_pause_writes_a_checkpoint_however_often_others_are(tmp_path: Path, why: str, every: int | None) -> None:
    """With 0 none is written but that; a pause writes the epoch's only once."""
    written: list[Record] = []
    wishes = {"stop_requested": lambda: why == "requested", "until_epoch": 1 if why == "until_epoch" else None}
    session = lone_session(tmp_path, send=written.append, checkpoint_every_steps=every, **wishes)
    model = torch.nn.Linear(3, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(StopTraining):
        for _ in session.epochs(2):
            for (x,) in session.batches(TensorDataset(torch.ones(24, 3)), batch_size=8):
                session.backward(F.mse_loss(model(x), torch.ones(len(x), 1)))
                optimizer.step()
                optimizer.zero_grad()
    last = 1 if why == "requested" else 3
    assert session.stopped == why
    steps = [record.step for record in written if record.kind == "checkpointed"]
    assert steps == ([2, 3] if (why, every) == ("until_epoch", 2) else [last])
    assert complete(tmp_path / "checkpoints")[-1].name == f"step-{last:010d}"


def test_a_wider_run_pauses_where_it_was_told_to(cluster: LocalCluster, tmp_path: Path, program: Program) -> None:
    """Two workers from the start, in fast mode: the pause is the same, if not its bits."""
    run_spec = spec(program, tmp_path / "out", 2, until_epoch=2)
    run_spec = replace(run_spec, execution=replace(run_spec.execution, mode="fast"))
    end = run_job(run_spec, cluster=cluster)
    assert (end.stopped, end.steps, end.workers) == ("until_epoch", 10, 2)
