"""A small network with BatchNorm and dropout on handwritten digits: what a pass holds shows in what is trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset

from elastune.recipes.datasets import digits

config = {"lr": 0.05, "batch_size": 16, "epochs": 2, "width": 4, "dropout": 0.3}
objectives = {"accuracy": "max"}


def space(trial):
    return {"lr": trial.suggest_float("lr", 0.01, 0.3, log=True), "dropout": trial.suggest_float("dropout", 0.0, 0.5)}


def share_correct(session, model, data):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in session.batches(data, batch_size=100, train=False):
            correct += int((model(x).argmax(1) == y).sum())
    model.train()
    return session.sum(correct) / len(data)


def train(session):
    config, data = session.config, digits()
    width = config["width"]
    model = nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(config["dropout"]), nn.Linear(16 * width, 10)),
    )
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9))
    for _ in session.epochs(config["epochs"]):
        losses = []
        for x, y in session.batches(Subset(data.train, range(512)), batch_size=config["batch_size"]):
            loss = F.cross_entropy(model(x), y)
            session.backward(loss)
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        session.report(
            accuracy=share_correct(session, model, data.validation),
            test_accuracy=share_correct(session, model, data.test),
            training_loss=session.mean(losses),
        )
