"""Three classes of points on a plane, told apart by a net of one hidden layer: a training of some milliseconds.

What it predicts of the data that it does not train on is kept, so that ensembles can be made of its trials. With
``config["marker"]`` a worker dies while it evaluates, once. With ``config["source"]`` it takes the weights there, but
for what is to be ``fresh``, and trains them at a tenth of the rate.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.programs.disturbed import CONFIG, disturb
from torch import nn
from torch.utils.data import TensorDataset

config = {"lr": 0.1, "batch_size": 40, "epochs": 2, "width": 8, "seed": 0, "norm": False, "marker": ""}
config |= {"source": "", "fresh": [], **CONFIG}
objectives = {"accuracy": "max"}


def space(trial):
    return {"lr": trial.suggest_float("lr", 0.001, 1.0, log=True), "seed": trial.suggest_int("seed", 0, 99)}


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    centres = torch.tensor([[0.0, 1.0], [1.0, -0.5], [-1.0, -0.5]])
    return TensorDataset(centres[labels] + 0.8 * torch.randn(count, 2, generator=generator), labels)


def build(config) -> nn.Module:
    torch.manual_seed(config["seed"])
    width = int(config["width"])
    norm = [nn.BatchNorm1d(width)] if config["norm"] else []
    return nn.Sequential(nn.Linear(2, width), *norm, nn.Tanh(), nn.Linear(width, 3))


DATA = {"train": (200, 0), "validation": (100, 1), "test": (100, 2), "test_later": (30, 3)}


def predict(model, name):
    """What ``elastune predict`` asks for."""
    if name not in DATA:
        return None
    x, y = points(*DATA[name]).tensors
    return [model(part) for part in x.split(16)], y


def die_once(session) -> None:
    """In the evaluation of the second epoch, where ``config["marker"]`` names a file that is not there yet."""
    marker = session.config["marker"]
    if marker and session.epoch == 2 and session.rank == 1 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def evaluated(session, model, data):
    model.eval()
    outputs, targets = [], []
    with torch.no_grad():
        for x, y in session.batches(data, batch_size=16, train=False):
            outputs.append(model(x))
            targets.append(y)
            die_once(session)
    model.train()
    return outputs, targets


def train(session) -> None:
    config = session.config
    model = build(config)
    groups = [{"params": list(model.parameters()), "lr": config["lr"]}]
    if config["source"]:
        fresh = session.start_from(model, config["source"], fresh=config["fresh"]).fresh
        taken = [p for name, p in model.named_parameters() if name not in fresh]
        rest = [p for name, p in model.named_parameters() if name in fresh]
        groups = [{"params": taken, "lr": config["lr"] / 10}, *([{"params": rest, "lr": config["lr"]}] if rest else [])]
    model, optimizer = session.prepare(model, torch.optim.SGD(groups))
    validation = points(100, seed=1)
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(points(200, seed=0), batch_size=config["batch_size"]):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            disturb(session, steps=200 // config["batch_size"] * config["epochs"])
        outputs, targets = evaluated(session, model, validation)
        session.predictions("validation", outputs, targets)
        hits = [(o.argmax(1) == t).double() for o, t in zip(outputs, targets, strict=True)]
        session.report(accuracy=session.mean(hits), evaluated_on=len(validation))
    session.predictions("test", *evaluated(session, model, points(100, seed=2)))
