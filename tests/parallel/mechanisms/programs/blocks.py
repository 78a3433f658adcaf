"""A small network in blocks, a schedule, an evaluation of unequal shares; config: a worker that dies, batch size."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

config = {"dies": -1, "batch_size": 25}


def train(session: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator)
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(6, 15), *(nn.Sequential(nn.Linear(15, 15), nn.Tanh()) for _ in range(2)))
    model.append(nn.Linear(15, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    model, optimizer, schedule = session.prepare(model, optimizer, schedule)
    for _ in session.epochs(3):
        for inputs, labels in session.batches(TensorDataset(x, y), session.config["batch_size"]):
            session.backward(F.cross_entropy(model(inputs), labels))
            if (session.rank, session.step) == (1, session.config["dies"]):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        right = loss = 0.0
        with torch.no_grad():
            for inputs, labels in session.batches(TensorDataset(x, y), 45, train=False):
                result = model(inputs)
                right += float((result.argmax(1) == labels).sum())
                loss += float(F.cross_entropy(result, labels, reduction="sum"))
        model.train()
        session.report(right=session.sum(right), loss=session.sum(loss))
