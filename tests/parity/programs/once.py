"""Lines that are added to a file at the end of steps and of epochs: each at most once, whoever is to write it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from elastune.testing.faults import inject

config = {"file": "", "faults": []}


def train(session) -> None:
    def told(name: str) -> None:
        if session.once(name):
            reach("marked")
            with Path(session.config["file"]).open("a") as file:
                file.write(f"{name}\n")

    x = torch.linspace(0, 1, 96).view(48, 2)
    model = nn.Linear(2, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reach = inject(session)
    told("begun")
    for epoch in session.epochs(3):
        for part, target in session.batches(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16):
            session.backward(mse_loss(model(part), target))
            reach("before")
            told(f"step-{session.step + 1}")
            optimizer.step()
            optimizer.zero_grad()
        losses = [mse_loss(model(part), part) for part, _ in session.batches(TensorDataset(x, x), 16, train=False)]
        session.report(loss=session.mean(losses))
        reach("reported")
        told(f"epoch-{epoch}")
