"""The train.py of the pages: as small as it can be, with all that a page asks of it. Stands alone, for workers."""

import argparse
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fast", action="store_true")
parser.add_argument("--data", default="photos")
args = parser.parse_args()

config = {"batch_size": 32, "epochs": 4, "width": 8}
objectives = {"accuracy": "max", "seconds": "min"}


def space(trial):
    return {
        "lr": trial.suggest_float("lr", 1e-3, 1, log=True),
        "batch_size": trial.suggest_categorical("batch_size", [16, 32]),
    }


def samples(seed):
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


DATA = {"train": samples(0), "validation": samples(1), "test": samples(2), "test_rotated": samples(3)}


def build(config):
    layers = {"encoder": nn.Linear(6, config["width"]), "bend": nn.Tanh(), "head": nn.Linear(config["width"], 3)}
    return nn.Sequential(OrderedDict(layers))


def surrogate(config, workers):
    for epoch in range(1, 21):
        yield 3600 / workers + 0.1, {"accuracy": 1 - 0.5 / epoch}


def predict(model, name):
    data = DATA.get(name)
    return None if data is None else ([model(x) for x, _ in DataLoader(data, 64)], data.tensors[1])


def evaluated(session, model, data):
    model.eval()
    with torch.no_grad():
        pairs = [(model(x), y) for x, y in session.batches(data, batch_size=64, train=False)]
    model.train()
    return [out for out, _ in pairs], [y for _, y in pairs]


def accuracy(session, model, data):
    outputs, targets = evaluated(session, model, data)
    right = sum(int((out.argmax(1) == y).sum()) for out, y in zip(outputs, targets, strict=True))
    return session.sum(right) / len(data)


def train(session):
    config = session.config
    model = build(config)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=config["lr"]))
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(DATA["train"], batch_size=config["batch_size"]):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        session.predictions("validation", *evaluated(session, model, DATA["validation"]))
        session.report(
            accuracy=accuracy(session, model, DATA["validation"]),
            test_accuracy=accuracy(session, model, DATA["test"]),
        )
    session.predictions("test", *evaluated(session, model, DATA["test"]))
