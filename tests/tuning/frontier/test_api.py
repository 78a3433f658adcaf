"""``elastune.find_frontier`` asks what ``elastune frontier`` asks, and answers with the same record."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import elastune
from elastune.cli import main
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import FrontierFound
from elastune.runtime.clusters.kind import ClusterRequest
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.study.request import FrontierRequest

CLUSTER = "hosts:7070,token_file=token"
PROGRAM = """
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

config = {"lr": 0.05, "batch_size": 8, "epochs": 2}
objectives = {"fit": "max"}

def space(trial):
    return {"lr": trial.suggest_categorical("lr", [0.04]), "batch_size": 8}

def train(session):
    x = torch.linspace(-1, 1, 64).reshape(64, 1)
    model, optimizer = torch.nn.Linear(1, 1), None
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=session.config["lr"]))
    for _ in session.epochs(session.config["epochs"]):
        for a, b in session.batches(TensorDataset(x, 2 * x), batch_size=session.config["batch_size"]):
            session.backward(mse_loss(model(a), b))
            optimizer.step()
            optimizer.zero_grad()
        session.report(fit=1.0 - float(mse_loss(model(x), 2 * x)))
"""


@pytest.fixture
def train(tmp_path: Path) -> Any:
    path = tmp_path / "scaling.py"
    path.write_text(PROGRAM)
    spec = importlib.util.spec_from_file_location("scaling", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module
    spec.loader.exec_module(module)
    yield module.train
    del sys.modules["scaling"]


def test_it_asks_what_the_command_line_asks(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[FrontierRequest, object]] = []

    def note(request: FrontierRequest, *, cluster: object = None, **_: object) -> None:
        asked.append((request, cluster))
        raise UserError("asked", "enough", "nothing")

    monkeypatch.setattr("elastune.tuning.frontier.find_frontier.frontier", note)
    words = ["--workers", "1,2", "--mesh", "data=2,shard=2", "--target", "0.9", "--budget", "7s", "--seeds", "2"]
    words += [
        "--grace",
        "60s",
        "--cluster",
        CLUSTER,
        "--price",
        "2.5",
        "--stopping",
        "asha",
        "--set",
        "lr=0.1",
        "--short",
    ]
    assert main(["frontier", str(tmp_path / "scaling.py"), *words, "--out", str(tmp_path / "out")]) == 2
    with pytest.raises(UserError, match="asked"):
        elastune.find_frontier(
            train,
            workers=(1, 2),
            meshes=["data=2,shard=2"],
            target=0.9,
            budget_s=7.0,
            short=True,
            seeds=2,
            grace_s=60.0,
            cluster=CLUSTER,
            price_per_worker_hour=2.5,
            stopping="asha",
            config={"lr": 0.1},
            out=tmp_path / "out",
        )
    (by_words, there), (by_call, here) = asked
    assert replace(by_words, program=by_call.program) == by_call
    assert by_words.program.path == by_call.program.path
    assert isinstance(there, ClusterRequest)
    assert isinstance(here, ClusterRequest)
    assert there.kind == here.kind
    assert replace(there.access, notify=print) == replace(here.access, notify=print)  # to the terminal, or by print


def test_what_is_wrong_is_told_before_anything_runs(train: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="worker counts must ascend"):
        elastune.find_frontier(train, workers=(2, 1), out=tmp_path / "out")
    with pytest.raises(UserError, match="grace_s must be from 0"):
        elastune.find_frontier(train, grace_s=-1.0, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_answer_is_the_record_of_its_journal(
    train: Any, tmp_path: Path, cluster: LocalCluster, forked_from: Callable[..., AbstractContextManager[None]]
) -> None:
    with forked_from(cluster):
        found = elastune.find_frontier(
            train, workers=(1, 2), budget_s=90, sampler="grid", seeds=2, target=0.5, out=tmp_path / "out"
        )
    assert {(row.role, row.workers) for row in found.rows} >= {("naive", 1), ("naive", 2)}
    assert found.pick is not None
    assert found.command.startswith("elastune run ")
    told = [entry.record for entry in read(tmp_path / "out" / "journal.jsonl")]
    assert [record for record in told if isinstance(record, FrontierFound)] == [found]
