"""Handwritten digits read row by row, from top to bottom, by a recurrent network (a GRU).

elastune run examples/rows.py --workers 2
elastune tune examples/rows.py --workers 2 --trials 12
"""

import torch
import torch.nn.functional as F
from torch import nn

import elastune

config = {"epochs": 8, "batch_size": 32, "lr": 0.01, "hidden": 48, "cell": "gru"}
objectives = {"accuracy": "max", "seconds": "min"}


def space(trial):
    return {
        "cell": trial.suggest_categorical("cell", ["gru", "lstm"]),
        "hidden": trial.suggest_int("hidden", 16, 96, log=True),
        "lr": trial.suggest_float("lr", 1e-3, 5e-2, log=True),
    }


class Reader(nn.Module):
    def __init__(self, cell, hidden):
        super().__init__()
        self.recurrent = {"gru": nn.GRU, "lstm": nn.LSTM}[cell](8, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, images):
        states, _ = self.recurrent(images.squeeze(1))  # (n, 8 rows, 8 pixels) -> (n, 8 rows, hidden)
        return self.head(states[:, -1])


def train(session):
    config, data = session.config, elastune.datasets.digits()
    model = Reader(config["cell"], config["hidden"])
    model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=config["lr"]))
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(data.train, batch_size=config["batch_size"]):
            session.backward(F.cross_entropy(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = 0
        with torch.no_grad():
            for x, y in session.batches(data.validation, batch_size=256, train=False):
                right += int((model(x).argmax(1) == y).sum())
        model.train()
        session.report(accuracy=session.sum(right) / len(data.validation))
