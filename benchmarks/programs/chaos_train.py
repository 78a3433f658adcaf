"""``chaos.py``'s program: a small network whose dropout, batch statistics and momentum all must survive every fault."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from workload import TickLog

from elastune.recipes.datasets import digits, mnist

config = {"data_set": "mnist", "batch_size": 64, "lr": 0.02, "momentum": 0.9, "dropout": 0.3, "ticks": ""}


def make_model(dropout):
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(512, 10),
    )


def correct(session, model, data):
    model.eval()
    hits = 0
    with torch.no_grad():
        for x, y in session.batches(data, batch_size=100, train=False):
            hits += int((model(x).argmax(1) == y).sum())
    model.train()
    return session.sum(hits)


def train(session):
    asked = session.config
    data = mnist() if asked["data_set"] == "mnist" else digits()
    model = make_model(asked["dropout"])
    optimizer = torch.optim.SGD(model.parameters(), lr=asked["lr"], momentum=asked["momentum"])
    model, optimizer = session.prepare(model, optimizer)
    log = TickLog(Path(asked["ticks"]))
    for _ in session.epochs(10**9):
        for x, y in session.batches(data.train, batch_size=asked["batch_size"]):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                log.write(session.step + 1, session.size, session.rank)
        session.report(accuracy=correct(session, model, data.validation) / len(data.validation))
