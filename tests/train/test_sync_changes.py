"""What may take the place of a run's sync strategy is known when training begins, not steps later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.run import Means
from elastune.core.sync_plan import SyncPlan
from elastune.core.sync_schedule import SyncSchedule
from elastune.testing.sessions import lone_session
from elastune.train.session import Session

LOCAL = "local:learners=4,every=2"


def session_of(out: Path, schedule: str = "", **means: Any) -> Session:
    return lone_session(out, sync_schedule=SyncSchedule.parse(schedule), means=Means(num_slots=4, **means), seed=1)


def samples() -> TensorDataset:
    return TensorDataset(torch.randn(32, 6), torch.randn(32, 3))


def test_what_the_model_cannot_have_later_is_refused_at_once(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    with pytest.raises(UserError, match="must have a parameter tensor"):
        session_of(tmp_path, "2=diloco:learners=4,every=12,fragments=3").prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
    with pytest.raises(UserError, match="evaluates a batch once"):
        session_of(tmp_path, f"2={LOCAL}", mode="fast").prepare(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("schedule", [f"2={LOCAL}", ""])
def test_learners_do_not_come_while_batches_have_turns(tmp_path: Path, schedule: str) -> None:
    """By the schedule they are refused before the first step; asked for later, where they are asked for."""
    session = session_of(tmp_path, schedule)
    model = nn.Linear(6, 3)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    taken = 0
    with pytest.raises(UserError, match="turns need"):
        for _ in session.epochs(1):
            for x, y in session.batches(samples(), batch_size=8, turns=2):
                optimizer.zero_grad()
                session.backward(F.mse_loss(model(x), y))
                optimizer.step()
                taken += session.ends_step
                if taken == 3:
                    session.set_sync(LOCAL)
    assert taken == (0 if schedule else 3)


def test_a_parameter_server_without_staleness_is_all_reduce_by_another_name(tmp_path: Path) -> None:
    """What takes its place is the same object, so nothing that it keeps is lost; and it is known by its new name."""
    session = session_of(tmp_path)
    model = nn.Linear(6, 3)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert session.trained is not None
    in_use = session.trained.in_use
    before = in_use.sync
    for name in ("parameter_server", "allreduce"):
        in_use.want(SyncPlan.parse(name), "a test")
        assert str(in_use.switch(0)[0]) == name
        assert in_use.sync is before
        assert in_use.state_dict()["plan"] == str(before.plan) == name
        in_use.want(SyncPlan.parse(name), "a test")
        assert in_use.wanted is None, "it is in use"
    in_use.want(SyncPlan.parse(LOCAL), "a test")
    in_use.switch(0)
    assert in_use.sync is not before
