"""A CNN whose FC layers are divided; what is before and behind them is data parallel where the plan says so."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

from elastune.parallel.mechanisms.tensor.tensor_parallel import DataParallelTrunk

config = {"trunk": True, "optimizer": "adamw"}
SAMPLES = 60


class Cnn(nn.Module):
    """BatchNorm and dropout in the trunk, and in what is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout2d(0.2), nn.MaxPool2d(2), nn.Flatten()
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.2), nn.Linear(54, 410), nn.BatchNorm1d(410), nn.ReLU(), nn.Dropout(0.3), nn.Linear(410, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.classifier(self.features(x)), 1)


def train(session: Any) -> None:
    model: nn.Module = Cnn()
    optimizer: optim.Optimizer = optim.AdamW(model.parameters(), lr=0.01)
    if session.config["optimizer"] == "sgd":
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plan = DataParallelTrunk() if session.config["trunk"] else None
    model, optimizer = session.prepare(model, optimizer, plan=plan)
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
    samples, norms = TensorDataset(torch.randn(SAMPLES, 1, 8, 8, generator=generator), labels), 0.0
    for _ in session.epochs(2):
        trained: list[torch.Tensor] = []
        for x, y in session.batches(samples, batch_size=25):
            output = model(x)
            trained.append(F.nll_loss(output.detach(), y, reduction="none").double())
            session.backward(F.nll_loss(output, y))
            norms += session.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = loss = 0.0
        with torch.no_grad():
            for x, y in session.batches(samples, batch_size=13, train=False):
                output = (model(x) + model(x.flip(3))) / 2
                right += float((output.argmax(1) == y).sum())
                loss += float(F.nll_loss(output, y, reduction="sum"))
            for i, (x, _) in enumerate(session.batches(samples, batch_size=13, train=False)):
                if i:  # some workers have no such batch, and see the pass to its end
                    break
                model(x)
        model.train()
        session.report(
            accuracy=session.sum(right) / SAMPLES,
            loss=session.sum(loss) / SAMPLES,
            norms=norms,
            samples=session.sum(float(sum(map(len, trained)))),
        )
