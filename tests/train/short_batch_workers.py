"""Workers that train a BatchNorm on few samples a step: what test_short_batches.py runs."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.run import ExecutionSettings
from elastune.core.slots import Mode
from elastune.testing.worker_processes import Worker


def train_all(worker: Worker, cases: list[tuple[Mode, int, int]]) -> None:
    """Train each case (mode, samples, batch) for an epoch; say the weights, the size of each pass, samples used."""
    for nth, case in enumerate(cases):
        train(worker, f"case {nth}", *case)


def train(worker: Worker, name: str, mode: Mode, samples: int, batch: int) -> None:
    execution = ExecutionSettings(workers=worker.size, mode=mode, num_slots=4)
    session = lone_session(Path("nowhere"), group=worker.form(name), execution=execution)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(samples, 5, generator=generator), torch.arange(samples) % 2)
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    net, rule = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    passes = []
    for _ in session.epochs(1):
        for x, y in session.batches(data, batch_size=batch):
            passes.append(len(x))
            session.backward(F.cross_entropy(net(x), y))
            rule.step()
            rule.zero_grad()
    weights = torch.cat([t.double().flatten() for t in net.state_dict().values()])
    worker.send(weights.tolist(), passes, session.samples)
