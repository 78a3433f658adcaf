"""LeNet with dropout on MNIST, or with ``--set data_set=fashion_mnist`` on Fashion-MNIST.

elastune run examples/mnist.py --workers 2 --data DIR    (DIR holds the four idx files, plain or gzipped)
"""

import torch
import torch.nn.functional as F
from torch import nn

from elastune.recipes.datasets import fashion_mnist, mnist

config = {"epochs": 2, "batch_size": 128, "lr": 0.02, "momentum": 0.9, "dropout": 0.3, "data_set": "mnist"}
objectives = {"accuracy": "max", "seconds": "min", "cost": "min"}


def space(trial):
    return {
        "batch_size": trial.suggest_categorical("batch_size", [64, 128, 256, 512, 1024, 2048]),
        "lr": trial.suggest_float("lr", 1e-3, 1.0, log=True),
        "momentum": trial.suggest_float("momentum", 0.0, 0.95),
        "dropout": trial.suggest_float("dropout", 0.0, 0.6),
    }


class LeNet(nn.Module):
    """Two convolutions and two linear layers (after LeCun et al. 1998): 431,080 parameters."""

    def __init__(self, dropout):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.drop = nn.Dropout(dropout)
        self.fc1 = nn.Linear(50 * 4 * 4, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(self.drop(F.relu(self.fc1(x.flatten(1)))))


def accuracy(session, model, data):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in session.batches(data, batch_size=500, train=False):
            correct += int((model(x).argmax(1) == y).sum())
    model.train()
    return session.sum(correct) / len(data)


def train(session):
    config = session.config
    data = fashion_mnist() if config["data_set"] == "fashion_mnist" else mnist()
    model = LeNet(config["dropout"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    model, optimizer = session.prepare(model, optimizer)
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
