"""A first program for elastune, as `elastune init` writes it. Make it yours from top to bottom.

elastune check train.py                    does it come to the same again, and on two workers?
elastune run train.py --workers 2          train once; --set lr=0.01 changes a setting
elastune tune train.py --trials 20         search the space below
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# The settings of a run, with their defaults: numbers, text, booleans, lists.
config = {"lr": 0.01, "batch_size": 64, "epochs": 5}

# What a search is to make best, of what `train` reports; elastune clocks "seconds" and "cost" itself.
objectives = {"accuracy": "max", "seconds": "min"}


def space(trial: Any) -> dict[str, Any]:
    """What a search may choose, in Optuna's language; the other settings stay as they are."""
    return {
        "lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True),
        "batch_size": trial.suggest_categorical("batch_size", [32, 64, 128]),
    }


def data() -> tuple[TensorDataset, TensorDataset]:
    """Points on a plane, inside and outside of a ring: 2,000 to train on, 500 to validate. Put yours in its place."""
    generator = torch.Generator().manual_seed(0)  # of its own: every worker has the same data
    points = torch.rand(2500, 2, generator=generator) * 4 - 2
    inside = ((points.norm(dim=1) > 0.7) & (points.norm(dim=1) < 1.6)).long()
    return TensorDataset(points[:2000], inside[:2000]), TensorDataset(points[2000:], inside[2000:])


def train(session: Any) -> None:
    """Every worker runs this, each with a session of its own (elastune.Session)."""
    settings = session.config
    train_set, validation_set = data()
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"])
    model, optimizer = session.prepare(model, optimizer)  # a scheduler that steps with batches goes in here, too

    # The batch size is that of all workers together, so their number changes no result.
    loader = DataLoader(train_set, batch_size=settings["batch_size"], shuffle=True)
    for _ in session.epochs(settings["epochs"]):  # those that a resumed run has still to do
        model.train()
        for x, y in session.batches(loader):
            session.backward(F.cross_entropy(model(x), y))  # in place of loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        right = 0
        with torch.no_grad():
            for x, y in session.batches(validation_set, batch_size=100, train=False):
                right += int((model(x).argmax(dim=1) == y).sum())  # of this worker's batches ...
        accuracy = session.sum(right) / len(validation_set)  # ... and of all
        session.report(accuracy=accuracy, evaluated_on=len(validation_set))
