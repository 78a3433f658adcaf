"""A search over mechanisms and meshes on real workers: one training, so one result, by whatever means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastune.core.journal.files import read
from elastune.core.journal.records import TrialFinished, TrialStarted
from elastune.core.run import ExecutionSettings
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

PROGRAM = """
import elastune
import torch
from torch import nn

config = {"lr": 0.05}
objectives = {"loss": "min", "seconds": "min"}

def space(trial):
    return elastune.suggest_execution(
        trial, mechanisms=["replicated", "zero"], meshes=["data=2", "shard=2"], copies=[1, 2], micro_batches=[2]
    )

def train(session):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 2))
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=session.config["lr"]))
    generator = torch.Generator().manual_seed(2)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6, generator=generator), torch.arange(64) % 2)
    for _ in session.epochs(1):
        for x, y in session.batches(data, 16):
            loss = nn.functional.cross_entropy(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        session.report(loss=session.mean(float(loss)))
"""


def test_every_mechanism_and_mesh_of_a_search_gives_the_same_weights(
    program: Any, tmp_path: Path, cluster: LocalCluster
) -> None:
    out = tmp_path / "study"
    execution = ExecutionSettings(mode="exact", num_slots=4)
    tune(StudyRequest(program(PROGRAM), out, sampler="grid", trials=9, workers=2, execution=execution), cluster=cluster)
    records = [entry.record for entry in read(out / "journal.jsonl")]
    begun = {r.trial: r.execution for r in records if isinstance(r, TrialStarted)}
    ended = [r for r in records if isinstance(r, TrialFinished)]
    assert {(m["mechanism"], m.get("mesh"), m.get("copies")) for m in begun.values()} == {
        ("replicated", "data=2", None),
        ("zero", "data=2", 1),
        ("zero", "data=2", 2),
        ("zero", "shard=2", 1),
        ("zero", "shard=2", 2),
    }
    assert [r.reason for r in ended if r.state != "complete"] == []
    assert len({r.run.sha256 for r in ended if r.run is not None}) == 1
