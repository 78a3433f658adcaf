"""A CNN for MNIST whose two largest layers, which hold 99 % of its parameters, are split over workers; each worker has
all of the rest. On the embedded digits, or on MNIST.

elastune run examples/split_cnn.py --mesh tensor=2                     two workers, each computes half of these layers
elastune run examples/split_cnn.py --workers 1 --mechanism tensor      one worker: the same bits
elastune run examples/split_cnn.py --mesh tensor=2 --set trunk=data    each has the rest for samples of its own: again
elastune run examples/split_cnn.py --mesh tensor=2 --set data_set=mnist --data DIR
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import elastune
from elastune.parallel.mechanisms.tensor.tensor_parallel import DataParallelTrunk
from elastune.recipes.datasets import digits, mnist

config = {"epochs": 3, "batch_size": 32, "lr": 0.02, "momentum": 0.9, "data_set": "digits", "trunk": "whole"}
choices = {"data_set": ("digits", "mnist"), "trunk": ("whole", "data")}


def network():
    """Two convolutions, and a pair of layers with nearly all parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 3072),
        nn.ReLU(),
        nn.Linear(3072, 10),
    )


def images(part):
    """Its images at MNIST's size: digits have 8 x 8 pixels."""
    pixels, labels = part.tensors
    return TensorDataset(F.interpolate(pixels, size=(28, 28), mode="bilinear"), labels)


def accuracy(session, model, data):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in session.batches(data, batch_size=100, train=False):
            correct += int((model(x).argmax(1) == y).sum())
    model.train()
    return session.sum(correct) / len(data)


def train(session):
    config = session.config
    for name, known in choices.items():
        if config[name] not in known:
            rule, fix = f"{name} is {' or '.join(known)}", f"use --set {name}={known[0]}"
            raise elastune.UserError(rule, repr(config[name]), fix)
    data = mnist() if config["data_set"] == "mnist" else digits()
    train_set, validation_set = images(data.train), images(data.validation)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    # Without a plan the pair is found by its kinds: two linear layers with an activation between them.
    plan = DataParallelTrunk() if config["trunk"] == "data" else None
    model, optimizer = session.prepare(model, optimizer, plan=plan)
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(train_set, batch_size=config["batch_size"]):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        session.report(accuracy=accuracy(session, model, validation_set))
