"""A classifier with dropout and BatchNorm, on data made up by a formula: the loop that has no slots in mind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

BATCH, EPOCHS = 16, 3
config = {"epochs": EPOCHS}


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(144, 5)
    )


def data() -> TensorDataset:
    """90 samples: the last batch of an epoch is a partial one."""
    x = torch.arange(90.0 * 64).reshape(90, 1, 8, 8).mul(0.37).sin()
    return TensorDataset(x, x.flatten(1).sum(1).mul(10).long() % 5)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(session) -> None:
    model = net()
    model, optimizer = session.prepare(model, optimizer_of(model))
    for _ in session.epochs(session.config["epochs"]):
        for x, y in session.batches(data(), batch_size=BATCH):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        session.report(step=session.step)
