"""A policy has workers replaced: training goes on meanwhile, on no fewer workers where there is room for one more."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs, formed
from tests.support.membership_events import decode_event

from elastune.core.journal.records import MembershipEvent, Record, RunFinished
from elastune.core.run import Adapt, Elastic, Program
from elastune.elastic.wire.messages import ReplaceAsked

PROGRAM = Program(Path(__file__).parent / "programs" / "replacing.py")
SAMPLES = 1000
ROOM = Elastic(low=2, high=3, heartbeat_s=30.0)
FULL = Elastic(low=1, high=2, heartbeat_s=30.0)


@dataclass
class Seen:
    """``pids``: of each worker, all that it ever had."""

    pids: dict[int, set[int]] = field(default_factory=dict)

    def look(self, handle: Any, records: list[Record]) -> None:
        for worker, pid in handle.pids.items():
            self.pids.setdefault(worker, set()).add(pid)


def replacing(rank: int, *last: int) -> dict[str, Any]:
    """Settings of a run whose policy replaces ``rank``; it is slow until those that come of it are ``last``."""
    return {"spec": {"adapt": Adapt(policies=(f"Replacing:rank={rank}",))}, "slow_until": formed(*last)}


def compositions(ran: Ran) -> list[list[int]]:
    """Who trained together, one version after the other."""
    return [result.members for result in ran.regrouped]


def asked(ran: Ran) -> list[int]:
    events = [decode_event(r.event) for r in ran.records if isinstance(r, MembershipEvent)]
    return [worker for worker, event in events if worker is not None and isinstance(event, ReplaceAsked)]


def same(ran: Ran, undisturbed: Ran) -> None:
    assert isinstance(ran.outcome, RunFinished)
    assert ran.outcome.stopped == "complete"
    assert ran.sha256 == undisturbed.sha256
    assert ran.ledger.exact, ran.ledger
    assert [seen.once for seen in ran.ledger.epochs] == [SAMPLES] * 3


@pytest.mark.parametrize("rank", [0, *soaked(1)])
def test_with_room_for_one_more_there_are_never_fewer(runs: Runs, undisturbed: Ran, rank: int) -> None:
    seen, other = Seen(), 1 - rank
    ran = runs(2, elastic=ROOM, act=seen.look, **replacing(rank, other, 2))
    same(ran, undisturbed)
    assert asked(ran) == [rank]
    assert compositions(ran) == [[other, 2]]
    assert all(result.planned and not result.discarded for result in ran.regrouped)
    assert len(seen.pids[other]) == 1
    assert set(seen.pids) == {0, 1, 2}
    assert not ran.lost


def test_without_room_it_leaves_first(runs: Runs, undisturbed: Ran) -> None:
    seen = Seen()
    ran = runs(2, elastic=FULL, act=seen.look, **replacing(1, 0, 2))
    same(ran, undisturbed)
    assert compositions(ran) == [[0], [0, 2]]
    assert len(seen.pids[0]) == 1
    assert not ran.lost


def test_the_replacement_fails_to_start_and_another_comes(runs: Runs, undisturbed: Ran) -> None:
    ran = runs(2, elastic=replace(ROOM, low=1), unfit=[2], **replacing(1, 0, 3))
    same(ran, undisturbed)
    assert ran.lost == [2]
    assert compositions(ran) == [[0, 3]]


def test_the_slow_worker_dies_before_its_replacement_comes(runs: Runs, undisturbed: Ran) -> None:
    ran = runs(2, elastic=ROOM, faults=["kill 1 5 gather"], **replacing(1, 0, 2))
    same(ran, undisturbed)
    assert ran.lost == [1]
    assert compositions(ran) == [[0], [0, 2]]


def test_the_replacement_dies_as_it_joins(runs: Runs, undisturbed: Ran) -> None:
    """The slow one was on its way out and is gone with it; a third one comes, and the run was never stopped."""
    ran = runs(2, elastic=ROOM, faults=["kill 2 0 taking"], **replacing(1, 0, 3))
    same(ran, undisturbed)
    assert ran.lost == [2]
    assert compositions(ran)[-1] == [0, 3]


def test_one_of_the_fewest_stays_where_nobody_can_come(runs: Runs, undisturbed: Ran) -> None:
    """Four workers of four: no fewer are allowed, and there is no room for more."""
    alone = {"spec": replacing(1)["spec"], "pause_s": 0.02}
    ran = runs(4, elastic=Elastic(low=4, high=5, heartbeat_s=30.0), **alone)
    same(ran, undisturbed)
    assert asked(ran) == [1]
    assert not ran.regrouped
    assert not ran.lost
