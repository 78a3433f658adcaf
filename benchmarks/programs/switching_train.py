"""``switching.py``'s program: a small CNN on Fashion-MNIST, or digits, that notes when each step was done.

A sample takes a declared time (``workload.emulate``), so that more workers are faster than this machine's cores allow.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from workload import TickLog, emulate

import elastune

config = {"data": "fashion_mnist", "samples": 12_800, "batch_size": 256, "lr": 0.06, "epochs": 1, "ticks": ""}
objectives = {"accuracy": "max"}


def images(part, count):
    inputs, labels = (tensor[:count] for tensor in part.tensors)
    return TensorDataset(F.interpolate(inputs, size=28) if inputs.shape[-1] != 28 else inputs, labels)


def train(session):
    config = session.config
    sets = getattr(elastune.datasets, config["data"])()
    data, test = images(sets.train, config["samples"]), images(sets.test, 10_000)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(800, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, config["epochs"] * (len(data) // config["batch_size"])
    )
    model, optimizer, decay = session.prepare(model, optimizer, decay)
    log, result = TickLog(Path(config["ticks"])), 0
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(data, batch_size=config["batch_size"], drop_last=True):
            if session.step > result:  # those of a round of learners count together, when it is over
                result = session.step
                log.write(result, session.size, session.rank)
            emulate(len(x))
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
    log.write(session.step, session.size, session.rank)
    right = 0.0
    with torch.no_grad():
        for x, y in session.batches(test, batch_size=1_000, train=False):
            right += float((model(x).argmax(dim=1) == y).sum())
    session.report(accuracy=session.sum(right) / len(test))
