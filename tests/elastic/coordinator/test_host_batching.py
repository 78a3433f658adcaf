"""Workers of a new host join by one view: how long the first of them wait for the others."""

from __future__ import annotations

from tests.support.membership_events import decode_event

from elastune.elastic.coordinator.coordinator import HOST_WAIT_S, HostBatching
from elastune.elastic.coordinator.machine import Instruction, Membership, begin, transition
from elastune.elastic.wire.messages import (
    CapacityChanged,
    Connected,
    Event,
    InstallView,
    Lost,
    Ready,
    ResizeAsked,
    Running,
    WaitedEnough,
    encode_event,
)

Told = tuple[Membership, tuple[Instruction, ...]]


def told(state: Membership, *events: tuple[int | None, Event]) -> Told:
    """The state after ``events``, and the instructions of the last of them."""
    instructions: tuple[Instruction, ...] = ()
    for worker, event in events:
        state, instructions = transition(state, worker, event)
    return state, instructions


def growing(*hosts: str) -> Membership:
    """Worker 0 trains on host a; 1 and 2 are started, and those that have a host in ``hosts`` are connected there."""
    events = [(0, Connected("a")), (0, Ready()), (0, Running(1, 0)), (None, ResizeAsked(3)), (None, CapacityChanged(2))]
    return told(begin([0], 1, 3), *events, *((i, Connected(host)) for i, host in enumerate(hosts, 1)))[0]


def joiners(outcome: Told) -> list[tuple[int, ...]]:
    return [each.view.joiners for each in outcome[1] if isinstance(each, InstallView)]


def test_workers_of_a_new_host_come_together() -> None:
    state, instructions = told(growing("b", "b"), (1, Ready()))
    assert not instructions
    assert joiners(told(state, (2, Ready()))) == [(1, 2)]


def test_one_whose_host_nobody_knows_yet_may_be_there() -> None:
    state, instructions = told(growing("b"), (1, Ready()))
    assert not instructions
    assert joiners(told(state, (2, Connected("b")), (2, Ready()))) == [(1, 2)]


def test_where_members_are_already_and_on_hosts_apart_nobody_waits() -> None:
    assert joiners(told(growing("a", "a"), (1, Ready()))) == [(1,)]
    assert joiners(told(growing("b", "c"), (1, Ready()))) == [(1,)]


def test_nobody_waits_for_one_that_is_lost() -> None:
    assert joiners(told(growing("b", "b"), (1, Ready()), (2, Lost()))) == [(1,)]


def test_who_is_late_is_waited_for_no_longer_and_comes_by_a_view_of_its_own() -> None:
    state, instructions = told(growing("b", "b"), (1, Ready()), (None, WaitedEnough()))
    assert [each.view.joiners for each in instructions if isinstance(each, InstallView)] == [(1,)]
    assert joiners(told(state, (0, Running(2, 5)), (1, Running(2, 5)), (2, Ready()))) == [(2,)]


def test_the_limit_runs_from_when_the_first_is_seen_to_wait() -> None:
    waiting, company = told(growing("b", "b"), (1, Ready()))[0], HostBatching()
    assert not company.waited_enough(growing("b", "b"), 10.0)  # nobody is ready
    assert not company.waited_enough(waiting, 20.0)
    assert not company.waited_enough(waiting, 20.0 + HOST_WAIT_S / 2)
    assert company.waited_enough(waiting, 20.0 + HOST_WAIT_S)
    assert not company.waited_enough(waiting, 20.0 + HOST_WAIT_S)  # said once


def test_it_is_an_event_that_a_journal_keeps() -> None:
    assert decode_event(encode_event(None, WaitedEnough())) == (None, WaitedEnough())
