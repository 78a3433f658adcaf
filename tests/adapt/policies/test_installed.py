"""A policy of another package, added as CONTRIBUTING says: pure, tried with the kit, offered as an entry point."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.adapt.policies.base import Hook, Policy, Run
from elastune.adapt.policies.library import registry
from elastune.core import plugins
from elastune.core.decisions import Decision
from elastune.core.errors import UserError
from elastune.core.journal.records import Decided, Record
from elastune.core.run import Adapt
from elastune.testing.kits.policy import CALM, Measured, PolicyDriver, PolicyKit


@dataclass(frozen=True)
class Best:
    """The lowest loss so far, and how many epochs have passed without a lower one."""

    loss: float = float("inf")
    epochs: int = 0


@dataclass(frozen=True)
class Plateau(Policy):
    """Multiply the learning rate by ``factor`` after ``patience`` epochs without a lower loss."""

    monitors: ClassVar[tuple[str, ...]] = ("loss",)
    hooks: ClassVar[tuple[Hook, ...]] = ("after_epoch",)

    factor: float = 0.5
    patience: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1 or self.patience < 1:
            value = f"{self.factor} and {self.patience}"
            raise UserError("plateau needs a factor between 0 and 1, and patience", value, "such as factor=0.5")

    def init(self) -> Best:
        return Best()

    def decide(self, hook: Hook, state: Best, run: Run) -> Best:
        if run.loss() < state.loss:
            return Best(run.loss())
        if state.epochs + 1 < self.patience:
            return replace(state, epochs=state.epochs + 1)
        run.scale_lr(self.factor)
        return replace(state, epochs=0)


class TestPlateau(PolicyKit):
    calm: ClassVar[dict[str, Measured] | None] = {**CALM, "loss": 1.0}
    steps = 100  # two epochs, the first of which has the lowest loss there is

    def make(self) -> Policy:
        return Plateau()


def test_it_waits_and_then_halves() -> None:
    policy = PolicyDriver(Plateau())
    losses = [1.0, 0.9, 0.9, 1.0, 0.8, 0.8]
    asked = [policy.decide("after_epoch", signals={"loss": loss}) for loss in losses]
    assert [decision == Decision(lr_factor=0.5) for decision in asked] == [False, False, False, True, False, False]
    assert policy.state == Best(0.8, 1)


def test_a_run_finds_it_by_its_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offered = EntryPoints([EntryPoint("plateau", f"{__name__}:Plateau", registry.INSTALLED.group)])
    monkeypatch.setattr(plugins, "entry_points_of", lambda group: offered.select(group=group))
    monkeypatch.setattr(EntryPoint, "load", lambda self: Plateau)
    records: list[Record] = []
    adapt = Adapt(("plateau:patience=1,factor=0.25,budget=1",))
    session, model = lone_session(tmp_path, send=records.append, adapt=adapt), nn.Linear(2, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in session.epochs(4):
        for x, y in session.batches(TensorDataset(torch.ones(20, 2), torch.zeros(20, 1)), batch_size=10):
            session.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    decided = [(r.policy, r.decision, r.outcome) for r in records if isinstance(r, Decided)]
    assert decided == [("plateau", {"lr_factor": 0.25}, "applied")]
