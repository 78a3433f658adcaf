"""A gradient scaler skips, grows and shrinks as in a plain loop, however many slots a step has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings
from elastune.train.models import untracked_scaler
from elastune.train.rng import epoch_order


def built() -> tuple[nn.Module, torch.optim.Optimizer, GradScaler]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9)
    return model, optimizer, GradScaler("cpu", init_scale=2.0**123, growth_interval=4)  # too much for gradients


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    near = 1.0 + 0.01 * torch.randn(48, 9, generator=generator)
    return TensorDataset(1000.0 * near[:, :6], near[:, 6:])  # so that slots overflow where all of the batch does


@pytest.mark.parametrize("unscales", [False, True])
def test_it_is_the_plain_loop(tmp_path: Path, unscales: bool) -> None:
    ours, optimizer, scaler = built()
    session = lone_session(tmp_path, execution=ExecutionSettings(num_slots=4))
    model, optimizer = session.prepare(ours, optimizer)
    scaler, scales, losses = session.track("scaler", scaler), [], []
    for _ in session.epochs(4):
        for x, y in session.batches(samples(), batch_size=16):
            session.backward(scaler.scale(F.mse_loss(model(x), y)))
            if unscales:
                scaler.unscale_(optimizer)
                session.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if session.ends_step:
                losses.append(session.loss)
                scales.append(scaler.get_scale())
    plain, optimizer, scaler = built()
    inputs, targets = samples().tensors
    for epoch in range(4):
        for places in epoch_order(48, session.seed, epoch).split(16):
            loss = F.mse_loss(plain(inputs[places]), targets[places])
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert losses.pop(0) == pytest.approx(loss.item(), rel=1e-5)
            assert scales.pop(0) == scaler.get_scale()
    assert scaler.get_scale() < 2.0**123  # it has shrunk, and steps were left out
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_one_that_the_session_does_not_know_is_refused_in_words(tmp_path: Path) -> None:
    model, optimizer, scaler = built()
    session = lone_session(tmp_path, execution=ExecutionSettings(num_slots=4))
    with pytest.raises(UserError, match=r"session.track\(\"scaler\""):
        session.prepare(model, optimizer, scaler)
    model, optimizer = session.prepare(model, optimizer)
    with pytest.raises(AssertionError) as failed:
        for _ in session.epochs(1):
            for x, y in session.batches(samples(), batch_size=16):
                session.backward(scaler.scale(F.mse_loss(model(x), y)))
                scaler.step(optimizer)
    assert "acts once a step" in str(untracked_scaler(failed.value))
    assert untracked_scaler(AssertionError("something else")) is None


def test_words_for_a_second_backward_and_one_outside(tmp_path: Path) -> None:
    model, optimizer, _ = built()
    session = lone_session(tmp_path, execution=ExecutionSettings(num_slots=1))
    model, optimizer = session.prepare(model, optimizer)
    inputs, targets = samples().tensors
    with pytest.raises(UserError, match="move it into the loop"):
        session.backward(F.mse_loss(model(inputs), targets))
    with pytest.raises(UserError, match="turns=2"):
        for _ in session.epochs(1):
            for x, y in session.batches(samples(), batch_size=16):
                session.backward(F.mse_loss(model(x), y))
                session.backward(F.mse_loss(model(x), y))
