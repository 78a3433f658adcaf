"""Two workers whose buffers differ: what test_average_buffers.py runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from tests.support.sessions import lone_session
from torch import nn

from elastune.core.run import ExecutionSettings
from elastune.parallel.mechanisms.base import flatten
from elastune.testing.worker_processes import Worker

VALUES = 1_000_000


class Wide(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("moving", torch.full((VALUES,), 0.1) + rank)
        self.register_buffer("equal", torch.full((5,), 0.1))
        self.register_buffer("count", torch.tensor(3 + rank))


def average(worker: Worker, out: str) -> None:
    """Average them; say what came of it, its seconds, and those of the same numbers as Python lists."""
    session = lone_session(
        Path(out), group=worker.form("w"), execution=ExecutionSettings(workers=2, mode="fast", num_slots=4)
    )
    model = Wide(0)
    session.prepare(model, torch.optim.SGD(model.parameters()))
    for own, drifted in zip(model.buffers(), Wide(worker.rank).buffers(), strict=True):
        own.copy_(drifted)
    flat = flatten(model.buffers())
    tensors_s = seconds(session.state.average_buffers)
    lists_s = seconds(lambda: torch.tensor(session.state.workers.gather(flat.tolist(), "lists")))
    worker.send(float(model.moving[0]), float(model.moving[-1]), float(model.equal[0]), int(model.count))
    worker.send(tensors_s, lists_s)


def seconds(act: Callable[[], object]) -> float:
    """Of processor time, the least of three: a busy machine adds to it."""
    found = []
    for _ in range(3):
        began = time.process_time()
        act()
        found.append(time.process_time() - began)
    return min(found)
