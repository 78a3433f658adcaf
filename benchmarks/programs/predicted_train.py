"""An MLP, a CNN or a transformer's encoder, whose products take as long as on a device of a declared speed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.common.paced import Paced

FLOPS_A_SECOND = {"mlp": 5e7, "cnn": 3e8, "transformer": 1e8}  # so slow that 8 workers seldom wait for 2 cores
config = {"model": "mlp", "batch_size": 32, "lr": 1e-3, "steps": 16}


class Pooled(nn.Module):
    """The mean over a sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    hidden = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), *hidden, nn.Linear(256, 10)), (256,)


def cnn() -> tuple[nn.Module, tuple[int, ...]]:
    convolutions = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1)]
    dense = [nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.MaxPool2d(2), *dense), (3, 32, 32)


def transformer() -> tuple[nn.Module, tuple[int, ...]]:
    blocks = (nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(2))
    return nn.Sequential(nn.Linear(16, 64), *blocks, Pooled(), nn.Linear(64, 10)), (16, 16)


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def train(session: Any) -> None:
    """``cpu_seconds``: of this worker's process in ``train_seconds`` of training."""
    torch.manual_seed(session.seed)
    config = session.config
    model, shape = MODELS[config["model"]]()
    count = config["steps"] * config["batch_size"]
    data = TensorDataset(torch.randn(count, *shape), torch.randint(10, (count,)))
    model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=config["lr"]))
    wall, cpu = time.perf_counter(), time.process_time()
    with Paced(FLOPS_A_SECOND[config["model"]]):
        for _ in session.epochs(1):
            for x, y in session.batches(data, batch_size=config["batch_size"]):
                loss = F.cross_entropy(model(x), y)
                session.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            took = {"train_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
            session.report(loss=float(loss.detach()), **took)
