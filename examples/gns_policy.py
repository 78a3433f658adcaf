"""A policy of your own: KungFu's GNSPolicy, nearly verbatim, on handwritten digits.

elastune run examples/gns_policy.py --workers 1:3 --policy GNSPolicy

It adds a worker whenever the noise scale has risen. Single readings of it swing by half their size, so this ratchets
upwards on noise alone; `--policy gns` is what to use: it compares with the batch, heeds the error, and waits.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import elastune
from elastune.recipes.datasets import digits

config = {"epochs": 12, "batch_size": 64, "lr": 0.05}


class GNSPolicy(elastune.Policy):
    def __init__(self):
        self.prev = math.inf  # there is nothing to compare the first reading with

    def after_step(self, run):
        gns = run.allreduce(run.grad_noise_scale(), "avg")
        if gns > self.prev and run.size() < run.limits.high:
            run.resize(run.size() + 1)
        self.prev = gns


def train(session):
    config, data = session.config, digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9))
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(data.train, batch_size=config["batch_size"]):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        correct = 0
        with torch.no_grad():
            for x, y in session.batches(data.validation, batch_size=100, train=False):
                correct += int((model(x).argmax(1) == y).sum())
        session.report(accuracy=session.sum(correct) / len(data.validation))
