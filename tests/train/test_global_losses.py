"""Losses over the features of a whole global batch: what a program may pass, and what one line refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.run import Adapt, ExecutionSettings
from elastune.core.sync_plan import SyncPlan
from elastune.train.session import Session


def begun(
    out: Path, execution: ExecutionSettings | None = None, model: nn.Module | None = None, **spec: Any
) -> tuple[Session, nn.Module, Any, Iterator[Any]]:
    session = lone_session(out, execution=execution or ExecutionSettings(num_slots=2), **spec)
    torch.manual_seed(0)
    model = nn.Linear(3, 2) if model is None else model
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    next(iter(session.epochs(1)))
    x = torch.rand(16, 3, generator=torch.Generator().manual_seed(1))
    return session, model, optimizer, session.batches(TensorDataset(x), 8, shuffle=False)


def spread_out(features: torch.Tensor) -> torch.Tensor:
    return (features @ features.T).logsumexp(1).mean()


def in_all_slots(session: Session, batches: Iterator[Any], loss: Any, encode: Any) -> None:
    for _ in range(2):
        (x,) = next(batches)
        session.backward_global(loss, encode, x)


def test_nothing_acts_before_the_last_slot(tmp_path: Path) -> None:
    session, model, _, batches = begun(tmp_path)
    (x,) = next(batches)
    session.backward_global(spread_out, model, x)
    assert not session.ends_step
    assert model.weight.grad is None
    (x,) = next(batches)
    session.backward_global(spread_out, model, x)
    assert session.ends_step
    assert model.weight.grad is not None


def test_running_statistics_move_once_a_step(tmp_path: Path) -> None:
    def moved(call: str) -> tuple[float, ...]:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        session, model, _, batches = begun(tmp_path, model=model)
        for _ in range(2):
            (x,) = next(batches)
            if call == "backward":
                session.backward(model(x).mean())
            else:
                session.backward_global(spread_out, model, x)
        return (*model[1].running_mean.tolist(), float(model[1].num_batches_tracked))

    assert moved("backward_global") == moved("backward")


@pytest.mark.parametrize(
    ("loss", "encode", "message"),
    [
        (spread_out, lambda x: x.mean(0), "a row for each sample"),
        (spread_out, lambda x: x.sum(), "a row for each sample"),
        (spread_out, lambda x: [x.tolist()], "a row for each sample"),
        (lambda f: f, lambda x: x, "one number"),
        (lambda f: 3.0, lambda x: x, "one number"),
        (lambda f: f.square().mean(), lambda x: x.detach(), "features come from the model"),
    ],
)
def test_features_and_losses_of_other_shapes(tmp_path: Path, loss: Any, encode: Any, message: str) -> None:
    session, _, _, batches = begun(tmp_path)
    with pytest.raises(UserError, match=message):
        in_all_slots(session, batches, loss, encode)


def test_a_variable_of_the_loop_is_an_argument(tmp_path: Path) -> None:
    session, model, _, batches = begun(tmp_path)
    with pytest.raises(UserError, match="got x, a variable of the loop"):
        for (x,) in batches:
            session.backward_global(spread_out, lambda: model(x))  # noqa: B023


def test_a_gradient_scaler_is_refused(tmp_path: Path) -> None:
    session, model, _, batches = begun(tmp_path)
    session.track("scaler", torch.amp.GradScaler("cpu"))
    (x,) = next(batches)
    with pytest.raises(UserError, match="not scaled"):
        session.backward_global(spread_out, model, x)


def test_every_slot_gives_features(tmp_path: Path) -> None:
    session, model, _, batches = begun(tmp_path)
    (x,) = next(batches)
    session.backward(model(x).mean())
    (x,) = next(batches)
    with pytest.raises(UserError, match="features of 4 of 8 samples"):
        session.backward_global(spread_out, model, x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"execution": ExecutionSettings(num_slots=2, mechanism="sharded")}, "a mechanism that divides"),
        ({"sync": SyncPlan.parse("local:learners=2,every=2")}, "--sync local"),
        ({"adapt": Adapt(monitors=("curvature",))}, "whole loss of a batch at once"),
    ],
)
def test_refused_where_features_cannot_be_gathered(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    session, model, _, batches = begun(tmp_path, **options)
    (x,) = next(batches)
    with pytest.raises(UserError, match=message):
        session.backward_global(spread_out, model, x)
