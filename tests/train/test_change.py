"""session.change: the program's own proposals, in a run without policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.journal.records import Decided, Record
from elastune.core.run import Elastic
from elastune.train.session import Session

SAMPLES = 60
X, Y = torch.ones(SAMPLES, 2), torch.zeros(SAMPLES, 1)


def train(session: Session, wishes: dict[int, dict[str, Any]], *, scheduled: bool = False, **options: Any) -> list[Any]:
    """The batch size and every group's learning rate of each step; ``wishes`` are made in the lines of a step."""
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.4}, {"params": [model.bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, **options)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    seen: list[Any] = []
    for _ in session.epochs(2):
        size = 0
        for x, y in session.batches(TensorDataset(X, Y), batch_size=10):
            size += len(x)
            for name, value in wishes.get(session.step, {}).items():
                session.change(**{name: value})  # of a step with several batches in each of them
            session.backward(F.mse_loss(model(x), y))
            if session.ends_step:
                seen.append((size, [group["lr"] for group in optimizer.param_groups]))
                size = 0
            optimizer.step()
            optimizer.zero_grad()
            if scheduled:
                scheduler.step()
    return seen


def told(records: list[Record]) -> list[tuple[str, int, int, str, dict[str, Any]]]:
    return [(r.policy, r.step, r.cause.step, r.outcome, r.decision) for r in records if isinstance(r, Decided)]


def test_every_group_has_the_rate_and_the_batch_its_size(tmp_path: Path) -> None:
    records: list[Record] = []
    seen = train(lone_session(tmp_path, send=records.append), {2: {"lr": 0.25, "batch_size": 20}})
    assert seen[:6] == [(10, [0.4, 0.1])] * 4 + [(20, [0.25, 0.25])] + [(20, [0.25, 0.25])]
    assert told(records) == [("program", 4, 3, "applied", {"batch_size": 20, "lr": 0.25})]


def test_a_schedule_goes_on_from_the_rate(tmp_path: Path) -> None:
    seen = train(lone_session(tmp_path), {2: {"lr": 0.5}}, scheduled=True)
    rates = [rates for _, rates in seen]
    assert rates[3] == pytest.approx([0.4 / 4, 0.1 / 4])
    # It is set when the scheduler has stepped to 1/5, and the schedule's own proportions go on
    assert rates[4] == pytest.approx([0.5, 0.5])
    assert rates[5] == pytest.approx([0.5 * 5 / 6] * 2)
    assert rates[6] == pytest.approx([0.5 * 5 / 7] * 2)


def test_a_rate_that_is_a_tensor_stays_one(tmp_path: Path) -> None:
    session, model = lone_session(tmp_path), nn.Linear(2, 1)
    rate = torch.tensor(0.1)
    model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=rate, foreach=False))
    for _ in session.epochs(1):
        for x, y in session.batches(TensorDataset(X, Y), batch_size=20):
            session.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if session.step == 0 and session.ends_step:
                session.change(lr=0.025)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.025)


def test_between_epochs_it_counts_after_the_next_step(tmp_path: Path) -> None:
    session, model = lone_session(tmp_path), nn.Linear(2, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rates = []
    for epoch in session.epochs(2):
        session.change(lr=0.2 + epoch)
        session.change(lr=0.1 + epoch)  # of several the last counts
        for x, y in session.batches(TensorDataset(X, Y), batch_size=30):
            rates.append(optimizer.param_groups[0]["lr"])
            session.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert sorted(set(rates)) == [0.1, 1.1]
    assert rates[-1] == 1.1


def test_what_cannot_be_is_refused_and_told(tmp_path: Path) -> None:
    records: list[Record] = []
    seen = train(lone_session(tmp_path, send=records.append), {2: {"batch_size": SAMPLES + 1, "lr": 0.5}})
    assert told(records) == [("program", 4, 3, "refused", {"batch_size": SAMPLES + 1, "lr": 0.5})]
    assert set(map(str, seen)) == {str((10, [0.4, 0.1]))}, "all of it, or nothing"


@pytest.mark.parametrize(
    "wish", [{"batch_size": 0}, {"batch_size": True}, {"batch_size": 1.5}, {"lr": -1.0}, {"lr": "0.1"}]
)
def test_what_is_no_setting_is_an_error_at_once(tmp_path: Path, wish: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        lone_session(tmp_path).change(**wish)


def test_more_workers_than_votes_add_up_for(tmp_path: Path) -> None:
    session = lone_session(tmp_path, elastic=Elastic(high=300))
    with pytest.raises(UserError, match="256"):
        session.change(lr=0.1)
