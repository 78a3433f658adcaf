"""A small net on a sample of Fashion-MNIST (or the digits), or on scikit-learn's diabetes table: see ensembles.py."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastune.recipes import datasets
from elastune.recipes.datasets import Splits

config = {
    "task": "fashion",
    "part": 0,  # which sample of the data
    "train": 4000,
    "selection": 2000,
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "dropout": 0.1,
    "batch_size": 64,
    "epochs": 4,
    "init": 0,
    "sample_s": 0.0,  # declared: each sample takes so much longer, as on a device beside the cores
}
objectives = {"score": "max"}


def space(trial):
    return {
        "lr": trial.suggest_float("lr", 0.003, 0.3, log=True),
        "momentum": trial.suggest_float("momentum", 0.5, 0.95),
        "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True),
        "dropout": trial.suggest_float("dropout", 0.0, 0.5),
        "batch_size": trial.suggest_categorical("batch_size", [32, 64, 128]),
        "init": trial.suggest_int("init", 0, 999),
    }


def sampled(data: TensorDataset, count: int, part: int) -> TensorDataset:
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(part))[:count]
    return TensorDataset(*(tensor[order] for tensor in data.tensors))


def diabetes(part: int) -> Splits:
    """442 patients; which of them train, select and judge is drawn by ``part``."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(part))
    inputs = torch.tensor(x, dtype=torch.float32)[order] * 20
    targets = torch.tensor((y - 152) / 77, dtype=torch.float32).reshape(-1, 1)[order]
    cuts = [(0, 222), (222, 332), (332, 442)]
    return Splits(*(TensorDataset(inputs[a:b], targets[a:b]) for a, b in cuts))


def splits(config) -> Splits:
    if config["task"] == "diabetes":
        return diabetes(config["part"])
    result = datasets.digits() if config["task"] == "digits" else datasets.fashion_mnist()
    part = config["part"]
    chosen = sampled(result.train, config["train"], part), sampled(result.validation, config["selection"], part)
    return Splits(*chosen, result.test)


def build(config) -> nn.Module:
    torch.manual_seed(config["init"])
    if config["task"] == "diabetes":
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(config["dropout"]), nn.Linear(32, 1))
    # Normalised by group: a soup whose statistics of batches are estimated anew has that beside being a mean.
    inner = 2 if config["task"] == "digits" else 7
    layers = [nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.ReLU()]
    layers += [nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(2, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(config["dropout"]), nn.Linear(16 * inner * inner, 10))


def score(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One a row: whether it is right, or minus the squared error."""
    if targets.is_floating_point():
        return -((outputs - targets) ** 2).mean(1)
    return (outputs.argmax(1) == targets).float()


def evaluated(session, model, data):
    model.eval()
    outputs, targets = [], []
    with torch.no_grad():
        for x, y in session.batches(data, batch_size=500, train=False):
            outputs.append(model(x))
            targets.append(y)
    model.train()
    return outputs, targets


def train(session) -> None:
    config, data = session.config, splits(session.config)
    model = build(config)
    sgd = torch.optim.SGD(
        model.parameters(), lr=config["lr"], momentum=config["momentum"], weight_decay=config["weight_decay"]
    )
    model, optimizer = session.prepare(model, sgd)
    loss = F.mse_loss if config["task"] == "diabetes" else F.cross_entropy
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(data.train, batch_size=config["batch_size"], drop_last=True):
            time.sleep(len(x) * config["sample_s"])
            session.backward(loss(model(x), y))
            session.clip_grad_norm_(5.0)
            optimizer.step()
            optimizer.zero_grad()
    outputs, targets = evaluated(session, model, data.validation)
    session.predictions("validation", outputs, targets)
    session.report(score=session.mean([score(o, t) for o, t in zip(outputs, targets, strict=True)]))
    session.predictions("test", *evaluated(session, model, data.test))
