"""What exact mode costs, measured; and what it computes otherwise than one pass a batch does."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from elastune.core.errors import UserError
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.program_check import ExactCost, exact_cost

PROGRAM = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

config = {"normalised": False}

def train(session):
    middle = nn.BatchNorm1d(8) if session.config["normalised"] else nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 1))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.arange(512.0).reshape(128, 4).sin()
    for _ in session.epochs(1):
        for (x,) in session.batches(TensorDataset(data), batch_size=16):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        session.report(loss=session.loss, steps=session.step)
"""


def test_it_is_measured_and_what_differs_is_told(
    cluster: LocalCluster,
    forked_from: Callable[[LocalCluster], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM)
    with forked_from(cluster):
        plain = exact_cost(Program(path), {}, steps=8)
        normalised = exact_cost(Program(path), {"normalised": True}, steps=8)
        with pytest.raises(UserError, match="a few steps"):
            exact_cost(Program(path), {}, steps=2)
    assert plain.steps == 8
    assert plain.exact_s > 0
    assert math.isfinite(plain.plain_s)
    assert plain.apart == {}
    assert list(normalised.apart) == ["loss"]


def test_it_is_told_in_lines() -> None:
    first, second = ExactCost(20, 0.003, 0.002, {"loss": (1.0, 1.5)}).as_lines()
    assert first.startswith("exact mode: 3 ms a step in 4 slots, 2 ms in one pass (x1.50; medians of 20 steps")
    assert second.startswith("loss: 1 in exact mode, 1.5 in one pass: batches are normalised")
