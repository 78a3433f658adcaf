"""Two workers whose data differ, or what they ask for: what test_disagreement.py runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.journal.records import Decided, Record
from elastune.core.run import ExecutionSettings
from elastune.testing.worker_processes import Worker


def train(worker: Worker, out: str, mode: str, seeds: list[int], counts: list[int]) -> None:
    """Train for an epoch with this rank's seed and number of samples; say how it ended."""
    execution = ExecutionSettings(workers=worker.size, mode=mode, num_slots=4)
    session = lone_session(Path(out), group=worker.form("workers"), execution=execution, seed=seeds[worker.rank])
    count = counts[worker.rank]
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 6, generator=generator)[:count], torch.randn(64, 3, generator=generator)[:count]
    )
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    try:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in session.epochs(1):
            for x, y in session.batches(data, batch_size=16):
                session.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    except UserError as error:
        worker.send(f"{type(error).__name__}: {error}", session.step)
    else:
        worker.send("", session.step)


def ask(worker: Worker, out: str, wishes: list[dict[str, Any]]) -> None:
    """Train for two epochs, asking in the lines of step 3 for this rank's wish; say what is journaled."""
    records: list[Record] = []
    execution = ExecutionSettings(workers=worker.size, num_slots=4)
    session = lone_session(Path(out), group=worker.form("workers"), execution=execution, send=records.append)
    data = TensorDataset(torch.ones(64, 2), torch.zeros(64, 1))
    model = nn.Linear(2, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.epochs(2):
        for x, y in session.batches(data, batch_size=16):
            if session.step == 2:
                session.change(**wishes[worker.rank])
            session.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    told = [
        (r.policy, r.step, r.cause.step, r.cause.lr, r.outcome, r.decision, r.detail)
        for r in records
        if isinstance(r, Decided)
    ]
    worker.send(told, optimizer.param_groups[0]["lr"])
