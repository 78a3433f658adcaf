"""Draws outside of batches: a half of the data each epoch, noise on weights, dropout in evaluations, coins."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset, TensorDataset

from elastune.testing.faults import inject

config = {"epochs": 3, "faults": []}


def train(session) -> None:
    source = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.rand(60, 8, generator=source), torch.randint(0, 3, (60,), generator=source))
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    seen = session.track("seen", {"loss": 0.0, "steps": 0, "rate": 0.05})
    reach = inject(session)
    for _ in session.epochs(session.config["epochs"]):
        half = torch.randperm(60)[:40].tolist() if random.random() < 0.5 else np.random.permutation(60)[:40].tolist()
        for x, y in session.batches(Subset(data, half), batch_size=10):
            reach("before")
            session.backward(F.cross_entropy(model(x), y))
            reach("after")
            if session.ends_step:
                optimizer.param_groups[0]["lr"] = seen["rate"] * (1 + session.loss) * random.uniform(0.9, 1.1)
                seen |= {"loss": seen["loss"] + session.loss, "steps": seen["steps"] + 1}
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter += 1e-3 * torch.randn_like(parameter)
        results = []
        for _ in range(2):
            losses = [F.cross_entropy(model(x), y) for x, y in session.batches(data, 20, train=False)]
            results.append(session.mean(losses))
        seen["rate"] = 0.02 * results[0] + 0.02 * seen["loss"] / seen["steps"]  # of an evaluation, of all steps
        coin = float(np.random.rand()) + random.random() + float(torch.rand(1))
        session.report(loss=results[0], again=results[1], coin=coin, rate=seen["rate"])
