"""Several losses of a batch, one after another: what comes of them beside the gradients, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.run import Adapt, ExecutionSettings
from elastune.train.session import Session


def begun(out: Path, execution: ExecutionSettings, **spec: Any) -> tuple[Session, nn.Module, Any, Any]:
    session = lone_session(out, execution=execution, **spec)
    model = nn.Linear(3, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    next(iter(session.epochs(1)))
    return session, model, optimizer, session.batches(TensorDataset(torch.rand(16, 3)), 8, shuffle=False)


@pytest.mark.parametrize(
    "execution",
    [
        ExecutionSettings(num_slots=4),
        ExecutionSettings(num_slots=1, micro_batch=2),
        ExecutionSettings(mode="fast", num_slots=4),
    ],
)
def test_gradients_norms_and_the_loss_are_those_of_the_sum(tmp_path: Path, execution: ExecutionSettings) -> None:
    results = []
    for apart in (True, False):
        torch.manual_seed(0)
        session, model, optimizer, batches = begun(tmp_path, execution, adapt=Adapt(monitors=("noise_scale",)))
        for (x,) in batches:
            one, other = model(x).square().mean(), model(-x).mean()
            if apart:
                session.backward(one, more=True)
                assert all(p.grad is None for p in model.parameters())
                session.backward(other)
            else:
                session.backward(one + other)
            optimizer.step()
            optimizer.zero_grad()
        losses = session.loss
        results.append([losses, *model.weight.flatten().tolist(), *(s.value for s in session.signals.values())])
    assert len(results[0]) > 4
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_the_last_loss_has_no_more(tmp_path: Path) -> None:
    session, model, _, batches = begun(tmp_path, ExecutionSettings(num_slots=2))
    (x,) = next(batches)
    session.backward(model(x).mean(), more=True)
    with pytest.raises(UserError, match="none without more=True"):
        next(batches)


def test_two_last_losses_are_told_what_to_write(tmp_path: Path) -> None:
    session, model, _, batches = begun(tmp_path, ExecutionSettings(num_slots=2))
    (x,) = next(batches)
    session.backward(model(x).mean())
    with pytest.raises(UserError, match="more=True"):
        session.backward(model(x).mean())


def test_curvature_needs_all_of_a_loss(tmp_path: Path) -> None:
    session, model, _, batches = begun(tmp_path, ExecutionSettings(num_slots=2), adapt=Adapt(monitors=("curvature",)))
    (x,) = next(batches)
    with pytest.raises(UserError, match="at once"):
        session.backward(model(x).square().mean(), more=True)


def test_a_model_in_pieces_needs_all_of_a_loss(tmp_path: Path) -> None:
    session, model, _, batches = begun(tmp_path, ExecutionSettings(mechanism="sharded", num_slots=4))
    (x,) = next(batches)
    with pytest.raises(UserError, match="whole on each worker"):
        session.backward(model(x).mean(), more=True)
