"""Every order of events of small runs: the machine, ``reconcile`` and workers as they should be, tried breadth first.

What is checked on the way is in ``protocol_model``: nobody contradicts anybody, the members of a version agree on its
first step, all that reduce together hold the same steps, an evaluation counts every part once, no rewind
loses a step, and nobody begins anew while somebody holds the state. Here: that no history ends with workers that wait
for ever, and that those who are done have taken the same steps.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.elastic.coordinator import machine
from elastune.elastic.coordinator.machine import begin
from elastune.elastic.wire.messages import CapacityChanged, Event, Noticed, NoticeEnding, ReplaceAsked, ResizeAsked
from elastune.elastic.worker.recovery import MemberStatus, RecoveryPlan, reconcile

_spec = importlib.util.spec_from_file_location("protocol_model", Path(__file__).parent / "protocol_model.py")
assert _spec is not None
assert _spec.loader is not None
protocol_model = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = protocol_model
_spec.loader.exec_module(protocol_model)

MOST_STATES = 150_000


def explore(model: Any, start: Any) -> Counter[str]:
    """How the histories from ``start`` end. Raises ``Wrong`` with the shortest history that breaks a rule."""
    came_from: dict[Any, tuple[Any, str] | None] = {start: None}
    queue = deque([start])
    ends: Counter[str] = Counter()
    while queue:
        state = queue.popleft()
        try:
            following = list(model.moves(state))
            if not following:
                ends[_end(model, state)] += 1
            following += model.faults(state)
        except ValueError as error:
            raise protocol_model.Wrong(f"{error}\n" + _history(came_from, state)) from error
        except AssertionError as error:
            raise protocol_model.Wrong(f"{error}\n" + _history(came_from, state)) from None
        for what, after in following:
            if after not in came_from:
                came_from[after] = state, what
                queue.append(after)
        assert len(came_from) <= MOST_STATES, "too large a case for a test"
    return ends


def _end(model: Any, state: Any) -> str:
    if state.over:
        return str(state.over)
    waiting = [worker for worker in state.workers if worker.mode in protocol_model.ALIVE and not worker.cut]
    membership = model.memberships[state.machine]
    if waiting or membership.workers or membership.free:
        raise protocol_model.Wrong(f"nothing more happens: {state.workers}, {membership}")
    return "no room for anybody"


def _history(came_from: dict[Any, tuple[Any, str] | None], state: Any) -> str:
    lines: list[str] = []
    while (step := came_from[state]) is not None:
        state, what = step
        lines.append(what)
    return "\n".join(reversed(lines))


def ends(
    program: str,
    workers: int,
    *,
    low: int = 1,
    high: int = 4,
    free: int = 0,
    samples: tuple[int, ...] = (),
    wishes: tuple[tuple[int | None, Event], ...] = (),
    begins: bool = False,
    **budgets: int,
) -> set[str]:
    """How runs end whose ``workers`` stand before their first operation, or (``begins``) are only being started."""
    model = protocol_model.Model(program, samples, wishes)
    membership = replace(begin(range(workers), low, high), free=free)
    return set(explore(model, (model.beginning if begins else model.running)(membership, **budgets)))


def grow(workers: int) -> dict[str, Any]:
    return {"free": 1, "high": workers, "wishes": ((None, ResizeAsked(workers)),)}


def shrink(workers: int) -> dict[str, Any]:
    return {"wishes": ((None, ResizeAsked(workers)),)}


def replaced(worker: int) -> dict[str, Any]:
    """One of the fewest, with room for one more."""
    return {"free": 1, "low": 2, "high": 3, "wishes": ((worker, ReplaceAsked()),)}


LEAVING = {"wishes": ((0, ReplaceAsked()), (None, ResizeAsked(1)))}
NO_ROOM = {"high": 2, "wishes": ((0, ReplaceAsked()), (None, CapacityChanged(1)))}

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "two begin, two deaths, a replacement": ("s", 2, {"high": 2, "free": 1, "begins": True, "deaths": 2}),
    "two begin, a false death": ("s", 2, {"high": 2, "free": 1, "begins": True, "freezes": 1}),
    "two, two deaths, a replacement": ("ss", 2, {"high": 2, "free": 1, "deaths": 2}),
    "three, two deaths": ("s", 3, {"high": 3, "deaths": 2}),
    "three, a death told late": ("ss", 3, {"high": 3, "deaths": 1, "early": 1}),
    "three, a false death": ("s", 3, {"high": 3, "freezes": 1}),
    "three evaluate, a death": ("se", 3, {"high": 3, "deaths": 1}),
    "two evaluate, a death, a break": ("esg", 2, {"high": 2, "deaths": 1, "breaks": 1}),
    "two evaluate, two breaks": ("se", 2, {"high": 2, "breaks": 2}),
    "one joins one, two deaths": ("ss", 1, {**grow(2), "deaths": 2}),
    "one joins one, a death and a break": ("ss", 1, {**grow(2), "deaths": 1, "breaks": 1}),
    "one joins one, a false death, they evaluate": ("se", 1, {**grow(2), "freezes": 1}),
    "one joins one, a break, they evaluate": ("seg", 1, {**grow(2), "breaks": 1}),
    "one joins two, a death": ("s", 2, {**grow(3), "deaths": 1}),
    "one joins two that do not all vote, a death": ("s", 2, {**grow(3), "samples": (1,), "deaths": 1}),
    "one joins and leaves, a death": (
        "sss",
        1,
        {**grow(2), "wishes": ((None, ResizeAsked(2)), (None, ResizeAsked(1))), "deaths": 1},
    ),
    "one of two leaves, a death and a break": ("ss", 2, {**shrink(1), "deaths": 1, "breaks": 1}),
    "one of three leaves, a death": ("s", 3, {**shrink(2), "deaths": 1}),
    "the only one gets notice, a death": ("sss", 1, {"free": 1, "wishes": ((0, Noticed(30)),), "deaths": 1}),
    "one of two gets notice": ("ss", 2, {"high": 2, "free": 1, "wishes": ((0, Noticed(30)),)}),
    "both get notice, and one comes": ("ss", 2, {"high": 2, "free": 1, "wishes": ((0, Noticed(30)), (1, Noticed(30)))}),
    "the only one's notice ends": ("ss", 1, {"free": 1, "wishes": ((0, Noticed(30)), (0, NoticeEnding()))}),
    "one of two is replaced, a death": ("ss", 2, {**replaced(1), "deaths": 1}),
    "one of two is replaced, a break": ("s", 2, {**replaced(1), "breaks": 1}),
    "rank 0 is replaced, a false death": ("s", 2, {**replaced(0), "freezes": 1}),
    "rank 0 is replaced, they evaluate, a death": ("se", 2, {**replaced(0), "deaths": 1}),
    "the only one is replaced, a death": (
        "sss",
        1,
        {"free": 1, "high": 2, "wishes": ((0, ReplaceAsked()),), "deaths": 1},
    ),
    "one is replaced while another joins": (
        "s",
        2,
        {"free": 2, "wishes": ((0, ReplaceAsked()), (None, ResizeAsked(3)))},
    ),
    "one is replaced while one is to leave, a death": ("s", 2, {**replaced(0), **LEAVING, "low": 1, "deaths": 1}),
    "both are replaced, in one place": ("ss", 2, {**replaced(0), "wishes": ((0, ReplaceAsked()), (1, ReplaceAsked()))}),
    "one leaves first for want of room, a death": ("ss", 2, {**NO_ROOM, "deaths": 1}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("program", "workers", "case"), CASES.values(), ids=CASES)
def test_no_order_of_events_breaks_a_rule(program: str, workers: int, case: dict[str, Any]) -> None:
    assert "over" in ends(program, workers, **case)


# -- rules that were thought of, and do not hold: each is found out ---------------------------------------------------


def test_a_rewind_for_anyones_evaluation_would_lose_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that of the furthest counts: see ``reconcile``."""

    def rash(rows: Sequence[MemberStatus]) -> RecoveryPlan:
        dirty = any(row.unrepeatable for row in rows)
        return reconcile([replace(row, unrepeatable=dirty) for row in rows])

    monkeypatch.setattr(protocol_model, "reconcile", rash)
    with pytest.raises(protocol_model.Wrong, match="loses a completed step"):
        ends("es", 3, high=3, deaths=1)


def test_a_forced_version_with_those_on_their_way_out_would_mix_who_is_two_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = machine._replace_broken

    def generous(state: Any) -> Any:
        members = tuple(worker.number for worker in state.members)
        if not members or state.current is None:
            return honest(state)
        state, proclaim = machine._install(replace(state, proposed=None), members)
        return state, (proclaim,)

    monkeypatch.setattr(machine, "_replace_broken", generous)
    with pytest.raises(protocol_model.Wrong, match="took different steps"):
        ends("ss", 2, high=2, wishes=((None, ResizeAsked(1)),))


def test_a_joiner_that_did_not_come_counts_as_lost_to_who_has_evaluated_with_it_in_mind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = protocol_model.Model._arrive

    def careless(self: Any, state: Any, i: int, name: int) -> Any:
        version = self.versions[state.workers[i].version] if state.workers[i].version else None
        if version is None or not version.joiners:
            return honest(self, state, i, name)
        without = replace(version, members=tuple(m for m in version.members if m not in version.joiners))
        self.versions[state.workers[i].version] = without
        try:
            return honest(self, state, i, name)
        finally:
            self.versions[state.workers[i].version] = version

    monkeypatch.setattr(protocol_model.Model, "_arrive", careless)
    with pytest.raises(protocol_model.Wrong, match="an evaluation of the parts"):
        ends("se", 1, **grow(2), deaths=1)
