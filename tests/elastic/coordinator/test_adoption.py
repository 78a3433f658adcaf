"""Workers that outlive their coordinator are taken over by the next one: by what they say, over real connections."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from tests.support.members_kit import LIMIT_S, begun, coordinating, eventually, members

from elastune.core.journal.records import Checkpointed
from elastune.core.sync_plan import SyncPlan
from elastune.elastic.coordinator import adoption
from elastune.elastic.coordinator.adoption import AdoptingCoordinator
from elastune.elastic.coordinator.controller_interface import (
    ListenOptions,
    RecordSent,
    Timeouts,
    WorkerBounds,
    WorkerDisconnected,
    WorkerLookups,
)
from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.elastic.coordinator.machine import Confirm, Dismiss, Release, begin
from elastune.elastic.wire.messages import InstallView, Noticed, ResizeAsked, Returned
from elastune.elastic.wire.view import View
from elastune.elastic.worker.client import ORPHANED_CODE, CoordinatorClient, RunOver
from elastune.runtime.worker import final_code

EMPTY = begin((), 1, 4)


def trains(view: View, **more: object) -> Returned:
    return replace(Returned(member=True, ready=True, latest_view=view, version=view.number, step=7), **more)


# -- the decision -----------------------------------------------------------------------------------------------------


def test_a_view_that_all_its_members_train_under_goes_on() -> None:
    view = View(5, (0, 2, 3))
    back = {number: trains(view) for number in view.members}
    assert adoption.can_go_on(back)
    state, result = adoption.take_over(EMPTY, back, {2: "there"})
    assert (state.current, state.proposed, result) == (view, None, ())
    assert (state.next_worker, state.next_view, state.target, state.get(2).host) == (4, 6, 3, "there")


def test_a_notice_that_comes_before_its_worker_is_kept_for_it() -> None:
    view, back = View(5, (0, 1)), adoption.Adoption()
    back.comes(0, "here", trains(view))
    for worker in (0, 1):
        back.note_event(worker, Noticed(20.0 + worker, "spot"))
    back.comes(1, "there", trains(view))
    assert [back.back[worker].noticed_s for worker in (0, 1)] == [20.0, 21.0]
    state, _ = adoption.take_over(EMPTY, back.back, back.hosts)
    assert [worker.preempted for worker in state.workers] == [True, True]


def test_a_joiner_that_nobody_has_confirmed_is_confirmed() -> None:
    view = View(6, (0, 1), scheduled=True, joiners=(1,))
    state, result = adoption.take_over(EMPTY, {0: trains(view), 1: trains(view, member=False)}, {})
    assert result == (Confirm(1, 6),)
    assert [worker.number for worker in state.members] == [0, 1]


def test_who_left_with_the_view_in_force_is_released() -> None:
    view = View(6, (0,), scheduled=True)
    state, result = adoption.take_over(EMPTY, {0: trains(view), 1: trains(View(5, (0, 1)), latest_view=view)}, {})
    assert result == (Release(1),)
    assert [worker.number for worker in state.workers] == [0]


@pytest.mark.parametrize(
    "back",
    [
        {0: trains(View(5, (0, 1, 2))), 1: trains(View(5, (0, 1, 2)))},
        {0: trains(View(5, (0, 1)), broken=5), 1: trains(View(5, (0, 1)))},
        {0: trains(View(4, (0, 1)), latest_view=View(5, (0, 1))), 1: trains(View(4, (0, 1)))},
        {0: trains(View(5, (0, 1, 2), scheduled=True, joiners=(2,))), 1: trains(View(4, (0, 1)))},
    ],
    ids=["one is missing", "one has found it broken", "one has not come to it", "one has not heard of it"],
)
def test_a_view_that_is_not_whole_is_replaced(back: dict[int, Returned]) -> None:
    state, result = adoption.take_over(EMPTY, back, {})
    assert result == (InstallView(View(6, (0, 1))),)
    assert state.proposed is not None


def test_a_joiner_that_was_not_taken_in_is_no_member_of_the_next_view() -> None:
    view = View(6, (0, 1), scheduled=True, joiners=(1,))
    back = {0: trains(View(5, (0,)), latest_view=view), 1: Returned(ready=True, latest_view=view)}
    state, result = adoption.take_over(EMPTY, back, {})
    assert result == (InstallView(View(7, (0,))),)
    assert state.get(1).phase == "ready"


def test_without_anybody_who_holds_the_state_nothing_goes_on() -> None:
    assert not adoption.can_go_on({})
    assert not adoption.can_go_on({0: Returned()})
    assert not adoption.can_go_on({2: Returned(ready=True, latest_view=View(3, (0, 1)))})
    assert not adoption.can_go_on({0: Returned(ready=True, latest_view=View(3, (0, 1), scheduled=True, joiners=(0,)))})


def test_a_first_view_that_not_all_have_come_to_begins_again() -> None:
    first = View(1, (0, 1, 2), initial=True)
    back = {0: trains(first, step=0), 1: Returned(ready=True, latest_view=first)}
    assert adoption.can_go_on(back)
    state, result = adoption.take_over(EMPTY, back, {})
    assert result == (InstallView(View(2, (0, 1), initial=True)),)
    assert state.current is None


def test_a_first_view_that_those_who_are_left_trained_under_is_replaced() -> None:
    first = View(1, (0, 1), initial=True)
    _, result = adoption.take_over(EMPTY, {0: trains(first)}, {})
    assert result == (InstallView(View(2, (0,))),)


def test_a_run_that_has_ended_meanwhile_is_over() -> None:
    view = View(5, (0, 1))
    _, result = adoption.take_over(EMPTY, {number: trains(view, done=True) for number in (0, 1)}, {})
    assert result == (Dismiss(),)


# -- over connections -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def next_one(before: Coordinator) -> Iterator[AdoptingCoordinator]:
    """A coordinator at the address of ``before``, which is gone."""
    port = int(before.address.rpartition(":")[2])
    timeouts, entrance = Timeouts(heartbeat_s=5.0, grace_s=LIMIT_S), ListenOptions(port=port, token=before.token)
    coordinator = AdoptingCoordinator(WorkerBounds(1, 4), timeouts, entrance, WorkerLookups())
    try:
        yield coordinator
    finally:
        coordinator.close()


def taken_over(coordinator: AdoptingCoordinator, workers: Sequence[int]) -> None:
    eventually(lambda: set(coordinator.back) == set(workers))
    assert coordinator.adopt(workers, 0) is not None


def reports(coordinator: Coordinator) -> list[tuple[int, int, int]]:
    results = [results for results in coordinator.take() if isinstance(results, RecordSent)]
    return [(sent.worker, sent.nth, sent.record.step) for sent in results if isinstance(sent.record, Checkpointed)]


def test_members_train_on_and_what_they_say_meanwhile_arrives() -> None:
    with coordinating(2, grace_s=LIMIT_S) as old, members(old, 0, 1) as (first, second):
        number = begun([first, second])
        first.report(Checkpointed(1, "a"))
        first.report(Checkpointed(2, "b"))
        before: list[tuple[int, int, int]] = []
        eventually(lambda: before.extend(reports(old)) or len(before) == 2)
        old.kept({0: 1})
        eventually(lambda: first._reconnect_state._unkept and first._reconnect_state._unkept[0][0] == 2)
        old.close()
        second.report(Checkpointed(3, "c"))
        assert not first.superseded(number)
        with next_one(old) as new:
            taken_over(new, [0, 1])
            results: list[tuple[int, int, int]] = []
            eventually(lambda: results.extend(reports(new)) or len(results) == 2)
            assert sorted(results) == [(0, 2, 2), (1, 1, 3)]
            assert new.members == [0, 1]
            assert not first.superseded(number)
            new.ask(ResizeAsked(1))
            view = eventually(lambda: first.pending(number))
            assert view is not None
            assert (view.members, view.scheduled) == ((0,), True)


def test_survivors_meet_where_one_has_died() -> None:
    with coordinating(2, grace_s=LIMIT_S) as old, members(old, 0, 1) as (first, second):
        number = begun([first, second])
        old.close()
        second.close()
        first.broken(number, "second is gone")
        with next_one(old) as new:
            taken_over(new, [0])
            assert first.await_view(number, LIMIT_S).members == (0,)


def test_who_waits_at_the_end_of_a_round_waits_there_for_the_next_one_too() -> None:
    """Nobody but the one that has not come is late: not who had told the coordinator before, nor who told meanwhile."""
    sync = SyncPlan.parse("local:learners=4,every=2,quorum=3,grace=0.5")
    with coordinating(4, grace_s=LIMIT_S) as old, members(old, 0, 1, 2, 3) as them:
        number = begun(them)
        them[0].report_round(number, 7, 1, sync, 1, 0.0)
        old.close()
        with next_one(old) as new:
            eventually(lambda: set(new.back) == {0, 1, 2, 3})
            them[1].report_round(number, 7, 1, sync, 1, 0.0)
            taken_over(new, range(4))
            them[2].report_round(number, 7, 1, sync, 1, 0.0)
            assert them[0].await_view(number, LIMIT_S).members == (0, 1, 2)


def test_two_controllers_die_one_after_the_other() -> None:
    with coordinating(1, grace_s=LIMIT_S) as old, members(old, 0) as (first,):
        number = begun([first])
        for _ in range(2):
            old.close()
            with next_one(old) as new:
                taken_over(new, [0])
                assert new.members == [0]
            old = new
        assert not first.superseded(number)


def test_a_run_that_begins_anew_there_sends_them_away() -> None:
    with coordinating(1, grace_s=LIMIT_S) as old, members(old, 0) as (first,):
        number = begun([first])
        old.close()
        port = int(old.address.rpartition(":")[2])
        with coordinating(1, port=port, token=old.token), pytest.raises(RunOver, match="without this worker"):
            first.await_view(number, LIMIT_S)


def test_whose_connection_breaks_while_the_coordinator_lives_is_turned_away() -> None:
    """The others have gone on by then; its end must not look like one that the program chose."""
    with coordinating(2, grace_s=LIMIT_S) as here, members(here, 0, 1) as (first, second):
        number = begun([first, second])
        second._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(RunOver, match="without this worker"):
            second.await_view(number, LIMIT_S)
        assert final_code(second, 0) == ORPHANED_CODE
        assert final_code(second, 1) == 1
        assert first.await_view(number, LIMIT_S).members == (0,)
        assert final_code(first, 0) == 0


def test_who_ended_meanwhile_says_so_to_the_next_one() -> None:
    with coordinating(1, grace_s=LIMIT_S) as old, members(old, 0) as (first,):
        begun([first])
        old.close()
        first.done()
        with next_one(old) as new:
            taken_over(new, [0])
            eventually(lambda: first.superseded(1))
            first.farewell(0)
            eventually(lambda: WorkerDisconnected(0, 0) in new.take())


def test_where_nobody_comes_the_run_stops_and_nothing_waits_on() -> None:
    with coordinating(1, grace_s=0.3) as old, members(old, 0) as (first,):
        number = begun([first])
        old.close()
        began = time.monotonic()
        eventually(first.stop_requested)
        assert time.monotonic() - began >= 0.25
        assert first.abandoned
        assert not first.superseded(number)  # the step that it is in goes on
        with pytest.raises(RunOver, match="coordinator is gone"):
            first.await_view(number, LIMIT_S)
        first.farewell(0)


def test_without_a_grace_a_worker_is_orphaned_at_once() -> None:
    whys: list[str] = []
    with coordinating(1) as old:
        client = CoordinatorClient(old.address, old.token, 0)
        client.on_orphaned = whys.append
        old.close()
        eventually(lambda: whys)
        client.close()
