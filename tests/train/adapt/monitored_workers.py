"""The same training under one set of monitors after another: what test_monitors_change_nothing.py runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from elastune.core.journal.records import Record
from elastune.core.run import Adapt, ExecutionSettings
from elastune.testing.worker_processes import Worker

SAMPLES, BATCH = 104, 26  # 26 samples in 8 slots: parts of unequal size


class Noisy(torch.autograd.Function):
    """The identity, whose backward pass draws a random number, as stochastic rounding and the like do."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * (0.9 + 0.2 * torch.rand(()))


class Net(nn.Module):
    """All in which a measurement could show: BatchNorm, dropout, a part that the backward pass runs again, noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Tanh(), nn.Dropout(0.2))
        self.again = nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.Tanh(), nn.Dropout(0.2))
        self.last = nn.Linear(6 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = checkpoint(self.again, self.first(x), use_reentrant=False)
        return self.last(Noisy.apply(F.dropout(hidden.flatten(1), 0.2, self.training)))


def trained(
    worker: Worker, name: str, execution: ExecutionSettings, monitors: Sequence[str], sent: list[Record]
) -> str:
    """A hash of weights, buffers and the optimizer's state after two epochs under ``monitors``."""
    session = lone_session(
        Path("nowhere"),
        group=worker.form(name),
        execution=execution,
        adapt=Adapt(monitors=tuple(monitors)),
        send=sent.append,
    )
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 1, 8, 8, generator=generator), torch.arange(SAMPLES) % 10)
    torch.manual_seed(0)
    model: nn.Module = Net()
    model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for _ in session.epochs(2):
        for x, y in session.batches(data, batch_size=BATCH):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    session.finish()
    tensors = [*model.state_dict().values()]
    tensors += [t for state in optimizer.state_dict()["state"].values() for t in state.values()]
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def train(worker: Worker, execution: ExecutionSettings, sets: dict[str, tuple[str, ...]]) -> None:
    """Say what each of ``sets`` of monitors came to: the hash, and the names of the signals that there were."""
    torch.use_deterministic_algorithms(True)
    for name, monitors in sets.items():
        sent: list[Record] = []
        found = trained(worker, name, execution, monitors, sent)
        worker.send(name, found, sent)
