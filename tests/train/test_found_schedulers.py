"""Schedulers that the program did not give to session.prepare: found, stepped once a step, saved and restored."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.sessions import lone_session
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings
from elastune.train.schedules import gate, schedulers_of
from elastune.train.session import Session
from elastune.train.step import StopTraining

DATA = TensorDataset(torch.rand(16, 3, generator=torch.Generator().manual_seed(1)))
EPOCHS, LOSSES = 4, [1.0, 1.0, 1.0, 1.0]

Make = Callable[[torch.optim.Optimizer], Any]
PER_EPOCH: dict[str, Make] = {
    "StepLR": lambda o: schedules.StepLR(o, 1, 0.5),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1.0, 2), schedules.ExponentialLR(o, 0.5)], [2]
    ),
}
PER_BATCH: dict[str, Make] = {
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.2, total_steps=2 * EPOCHS),
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
}


def step_epoch(scheduler: Any, epoch: int) -> None:
    if isinstance(scheduler, schedules.ReduceLROnPlateau):
        scheduler.step(LOSSES[epoch])
    else:
        scheduler.step()


def train(session: Session, make: Make, per_batch: bool, rates: list[float]) -> tuple[torch.Tensor, list[float]]:
    """Rates of the steps, and the weight; the scheduler is made after ``prepare`` and given to nobody."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    scheduler = make(optimizer)
    for epoch in session.epochs(EPOCHS):
        for (x,) in session.batches(DATA, 8, shuffle=False):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                rates.append(optimizer.param_groups[0]["lr"])
            if per_batch:
                scheduler.step()
        if not per_batch:
            step_epoch(scheduler, epoch)
        session.report(rate=optimizer.param_groups[0]["lr"])
    session.finish()
    return model.weight.detach().clone(), rates


def plain(make: Make, per_batch: bool) -> list[float]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, rates = make(optimizer), []
    for epoch in range(EPOCHS):
        for _ in range(2):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if per_batch:
                scheduler.step()
        if not per_batch:
            step_epoch(scheduler, epoch)
    return rates


CASES = [*((name, make, False) for name, make in PER_EPOCH.items())]
CASES += [(name, make, True) for name, make in PER_BATCH.items()]


@pytest.mark.parametrize(("name", "make", "per_batch"), CASES)
@pytest.mark.parametrize("slots", [1, 4])
def test_rates_are_those_of_the_plain_loop(tmp_path: Path, name: str, make: Make, per_batch: bool, slots: int) -> None:
    session = lone_session(tmp_path, execution=ExecutionSettings(num_slots=slots))
    assert train(session, make, per_batch, [])[1] == plain(make, per_batch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "make", "per_batch"), CASES)
@pytest.mark.parametrize("cut", [2, 3, 4])
def test_a_cut_run_goes_on_as_the_whole_one(tmp_path: Path, name: str, make: Make, per_batch: bool, cut: int) -> None:
    execution = ExecutionSettings(num_slots=2)
    options: dict[str, Any] = {"execution": execution, "checkpoint_every_steps": None}
    weight, rates = train(lone_session(tmp_path / "whole", **options), make, per_batch, [])
    before: list[float] = []
    with suppress(StopTraining):
        train(lone_session(tmp_path / "cut", max_steps=cut, **options), make, per_batch, before)
    after: list[float] = []
    resumed, _ = train(lone_session(tmp_path / "cut", resume=True, **options), make, per_batch, after)
    assert before + after == rates
    assert torch.equal(resumed, weight)


def test_parts_of_a_scheduler_and_those_of_others_are_left_out() -> None:
    mine, other = (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(2))
    both = PER_EPOCH["SequentialLR"](mine)
    given = schedules.ExponentialLR(mine, 0.9)
    of_other = schedules.ExponentialLR(other, 0.9)
    assert schedulers_of([mine], [given]) == (both,)
    assert schedulers_of([mine, other], [given]) == (both, of_other)
    assert schedulers_of([mine], [given, both]) == ()


def test_one_that_was_made_at_import_is_found() -> None:
    """The fork server has frozen what the collector knows."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = schedules.StepLR(optimizer, 1)
    frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        assert schedulers_of([optimizer], []) == (scheduler,)
    finally:
        if not frozen:
            gc.unfreeze()


def test_a_scheduler_of_another_package_is_found() -> None:
    class CosineScheduler:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = CosineScheduler(optimizer)
    assert schedulers_of([optimizer], []) == (scheduler,)


def test_a_run_goes_on_with_its_schedulers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"execution": ExecutionSettings(num_slots=1), "checkpoint_every_steps": None}
    train(lone_session(tmp_path, max_steps=2, **options), PER_EPOCH["StepLR"], False, [])
    with pytest.raises(UserError, match=r"got ExponentialLR before the first epoch, and StepLR in the saved state"):
        train(lone_session(tmp_path, resume=True, **options), lambda o: schedules.ExponentialLR(o, 0.9), False, [])


def test_a_later_session_takes_over_a_scheduler_that_was_made_at_import() -> None:
    """As after the warm-up of a worker that joins: the first session stopped within a step."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = schedules.StepLR(optimizer, 1, 0.5)
    gate(scheduler, lambda: False, float)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    gate(scheduler, lambda: True, float)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert type(scheduler).__mro__[1] is schedules.StepLR
