"""What a pipeline cannot do, or what fails on one stage of it alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

config = {"trouble": "", "at": 4}


class Fails(nn.Module):
    """At its third batch, or where only a trace would go."""

    def __init__(self, trouble: str) -> None:
        super().__init__()
        self.trouble, self.calls = trouble, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.trouble == "fails" and self.calls == 3:
            raise ValueError("no third batch here")
        return x


class CountsAgain(nn.Module):
    """In the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.norm, x, use_reentrant=False)


class Branches(nn.Module):
    """On values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x if x.sum() > 0 else -x)


def train(session: Any) -> None:
    trouble = session.config["trouble"]
    layers: list[nn.Module] = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)]
    layers.insert(session.config["at"], Fails(trouble))
    if trouble == "counts again":
        layers.insert(1, CountsAgain())
    if trouble == "few":
        del layers[2:]
    model: nn.Module = Branches() if trouble == "branches" else nn.Sequential(*layers)
    model, optimizer = session.prepare(model, optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(32, 8), torch.randint(0, 3, (32,)))
    for _ in session.epochs(1):
        for x, y in session.batches(data, batch_size=16):
            output = torch.zeros(len(x), 3, requires_grad=True) if trouble == "not called" else model(x)
            if trouble == "twice":
                output = output + model(x)
            session.backward(F.cross_entropy(output, y))
            optimizer.step()
            optimizer.zero_grad()
