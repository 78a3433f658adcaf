"""What may take the place of a run's sync strategy is known when training begins, not steps later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.adapt.policies.base import Policy, Run
from elastune.core.errors import UserError
from elastune.core.journal.records import SyncChanged
from elastune.core.run import Adapt, ExecutionSettings
from elastune.core.sync_plan import SETTINGS, SyncPlan, SyncSchedule
from elastune.train.checkpoints.tree import fingerprint
from elastune.train.session import Session

LOCAL = "local:learners=4,every=2"


def session_of(out: Path, schedule: str = "", **execution: Any) -> Session:
    return lone_session(
        out, sync_schedule=SyncSchedule.parse(schedule), execution=ExecutionSettings(num_slots=4, **execution), seed=1
    )


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
    centred = torch.optim.RMSprop(model.parameters(), centered=True)
    with pytest.raises(UserError, match="rounded numbers make negative"):
        session_of(tmp_path, f"2={LOCAL},send=int8").prepare(model, centred)
    session_of(tmp_path, f"2={LOCAL},moments=fresh,send=int8").prepare(model, centred)


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
    active_sync = session.trained.active_sync
    before = active_sync.sync
    for name in ("parameter_server", "allreduce"):
        active_sync.want(SyncPlan.parse(name), "a test")
        assert str(active_sync.switch(0)[0]) == name
        assert active_sync.sync is before
        assert active_sync.state_dict()["plan"] == str(before.plan) == name
        active_sync.want(SyncPlan.parse(name), "a test")
        assert active_sync.wanted is None, "it is in use"
    active_sync.want(SyncPlan.parse(LOCAL), "a test")
    active_sync.switch(0)
    assert active_sync.sync is not before


OTHERS = {
    "learners": 2,
    "every": 8,
    "moments": "fresh",
    "send": "int8",
    "mix": 3,
    "pull": 0.5,
    "outer_lr": 0.4,
    "outer_momentum": 0.5,
}
OTHERS |= {"staleness": 2, "fragments": 2, "cycles": 2}
ALONE = ("delay", "blend", "quorum", "grace")  # go with others only
CHANGES = [(name, setting) for name, settings in SETTINGS.items() for setting in settings if setting not in ALONE]


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return fingerprint(one) == fingerprint(other)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["session.set_sync", "policy Asks"])
@pytest.mark.parametrize(("strategy", "setting"), CHANGES)
def test_any_setting_changes_while_training_goes_on(tmp_path: Path, strategy: str, setting: str, how: str) -> None:
    """Where the next round ends, journaled with its cause; what the strategy keeps from round to round stays."""
    begin = SyncPlan(strategy, learners=4, every=6, staleness=int(strategy == "parameter_server"))  # type: ignore[arg-type]
    plan, program = replace(begin, **{setting: OTHERS[setting]}), how.startswith("session")

    class Asks(Policy):
        def after_step(self, run: Run) -> None:
            if run.step == 6:
                run.set_sync(str(plan))

    sent: list[Any] = []
    asks = {} if program else {"adapt": Adapt(policies=("Asks",)), "policies": {"Asks": Asks}}
    session = lone_session(
        tmp_path, send=sent.append, execution=ExecutionSettings(num_slots=4), sync=begin, seed=1, **asks
    )
    model = nn.Linear(6, 3)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert session.trained is not None
    active_sync = session.trained.active_sync
    for _ in session.epochs(2):
        for x, y in session.batches(samples(), batch_size=4):
            session.backward(F.mse_loss(model(x), y))
            if program and session.ends_step and session.step == 0:
                session.set_sync(str(plan))
            optimizer.step()
            optimizer.zero_grad()
    assert session.step == 16
    changes = [record for record in sent if isinstance(record, SyncChanged)]
    assert [(each.step, each.sync, each.why) for each in changes] == [(8, str(plan), how)], "the round ends with a pass"
    assert active_sync.sync.plan == plan
    kept = active_sync.state_dict()["kept"]
    assert kept["rounds"] == (3 if setting == "every" else 4)
    active_sync.want(begin, "a test")
    active_sync.switch(16)
    assert equal(active_sync.sync.state_dict(), kept)
    assert strategy != "diloco" or any(bool(each.any()) for each in kept["momentum"])
    active_sync.want(SyncPlan("local", 4, 2) if strategy != "local" else SyncPlan("diloco", 4, 2), "another strategy")
    active_sync.switch(16)
    assert active_sync.sync.state_dict()["rounds"] == 0, "it begins with nothing of the one before"


def test_a_setting_that_cannot_be_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    session = lone_session(
        tmp_path, execution=ExecutionSettings(num_slots=4, mode="fast"), sync=SyncPlan("gossip", 4, 6)
    )
    model = nn.Linear(6, 3)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for text, said in (
        ("gossip:learners=4,every=6,mix=6", "before their round ends"),
        ("gossip:learners=4,pull=0.5", "gossip has no setting pull"),
        ("gossip:learners=3", "as many slots"),
        ("local:learners=4,quorum=3", "no round can end without it"),
    ):
        with pytest.raises(UserError, match=said):
            session.set_sync(text)
