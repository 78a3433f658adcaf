"""A small classifier on one of two data sets: digits, or points in bands with wrong labels among them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastune.recipes.datasets import digits

config = {"data_set": "digits", "batch_size": 16, "lr": 0.05, "epochs": 1}
BANDS, WRONG = 4, 0.2


def bands() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(1000, 8, generator=generator)
    labels = (points.sum(1) * 2).long() % BANDS
    wrong = torch.rand(1000, generator=generator) < WRONG
    return TensorDataset(points, torch.where(wrong, labels.flip(0), labels))


def train(session) -> None:
    config = session.config
    data = digits().train if config["data_set"] == "digits" else bands()
    features = data.tensors[0][0].numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 10))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9))
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(data, batch_size=config["batch_size"]):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
