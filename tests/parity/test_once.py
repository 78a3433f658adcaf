"""What a program does once: never twice, whoever dies and however often the run is resumed."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.elastic_runs import Runs
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job

PROGRAM = Program(Path(__file__).parent / "programs" / "once.py")
LINES = sorted(["begun", *(f"step-{n}" for n in range(1, 10)), *(f"epoch-{n}" for n in range(3))])


@pytest.mark.parametrize(
    ("faults", "lost", "missing"),
    [
        (["kill 0 4 before", "kill 1 6 reported"], [0, 1], []),  # somebody else comes to that line
        ([f"kill {worker} 4 marked" for worker in range(4)], None, ["step-5"]),  # it was begun by who was lost
    ],
)
def test_each_line_is_written_once(
    cluster: LocalCluster, tmp_path: Path, faults: list[str], lost: list[int] | None, missing: list[str]
) -> None:
    file = tmp_path / "lines"
    ran = Runs(cluster, tmp_path, PROGRAM)(4, file=str(file), faults=faults)
    assert sorted([*file.read_text().splitlines(), *missing]) == LINES
    assert lost in (ran.lost, None)
    assert len(ran.lost) == len(lost or missing)


def test_a_resumed_run_does_nothing_again(cluster: LocalCluster, tmp_path: Path) -> None:
    file, checkpoints = tmp_path / "lines", tmp_path / "out" / "checkpoints"
    spec = RunSpec(
        PROGRAM,
        tmp_path / "out",
        config={"file": str(file), "faults": []},
        execution=ExecutionSettings(workers=2, num_slots=4),
    )
    run_job(replace(spec, max_steps=5, checkpoint_every_steps=3), cluster=cluster)
    assert "step-5" in file.read_text().splitlines()
    shutil.rmtree(max(checkpoints.iterdir()))  # that of its end: from here on it is as if it had been killed
    resumed = run_job(replace(spec, resume=True), cluster=cluster)
    assert (resumed.steps, len(list(checkpoints.iterdir())) > 0) == (9, True)
    assert sorted(file.read_text().splitlines()) == LINES
    assert {mark.name for mark in (tmp_path / "out" / "once").iterdir()} == set(LINES)


def test_it_is_named_by_what_may_be_a_file(tmp_path: Path) -> None:
    session = lone_session(tmp_path)
    assert session.once("mail-1")
    assert not session.once("mail-1")
    assert "worker 0, after step 0" in (tmp_path / "once" / "mail-1").read_text()
    for name in ("", "../mail", "a b", "a" * 81, 3):
        with pytest.raises(UserError, match="up to 80 letters, digits"):
            session.once(name)  # type: ignore[arg-type]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "once").write_text("a file where a folder is to be")
    with pytest.raises(UserError, match=r"must be writable.*another --out"):
        lone_session(tmp_path / "other").once("mail")


def test_what_could_not_be_marked_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, on which there is room for a name and not for its content."""

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left"):
            lone_session(tmp_path).once("mail")
    assert lone_session(tmp_path).once("mail")


def test_a_run_folder_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    session = lone_session(tmp_path / "out")
    assert session.once("first")
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(UserError, match="removed or replaced"):
        session.once("mail")


def test_the_batch_that_completes_a_step_is_asked_for(tmp_path: Path) -> None:
    session = lone_session(tmp_path, execution=ExecutionSettings(num_slots=4))
    model = nn.Linear(2, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    asked = []
    for _ in session.epochs(1):
        for (x,) in session.batches(TensorDataset(torch.ones(8, 2)), batch_size=8):
            session.backward(model(x).square().mean())
            asked.append(session.once("first"))
            optimizer.step()
            optimizer.zero_grad()
    assert asked == [False, False, False, True]
