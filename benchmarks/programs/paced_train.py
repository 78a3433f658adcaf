"""A small network on scikit-learn's digits whose passes take a declared time: ``sample_s`` for each sample on a worker.

So that workers pay where there are fewer cores than workers: a stand-in for devices, not a measurement of any.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

import elastune

config = {"lr": 0.1, "batch_size": 128, "epochs": 4, "sample_s": 0.001}
objectives = {"accuracy": "max"}


def space(trial):
    return {
        "lr": trial.suggest_categorical("lr", [0.02, 0.05, 0.1, 0.2]),
        "epochs": trial.suggest_categorical("epochs", [2, 4, 12]),
    }


def train(session) -> None:
    config = session.config
    data = elastune.datasets.digits()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9))
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(data.train, batch_size=config["batch_size"]):
            time.sleep(len(x) * config["sample_s"])
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        right = count = 0.0
        with torch.no_grad():
            for x, y in session.batches(data.validation, batch_size=256, train=False):
                right, count = right + float((model(x).argmax(1) == y).sum()), count + len(y)
        session.report(accuracy=session.sum(right) / session.sum(count))
