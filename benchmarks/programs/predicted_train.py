"""An MLP, a CNN or a transformer's encoder, whose products take as long as on a device of a declared speed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from paced import Paced

FLOPS_A_SECOND = 2e9
config = {"model": "mlp", "batch_size": 32, "lr": 1e-3}


class Pooled(nn.Module):
    """The mean over a sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    hidden = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), *hidden, nn.Linear(512, 10)), (256,)


def cnn() -> tuple[nn.Module, tuple[int, ...]]:
    convolutions = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1)]
    dense = [nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.MaxPool2d(2), *dense), (3, 32, 32)


def transformer() -> tuple[nn.Module, tuple[int, ...]]:
    blocks = (nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4))
    return nn.Sequential(nn.Linear(16, 64), *blocks, Pooled(), nn.Linear(64, 10)), (32, 16)


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def train(session: Any) -> None:
    torch.manual_seed(session.seed)
    model, shape = MODELS[session.config["model"]]()
    data = TensorDataset(torch.randn(512, *shape), torch.randint(10, (512,)))
    model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=session.config["lr"]))
    with Paced(FLOPS_A_SECOND):
        for _ in session.epochs(1):
            for x, y in session.batches(data, batch_size=session.config["batch_size"]):
                loss = F.cross_entropy(model(x), y)
                session.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            session.report(loss=float(loss.detach()))
