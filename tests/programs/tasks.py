"""A regression, or classes of the tokens of sequences, by ``config["task"]``: a training of some milliseconds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

config = {"task": "regression", "lr": 0.05, "epochs": 4, "seed": 0}
objectives = {"loss": "min"}
IGNORED = -100


def space(trial):
    return {"seed": trial.suggest_categorical("seed", [0, 1, 2, 3])}


def values(count: int, seed: int) -> TensorDataset:
    """Two numbers of three, and noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1) + 0.1 * torch.randn(count, 2, generator=generator)
    return TensorDataset(x, y)


def sequences(count: int, seed: int) -> TensorDataset:
    """Tokens from 1 to 5, of which each is to be told modulo 3; behind a sequence's end there is padding."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 6, (count, 7), generator=generator)
    ends = torch.randint(3, 8, (count, 1), generator=generator)
    y = torch.where(torch.arange(7) < ends, x % 3, IGNORED)
    return TensorDataset(torch.where(y == IGNORED, 0, x), y)


def build(config) -> nn.Module:
    torch.manual_seed(config["seed"])
    if config["task"] == "regression":
        return nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 2))
    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3))


def train(session) -> None:
    config = session.config
    regression = config["task"] == "regression"
    made = values if regression else sequences
    model = build(config)
    model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=config["lr"]))

    def loss_of(said, y):
        return F.mse_loss(said, y) if regression else F.cross_entropy(said.flatten(0, 1), y.flatten())

    def told(name: str, data: TensorDataset) -> float:
        outputs, targets = [], []
        with torch.no_grad():
            for x, y in session.batches(data, batch_size=25, train=False):
                outputs.append(model(x))
                targets.append(y)
        session.predictions(name, outputs, targets)
        return session.mean([loss_of(said, y) for said, y in zip(outputs, targets, strict=True)])

    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(made(200, 0), batch_size=20):
            session.backward(loss_of(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        session.report(loss=told("validation", made(100, 1)))
    told("test", made(100, 2))
