"""Handwritten digits (8x8 pixels, 1,000 of them to train on): small enough to search in seconds on two cores.

elastune run examples/digits.py --workers 2
elastune frontier examples/digits.py --workers 1,2,4,8,16 --target 0.95 --budget 3m
"""

import torch
import torch.nn.functional as F
from torch import nn

from elastune.recipes.datasets import digits

config = {
    "epochs": 12,
    "batch_size": 32,
    "optimizer": "sgd",
    "lr": 0.02,
    "momentum": 0.9,
    "dropout": 0.2,
    "width": 24,
}
objectives = {"accuracy": "max", "seconds": "min", "cost": "min"}


def space(trial):
    return {
        "batch_size": trial.suggest_categorical("batch_size", [32, 64, 128, 256, 512]),
        "optimizer": trial.suggest_categorical("optimizer", ["sgd", "adam"]),
        "lr": trial.suggest_float("lr", 0.001, 0.2, log=True),
        "momentum": trial.suggest_float("momentum", 0.3, 0.95),
        "dropout": trial.suggest_float("dropout", 0.0, 0.3),
    }


def make_model(width, dropout):
    # Normalised by group, not by batch: what a sample goes through must not depend on its neighbours in a batch.
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.GroupNorm(4, width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.GroupNorm(4, 2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * width, 10),
    )


def make_optimizer(model, config):
    if config["optimizer"] == "adam":
        return torch.optim.Adam(model.parameters(), lr=config["lr"], betas=(config["momentum"], 0.99))
    return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])


def accuracy(session, model, data):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in session.batches(data, batch_size=100, train=False):
            correct += int((model(x).argmax(1) == y).sum())
    model.train()
    return session.sum(correct) / len(data)


def train(session):
    config, data = session.config, digits()
    model = make_model(config["width"], config["dropout"])
    model, optimizer = session.prepare(model, make_optimizer(model, config))
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(data.train, batch_size=config["batch_size"]):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        session.report(
            accuracy=accuracy(session, model, data.validation),
            test_accuracy=accuracy(session, model, data.test),
            evaluated_on={"accuracy": len(data.validation), "test_accuracy": len(data.test)},
        )
