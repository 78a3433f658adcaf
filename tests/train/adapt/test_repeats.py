"""What a policy asks for again before its first wish has taken effect: it counts once, and the journal has it once."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastune.adapt.policies.host import PolicyHost, Proposal
from elastune.core.decisions import Decision, Snapshot
from elastune.core.journal.records import Decided, Record
from elastune.train.adaptation.decisions import PROGRAM, Decisions

AT = Snapshot(7, 1, 448, 3.0, 2, 64, 0.1)


class World:
    """One worker of two, with a policy; what is decided takes effect as ``DecisionApplier`` would have it."""

    def __init__(self) -> None:
        self.told: list[Record] = []
        self.applied: list[Decision] = []
        self.topology, self.coming = "native", "allreduce"
        self.workers = SimpleNamespace(size=2, rank=0, worker=0, elastic=True)
        self.progress = SimpleNamespace(batch_size=None, position=SimpleNamespace(step=9))
        self.trained = SimpleNamespace(active_sync=self)
        others: tuple[Any, ...] = (self, self.workers, self.progress, self.told.append)
        self.decisions = Decisions(PolicyHost([]), ["p"], *others)

    def apply(self, decision: Decision, trained: object, policy: str) -> None:
        self.applied.append(decision)
        self.progress.batch_size = decision.batch_size or self.progress.batch_size
        self.topology, self.coming = decision.topology or self.topology, decision.sync or self.coming

    def agree(self, policy: str = "p", **asked: Any) -> None:
        """All workers have asked for it, before they knew what came of earlier wishes."""
        self.decisions._proposals.add(Proposal(policy, 7, Decision(**asked), AT))
        self.decisions.count_votes(self.decisions.vote(), 1)
        self.decisions.apply(cast(Any, self.trained), lambda: AT)

    @property
    def journaled(self) -> list[dict[str, Any]]:
        return [record.decision for record in self.told if isinstance(record, Decided)]


@pytest.mark.parametrize(
    "asked",
    [
        {"workers": 3},
        {"mesh": "tensor=2"},
        {"topology": "tree"},
        {"sync": "local:learners=8,every=16"},
        {"batch_size": 128, "lr_factor": 2.0},
    ],
)
def test_a_wish_that_is_asked_twice_is_one_decision(asked: dict[str, Any]) -> None:
    world = World()
    world.agree(**asked)
    world.agree(**asked)
    assert world.journaled == [asked]
    assert world.applied == [Decision(**asked)]


def test_what_else_is_in_the_second_wish_is_done() -> None:
    world = World()
    world.agree(workers=3)
    world.agree(workers=3, lr_factor=0.5)
    assert world.journaled == [{"workers": 3}, {"lr_factor": 0.5}]


def test_another_number_counts_and_so_does_the_same_once_workers_have_changed() -> None:
    world = World()
    world.agree(workers=3)
    world.agree(workers=4)
    world.decisions.workers_changed()  # one of those that were to come was lost
    world.agree(workers=4)
    assert world.journaled == [{"workers": 3}, {"workers": 4}, {"workers": 4}]


def test_a_factor_alone_may_come_step_by_step() -> None:
    world = World()
    world.agree(lr_factor=0.5)
    world.agree(lr_factor=0.5)
    assert world.journaled == [{"lr_factor": 0.5}] * 2


def test_the_program_sets_its_rate_beside_a_batch_that_stays() -> None:
    world = World()
    world.agree(PROGRAM, batch_size=128, lr=0.1)
    world.agree(PROGRAM, batch_size=128, lr=0.05)
    assert world.journaled[-1] == {"batch_size": 128, "lr": 0.05}


def test_a_joiner_knows_what_is_on_its_way() -> None:
    first, joiner = World(), World()
    first.agree(workers=3, mesh="data=3")
    joiner.decisions.load(json.loads(json.dumps(first.decisions.to_json())), resumed=False)
    joiner.agree(workers=3, mesh="data=3")
    assert joiner.journaled == []
