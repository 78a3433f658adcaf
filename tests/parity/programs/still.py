"""A model whose parameters never move, so that its gradient noise scale has one true value."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

config = {"batch_size": 32, "batches": []}
SAMPLES = 16000


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 10, generator=generator)
    y = (x[:, :3] + 1.5 * torch.randn(SAMPLES, 3, generator=generator)).argmax(1)
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3)), x, y


def train(session) -> None:
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(100):
        for xs, ys in session.batches(TensorDataset(x, y), batch_size=session.config["batch_size"]):
            session.backward(F.cross_entropy(model(xs), ys))
            optimizer.step()
            optimizer.zero_grad()
    result = session.signals["noise_scale"]
    rows = session.mean([result.value, result.error]), (result.value + result.error) / 2
    session.report(differ=float(rows[0] != rows[1]))
