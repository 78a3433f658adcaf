"""Linear regression on 400 samples: a training of some tenths of a second, reporting after each pass."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

config = {"lr": 0.05, "batch_size": 40, "epochs": 9, "pause_s": 0.003}
objectives = {"loss": "min"}


def space(trial):
    return {"lr": trial.suggest_float("lr", 0.001, 0.3, log=True)}


def data():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(400, 4, generator=generator)
    return TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]))


def train(session) -> None:
    config = session.config
    model = torch.nn.Linear(4, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=config["lr"]))
    for _ in session.epochs(config["epochs"]):
        losses = []
        for x, y in session.batches(data(), batch_size=config["batch_size"]):
            loss = F.mse_loss(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            time.sleep(config["pause_s"])
        session.report(loss=session.mean(losses))
