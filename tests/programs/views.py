"""Four classes that two inputs tell apart, each half of it; a part is shown one of them: some milliseconds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

config = {"inputs": "first", "epochs": 3}
objectives = {"accuracy": "max"}
VIEWS = {"first": [0], "second": [1]}


def space(trial):
    return {"inputs": trial.suggest_categorical("inputs", list(VIEWS))}


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    centres = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    return TensorDataset(centres[labels] + 0.2 * torch.randn(count, 2, generator=generator), labels)


def view(config, x):
    return x[:, VIEWS[config["inputs"]]]


def build(config) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def train(session) -> None:
    model = build(session.config)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    for _ in session.epochs(session.config["epochs"]):
        for x, y in session.batches(points(160, 0), batch_size=16):
            session.backward(F.cross_entropy(model(view(session.config, x)), y))
            optimizer.step()
            optimizer.zero_grad()
        session.report(accuracy=0.5)
