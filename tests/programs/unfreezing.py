"""A head that trains first, and what it stands on an epoch later: some milliseconds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

config = {"unfreeze": {"2.*": 0, "0.weight": 1, "*": None}, "epochs": 3}


def train(session) -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(40, 4, generator=generator), torch.randn(40, 2, generator=generator))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    session.unfreeze(model, session.config["unfreeze"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(session.config["epochs"]):
        for x, y in session.batches(data, batch_size=16):
            session.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
