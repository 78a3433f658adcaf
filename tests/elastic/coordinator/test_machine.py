"""The membership machine: every rule once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.membership_events import decode_event

from elastune.core.mesh import Mesh
from elastune.core.mesh_choice import UNBOUNDED, MeshChoice
from elastune.elastic.coordinator import machine
from elastune.elastic.coordinator.machine import (
    Confirm,
    Dismiss,
    End,
    GiveUp,
    Instruction,
    Membership,
    ProtocolViolation,
    Release,
    Start,
    StopRun,
    begin,
    objection,
    transition,
)
from elastune.elastic.wire.messages import (
    Broken,
    CapacityChanged,
    Connected,
    Done,
    Event,
    InstallView,
    LayersFound,
    Left,
    Lost,
    Noticed,
    NoticeEnding,
    Progressed,
    Ready,
    ReplaceAsked,
    ReshapeAsked,
    ResizeAsked,
    Running,
    encode_event,
)
from elastune.elastic.wire.view import View


def told(state: Membership, *events: tuple[int | None, Event]) -> tuple[Membership, list[Instruction]]:
    """The state after ``events``, and all instructions of the last of them."""
    instructions: tuple[Instruction, ...] = ()
    for event in events:
        state, instructions = transition(state, *event)
    return state, list(instructions)


def warm(*workers: int) -> list[tuple[int | None, Event]]:
    return [event for worker in workers for event in ((worker, Connected()), (worker, Ready()))]


def run(version: int, first_step: int, *workers: int) -> list[tuple[int | None, Event]]:
    return [(worker, Running(version, first_step)) for worker in workers]


def training(workers: int, low: int = 1, high: int = 4, free: int = 0, most_losses: int = 8) -> Membership:
    """A run whose first version is settled."""
    numbers = range(workers)
    events = [*warm(*numbers), *run(1, 0, *numbers), (None, CapacityChanged(free))]
    return told(begin(numbers, low, high, most_losses), *events)[0]


def fresh(number: int, *members: int) -> InstallView:
    return InstallView(View(number, members, initial=True))


def forced(number: int, *members: int) -> InstallView:
    return InstallView(View(number, members))


def planned(number: int, *members: int, joiners: Sequence[int] = ()) -> InstallView:
    return InstallView(View(number, members, scheduled=True, joiners=tuple(joiners)))


# -- beginning --------------------------------------------------------------------------------------------------------


def test_the_first_version_comes_when_all_are_warm() -> None:
    state = begin([0, 1], 1, 4)
    assert told(state, *warm(1), (0, Connected()))[1] == []
    state, instructions = told(state, *warm(1, 0))
    assert instructions == [fresh(1, 0, 1)]
    state, instructions = told(state, *run(1, 0, 0, 1))
    assert instructions == []
    assert state.current == fresh(1, 0, 1).view


def test_who_dies_before_the_first_version_is_replaced_and_the_others_wait_for_that() -> None:
    state, instructions = told(begin([0, 1], 1, 4), (None, CapacityChanged(1)), *warm(0), (1, Lost("boom")))
    assert instructions == [End(1, "boom", lost=True), Start((2,))]
    assert told(state, *warm(2))[1] == [fresh(1, 0, 2)]


def test_without_room_the_others_begin_alone() -> None:
    assert told(begin([0, 1], 1, 4), *warm(0), (1, Lost()))[1] == [End(1, "", lost=True), fresh(1, 0)]


def test_a_death_before_the_first_version_is_settled_makes_another_fresh_one() -> None:
    state = told(begin([0, 1, 2], 1, 4), *warm(0, 1, 2))[0]
    assert told(state, (0, Running(1, 0)), (2, Lost()))[1] == [End(2, "", lost=True), fresh(2, 0, 1)]


@pytest.mark.parametrize("wrong", [([0, 0], 1, 2, 8), ([-1], 1, 2, 8), ([0], 3, 2, 8), ([0], 0, 2, 8)])
def test_a_beginning_that_makes_no_sense_is_refused(wrong: tuple[list[int], int, int, int]) -> None:
    with pytest.raises(ValueError, match="must hold|begins with"):
        begin(*wrong)


# -- joining ----------------------------------------------------------------------------------------------------------


def test_a_worker_joins_by_a_planned_version_and_is_confirmed_when_it_holds_the_state() -> None:
    state, instructions = told(training(2, free=2), (None, ResizeAsked(3)))
    assert instructions == [Start((2,))]
    state, instructions = told(state, *warm(2))
    assert instructions == [planned(2, 0, 1, 2, joiners=[2])]
    state, instructions = told(state, (2, Running(2, 5)))
    assert instructions == [Confirm(2, 2)]
    state, instructions = told(state, *run(2, 5, 1, 0))
    assert state.current == planned(2, 0, 1, 2, joiners=[2]).view
    assert (state.proposed, instructions) == (None, [])


def test_one_plan_at_a_time() -> None:
    state = told(training(1, free=2), (None, ResizeAsked(3)), *warm(1))[0]
    state, instructions = told(state, *warm(2))
    assert instructions == []
    assert told(state, *run(2, 1, 0, 1))[1] == [Confirm(1, 2), planned(3, 0, 1, 2, joiners=[2])]


def test_a_joiner_that_dies_on_the_way_breaks_the_plan() -> None:
    state = told(training(2, free=1), (None, ResizeAsked(3)), *warm(2))[0]
    assert told(state, (2, Lost()))[1] == [End(2, "", lost=True), forced(3, 0, 1)]


def test_a_joiner_waits_again_when_a_member_dies_and_comes_with_the_next_plan() -> None:
    state, instructions = told(training(2, free=1), (None, ResizeAsked(3)), *warm(2), (1, Lost()))
    assert instructions == [End(1, "", lost=True), forced(3, 0)]
    state, instructions = told(state, (2, Running(2, 4)), (0, Running(3, 4)))  # the joiner's comes too late
    assert instructions == [planned(4, 0, 2, joiners=[2])]


def test_a_confirmed_joiner_is_a_member_whatever_happens_then() -> None:
    _, instructions = told(training(2, free=1), (None, ResizeAsked(3)), *warm(2), (2, Running(2, 4)), (0, Lost()))
    assert instructions == [End(0, "", lost=True), forced(3, 1, 2)]


def test_a_joiner_that_cannot_be_taken_in_is_ended_and_replaced() -> None:
    state = told(training(2, free=2), (None, ResizeAsked(3)), *warm(2))[0]
    state, instructions = told(state, (0, Broken(2, "no route")))
    assert instructions == [End(2, "it could not be taken in"), forced(3, 0, 1), Start((3,))]


# -- leaving ----------------------------------------------------------------------------------------------------------


def test_the_highest_ranks_leave() -> None:
    state, instructions = told(training(4), (None, ResizeAsked(2)))
    assert instructions == [planned(2, 0, 1)]
    state, instructions = told(state, (3, Left()), *run(2, 9, 0, 1))
    assert instructions == [Release(2)]  # which has not said that it left: it may not know that it can
    assert told(state, (2, Left()))[1] == []


def test_workers_that_are_not_in_yet_are_ended_first_the_least_warm_before_others() -> None:
    state = told(training(1, free=3), (None, ResizeAsked(4)), *warm(1), (3, Connected()))[0]
    assert told(state, (None, ResizeAsked(3)))[1] == [End(2, "fewer workers are wanted")]
    assert told(state, (None, ResizeAsked(2)))[1] == [End(n, "fewer workers are wanted") for n in (2, 3)]


@pytest.mark.parametrize(("asked", "target"), [(0, 2), (3, 3), (99, 4)])
def test_sizes_are_bounded(asked: int, target: int) -> None:
    assert told(training(2, low=2), (None, ResizeAsked(asked)))[0].target == target


def test_a_worker_that_got_notice_leaves_at_once_and_is_replaced() -> None:
    state, instructions = told(training(3, free=1), (0, Noticed(30, "spot")))
    assert instructions == [Start((3,)), planned(2, 1, 2)]
    state, instructions = told(state, (0, Left()), *run(2, 3, 1, 2), *warm(3))
    assert instructions == [planned(3, 1, 2, 3, joiners=[3])]
    assert told(state, (0, Noticed(30)))[1] == []


def test_the_last_member_leaves_when_its_replacement_holds_the_state() -> None:
    state, instructions = told(training(1, free=1), (0, Noticed(30)))
    assert instructions == [Start((1,))]
    state, instructions = told(state, *warm(1))
    assert instructions == [planned(2, 0, 1, joiners=[1])]
    assert told(state, *run(2, 3, 1, 0))[1] == [planned(3, 1)]


def test_a_notice_that_leaves_too_few_stops_the_run_in_good_order_once_it_is_nearly_over() -> None:
    state, instructions = told(training(2, low=2), (1, Noticed(30, "spot")))
    assert (instructions, state.stage) == ([], "open")
    state, instructions = told(state, (1, NoticeEnding()))
    assert instructions == [StopRun(1, "1 worker would remain, the fewest allowed are 2")]
    assert told(state, (None, ResizeAsked(4)), (None, CapacityChanged(4)))[1] == []
    assert told(state, (0, Done()), (1, Done()))[1] == [Dismiss()]


def all_noticed() -> Membership:
    """Two members, both with a notice: worker 0 has left, worker 1 trains on until another one comes."""
    state, instructions = told(training(2), (0, Noticed(60)), (1, Noticed(60)), (0, Left()), (1, Running(2, 5)))
    assert (state.current, state.stage, instructions) == (planned(2, 1).view, "open", [])
    return state


def test_a_notice_to_all_waits_for_the_replacements_and_hands_the_state_over() -> None:
    state, instructions = told(all_noticed(), (None, CapacityChanged(1)))
    assert instructions == [Start((2,))]
    state, instructions = told(state, *warm(2))
    assert instructions == [planned(3, 1, 2, joiners=[2])]
    state, instructions = told(state, *run(3, 9, 1, 2))
    assert instructions == [Confirm(2, 3), planned(4, 2)]
    state, instructions = told(state, (1, Left()), *run(4, 9, 2))
    assert (state.current, state.stage) == (planned(4, 2).view, "open")
    assert told(state, (1, NoticeEnding())) == (state, [])


def test_a_notice_to_all_stops_the_run_when_it_is_nearly_over_and_no_replacement_holds_the_state() -> None:
    state = all_noticed()
    *_, stop = told(state, (1, NoticeEnding()))[1]
    assert stop == StopRun(1, "0 workers would remain, the fewest allowed are 1")
    starting = told(state, (None, CapacityChanged(1)))[0]
    *_, stop = told(starting, (1, NoticeEnding()))[1]
    assert stop == StopRun(1, "no member would remain, and no other worker has joined yet")


def test_a_member_with_a_later_notice_goes_on_without_the_one_whose_notice_ends() -> None:
    state = told(training(3, low=2), (0, Noticed(30)), (0, Left()), *run(2, 3, 1, 2), (1, Noticed(90)))[0]
    assert state.current == planned(2, 1, 2).view, "two are the fewest, so worker 1 stays"
    state = told(state, (2, Noticed(20)))[0]
    assert [type(each) for each in told(state, (2, NoticeEnding()))[1]] == [StopRun]
    one_is_enough = told(training(2), (0, Noticed(30)), (1, Noticed(90)))[0]
    assert told(one_is_enough, (0, NoticeEnding()))[1] == []


def test_with_a_notice_the_fewest_stay_until_replacements_join() -> None:
    state, instructions = told(training(2, low=2, high=3), (0, Noticed(60)), (1, Noticed(60)))
    assert (instructions, state.stage) == ([], "open")
    state = told(state, (None, CapacityChanged(1)))[0]
    state, instructions = told(state, *warm(2))
    assert instructions == [planned(2, 0, 2, joiners=[2])]


def test_one_on_its_way_out_stays_out_when_a_member_is_lost() -> None:
    """The others may have taken steps under the newer version already, which it could not make up for."""
    _, instructions = told(training(3), (None, ResizeAsked(2)), (0, Running(2, 4)), (1, Lost()))
    assert instructions == [End(1, "", lost=True), Release(2), forced(3, 0)]


def test_one_on_its_way_out_stays_where_nobody_else_is_left() -> None:
    state, instructions = told(training(2), (None, ResizeAsked(1)), (0, Lost()))
    assert instructions == [End(0, "", lost=True), forced(3, 1)]
    assert told(state, (1, Left()))[0].workers == ()


# -- replacing --------------------------------------------------------------------------------------------------------


def test_a_slow_worker_goes_on_until_its_replacement_comes_in_the_version_that_it_leaves_by() -> None:
    state, instructions = told(training(2, low=2, high=3, free=1), (1, ReplaceAsked()))
    assert instructions == [Start((2,))]
    assert told(state, (1, ReplaceAsked()), (2, Connected()))[1] == []
    state, instructions = told(state, *warm(2))
    assert instructions == [planned(2, 0, 2, joiners=[2])]
    state, instructions = told(state, (1, Left()), *run(2, 5, 2, 0))
    assert (state.current, instructions) == (planned(2, 0, 2, joiners=[2]).view, [])


def test_rank_0_hands_its_place_to_the_next() -> None:
    state = told(training(3, free=1), (0, ReplaceAsked()))[0]
    assert told(state, *warm(3))[1] == [planned(2, 1, 2, 3, joiners=[3])]


def test_a_lone_slow_worker_leaves_when_its_replacement_holds_the_state() -> None:
    state, instructions = told(training(1, free=1), (0, ReplaceAsked()), *warm(1))
    assert instructions == [planned(2, 0, 1, joiners=[1])]
    assert told(state, *run(2, 3, 1, 0))[1] == [planned(3, 1)]


def test_without_room_a_slow_worker_leaves_first() -> None:
    state, instructions = told(training(2, high=2), (1, ReplaceAsked()))
    assert instructions == [planned(2, 0)]
    state, instructions = told(state, (1, Left()), (0, Running(2, 4)))
    assert instructions == []
    state, instructions = told(state, (None, CapacityChanged(1)))
    assert instructions == [Start((2,))]
    assert told(state, *warm(2))[1] == [planned(3, 0, 2, joiners=[2])]


def test_without_room_one_of_the_fewest_stays_until_there_is_some() -> None:
    state, instructions = told(training(2, low=2, high=3), (1, ReplaceAsked()))
    assert (instructions, state.stage) == ([], "open")
    state, instructions = told(state, (None, CapacityChanged(1)))
    assert instructions == [Start((2,))]
    assert told(state, *warm(2))[1] == [planned(2, 0, 2, joiners=[2])]


def test_a_slow_worker_does_not_leave_for_a_replacement_that_failed() -> None:
    state, instructions = told(training(2, high=3, free=1, most_losses=2), (1, ReplaceAsked()), (2, Lost()))
    assert instructions == [End(2, "", lost=True)]
    state, instructions = told(state, (None, CapacityChanged(1)))
    assert instructions == [Start((3,))]
    state, instructions = told(state, (3, Lost()), (None, CapacityChanged(1)))
    assert (instructions, state.stage) == ([], "open")
    assert told(state, (None, ResizeAsked(2)))[1] == [Start((4,))]


def test_a_replacement_that_dies_as_it_joins_takes_the_slow_ones_place_with_it() -> None:
    """The others may have taken steps without the slow one by now."""
    state = told(training(2, low=2, high=3, free=1), (1, ReplaceAsked()), *warm(2))[0]
    state, instructions = told(state, (2, Lost()))
    assert instructions == [End(2, "", lost=True), Release(1), forced(3, 0)]
    assert told(state, (None, CapacityChanged(2)))[1] == [Start((3,))]
    assert state.stage == "open"


def test_a_slow_worker_that_dies_is_lost_and_its_replacement_comes() -> None:
    state, instructions = told(training(3, high=4, free=1), (1, ReplaceAsked()), (1, Lost()))
    assert instructions == [End(1, "", lost=True), forced(2, 0, 2)]
    assert told(state, *run(2, 4, 0, 2), *warm(3))[1] == [planned(3, 0, 2, 3, joiners=[3])]


def test_a_slow_worker_that_gets_notice_leaves_at_once() -> None:
    state = told(training(3, free=1), (1, ReplaceAsked()))[0]
    assert told(state, (1, Noticed(30)))[1] == [planned(2, 0, 2)]


def test_when_another_is_lost_the_slow_worker_counts() -> None:
    state, instructions = told(training(2, low=2, high=3, free=1), (1, ReplaceAsked()), (0, Lost()))
    assert instructions == [End(0, "", lost=True), forced(2, 1)]
    state, instructions = told(state, (None, CapacityChanged(1)), (1, Running(2, 4)), *warm(2))
    assert instructions == [planned(3, 1, 2, joiners=[2])]
    state = told(state, *run(3, 6, 1, 2))[0]
    assert told(state, *warm(3))[1] == [planned(4, 2, 3, joiners=[3])]


def test_fewer_workers_are_wanted_meanwhile_so_the_slow_one_leaves() -> None:
    _, instructions = told(training(3, free=1), (0, ReplaceAsked()), (None, ResizeAsked(2)))
    assert instructions == [End(3, "fewer workers are wanted"), planned(2, 1, 2)]


def test_more_workers_are_wanted_meanwhile_so_the_slow_one_waits_for_the_last() -> None:
    state, instructions = told(training(2, free=2), (0, ReplaceAsked()), (None, ResizeAsked(3)))
    assert instructions == [Start((3,))]
    state, instructions = told(state, *warm(2))
    assert instructions == [planned(2, 0, 1, 2, joiners=[2])]
    assert told(state, *run(2, 4, 0, 1, 2), *warm(3))[1] == [planned(3, 1, 2, 3, joiners=[3])]


def test_two_slow_workers_and_room_for_one() -> None:
    state, instructions = told(training(2, high=3, free=1), (0, ReplaceAsked()), (1, ReplaceAsked()))
    assert instructions == []
    state, instructions = told(state, *warm(2))
    assert instructions == [planned(2, 0, 2, joiners=[2])]
    state, instructions = told(state, *run(2, 4, 2, 0))
    assert instructions == [Release(1)]  # and worker 0 does not leave: there will be room at once
    assert told(state, (None, CapacityChanged(1)), *warm(3))[1] == [planned(3, 2, 3, joiners=[3])]


@pytest.mark.parametrize("news", [(None, CapacityChanged(0)), (0, ReplaceAsked())])
def test_room_that_others_have_taken_is_not_waited_for_for_ever(news: Event) -> None:
    """The host tells so, or somebody asks again."""
    state = told(training(2, high=3, free=1), (0, ReplaceAsked()), (1, ReplaceAsked()), *warm(2), *run(2, 4, 2, 0))[0]
    assert told(state, news)[1] == [planned(3, 2)]


def test_nobody_is_replaced_in_a_run_that_ends() -> None:
    for end in ((0, Done()), (1, NoticeEnding())):
        _, instructions = told(training(2, low=2), end, (1, ReplaceAsked()), (None, CapacityChanged(2)))
        assert instructions == []


# -- loss -------------------------------------------------------------------------------------------------------------


def test_survivors_keep_their_order_and_a_replacement_is_started() -> None:
    state, instructions = told(training(3, free=1), (0, Lost("kill -9")))
    assert instructions == [End(0, "kill -9", lost=True), forced(2, 1, 2), Start((3,))]
    state, instructions = told(state, (2, Broken(1, "its echo")), (1, Running(2, 7)))
    assert instructions == []
    assert told(state, *warm(3), (2, Running(2, 7)))[1] == [planned(3, 1, 2, 3, joiners=[3])]


def test_several_deaths_at_once_count_once() -> None:
    state = training(4, most_losses=2)
    state, instructions = told(state, (1, Lost()), (2, Lost()), (3, Lost()))
    assert instructions == [End(3, "", lost=True), forced(4, 0)]


def test_a_break_without_a_death_makes_a_version_of_the_same_members() -> None:
    assert told(training(2), (1, Broken(1, "reset by peer")))[1] == [forced(2, 0, 1)]


def test_when_all_are_lost_whoever_is_warm_begins_at_the_checkpoint() -> None:
    state, instructions = told(training(1, free=1), (None, ResizeAsked(2)), *warm(1), (0, Lost()))
    assert instructions == [End(0, "", lost=True), fresh(3, 1)]
    state, instructions = told(training(1), (0, Lost()), (None, CapacityChanged(1)))
    assert instructions == [Start((1,))]
    assert told(state, *warm(1))[1] == [fresh(2, 1)]


def test_never_more_are_started_than_there_is_room_for() -> None:
    state, instructions = told(training(1, free=1), (None, ResizeAsked(4)))
    assert instructions == [Start((1,))]
    assert told(state, (None, CapacityChanged(1)))[1] == [Start((2,))]


def test_losses_without_progress_end_the_run() -> None:
    state = training(1, most_losses=3)
    for worker in (0, 1):
        state = told(
            state, (worker, Lost()), (None, CapacityChanged(1)), *warm(worker + 1), (worker + 1, Running(worker + 2, 0))
        )[0]
    assert [type(x) for x in told(state, (2, Lost("oom")))[1]] == [End, GiveUp]
    state = training(1, most_losses=3)
    for worker in range(6):
        state = told(state, (worker, Lost()), (None, CapacityChanged(1)), *warm(worker + 1))[0]
        state = told(state, (worker + 1, Running(worker + 2, 10 * worker + 10)))[0]
    assert state.stage == "open"


def test_workers_that_end_before_their_first_step_are_not_said_to_have_failed_to_start() -> None:
    """A program that crashes in its first lines has started well."""
    state, instructions = told(begin(range(1), 1, 1, 2), (0, Connected()), (0, Lost("it crashed")))
    assert not any(isinstance(each, GiveUp) for each in instructions)
    state, _ = told(state, (None, CapacityChanged(1)))
    (give_up,) = [x for x in told(state, (1, Connected()), (1, Lost("it crashed")))[1] if isinstance(x, GiveUp)]
    assert give_up.why == "2 workers in a row were lost before their first step; the last: it crashed"


def test_losses_of_all_with_progress_in_between_do_not_end_the_run() -> None:
    """They begin again at a checkpoint, so their views begin with step 0 as far as anybody says."""
    state = training(1, most_losses=2)
    for worker in range(6):
        state = told(state, (worker, Lost()), (None, CapacityChanged(1)), *warm(worker + 1))[0]
        state = told(state, (worker + 1, Running(worker + 2, 0)), (None, Progressed(10 * worker + 10)))[0]
    assert state.stage == "open"


def test_breaks_without_progress_end_the_run_too() -> None:
    state = training(2, most_losses=3)
    state = told(state, (0, Broken(1)), *run(2, 0, 0, 1), (0, Broken(2)))[0]
    assert [type(x) for x in told(state, *run(3, 0, 0, 1), (1, Broken(3)))[1]] == [GiveUp]


def test_replacements_that_fail_to_start_cost_a_healthy_run_no_more_than_themselves() -> None:
    state, instructions = told(training(1, most_losses=2), (None, ResizeAsked(2)), (None, CapacityChanged(1)))
    assert instructions == [Start((1,))]
    state, instructions = told(state, (1, Lost()), (None, CapacityChanged(1)))
    assert instructions == [Start((2,))]
    state, instructions = told(state, (2, Lost()), (None, CapacityChanged(1)))
    assert (instructions, state.stage) == ([], "open")
    assert told(state, (None, ResizeAsked(2)))[1] == [Start((3,))]


def test_a_run_that_nobody_can_begin_is_given_up() -> None:
    state = told(begin([0], 1, 1, 2), (None, CapacityChanged(1)), (0, Lost()))[0]
    assert [type(x) for x in told(state, (1, Lost("no such file")))[1]] == [End, GiveUp]


# -- the end ----------------------------------------------------------------------------------------------------------


def test_the_run_is_over_when_all_members_are_done() -> None:
    state, instructions = told(training(2, free=2), (1, Done()), (None, ResizeAsked(4)))
    assert instructions == []
    state, instructions = told(state, (1, Done()), (0, Done()))
    assert (instructions, state.stage) == ([Dismiss()], "over")
    assert told(state, (0, Lost()), (7, Connected()), (1, Running(9, 9)))[1] == []


def test_a_loss_after_somebody_is_done_is_served_by_the_others_and_not_replaced() -> None:
    state, instructions = told(training(3, free=2), (0, Done()), (2, Lost()))
    assert instructions == [End(2, "", lost=True), forced(2, 0, 1)]
    assert told(state, (1, Lost()))[1] == [End(1, "", lost=True), Dismiss()]


def test_who_is_still_on_its_way_when_the_run_ends_is_ended() -> None:
    state = told(training(1, free=2), (None, ResizeAsked(3)), *warm(1))[0]
    assert told(state, (0, Done()))[1] == [Dismiss(), End(2, "the run is over")]


# -- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "events",
    [
        [(0, Connected())],
        [(9, Connected())],
        [(0, Ready())],
        [(9, Lost())],
        [(None, ResizeAsked(3)), (2, Ready())],
        [(None, ResizeAsked(3)), (2, Done())],
        [(9, ReplaceAsked())],
        [(None, ResizeAsked(3)), *warm(2), (2, ReplaceAsked())],
        [(0, Running(1, 0))],
        [(0, Running(2, 0))],
        [(0, Broken(2))],
        [(1, Lost()), (0, Running(2, 3)), (0, Running(2, 3))],
        [(None, ResizeAsked(3)), *warm(2), (0, Running(2, 3)), (1, Running(2, 4))],
        [(None, ResizeAsked(3)), *warm(2), (2, Running(2, 1)), (2, Running(2, 1))],
        [(None, ResizeAsked(3)), *warm(2), (2, Broken(1))],
        [(None, ResizeAsked(1)), (1, Running(2, 1))],
        [(0, Left())],
    ],
)
def test_what_contradicts_the_state_is_refused(events: list[tuple[int | None, Event]]) -> None:
    state = training(2, free=2)
    *before, last = events
    state, _ = told(state, *before)
    with pytest.raises(ProtocolViolation):
        transition(state, *last)


@pytest.mark.parametrize(
    "late",
    [
        (1, Ready()),
        (1, Running(1, 0)),
        (1, Broken(1)),
        (1, Noticed(30)),
        (1, NoticeEnding()),
        (1, ReplaceAsked()),
        (1, Left()),
        (1, Lost()),
        (1, Done()),
        (0, Broken(1)),
    ],
)
def test_late_news_changes_nothing(late: tuple[int | None, Event]) -> None:
    state = told(training(3), (1, Lost()))[0]
    assert transition(state, *late) == (state, ())


def test_news_of_a_version_that_was_never_settled_changes_nothing() -> None:
    state = told(training(3, free=1), (None, ResizeAsked(4)), *warm(3), (1, Lost()))[0]
    for late in ((0, Running(2, 7)), (2, Broken(2))):
        assert transition(state, *late) == (state, ())


@pytest.mark.parametrize(
    "event",
    [
        *(
            (1, Connected()),
            (1, Ready()),
            (1, Running(2, 3)),
            (1, Broken(2, "why")),
            (1, Noticed(30, "why")),
            (1, NoticeEnding()),
            (1, Left()),
            (1, Lost("why")),
        ),
        *(
            (1, Done()),
            (1, ReplaceAsked()),
            (None, ResizeAsked(2)),
            (None, CapacityChanged(3)),
        ),
    ],
)
def test_events_survive_json(event: tuple[int | None, Event]) -> None:
    assert decode_event(json.loads(json.dumps(encode_event(*event)))) == event


@pytest.mark.parametrize(
    "rubbish",
    [
        *({}, {"event": "dance"}, {"event": ["lost"]}, {"event": "lost"}, {"event": "lost", "worker": -1}),
        *(
            {"event": "lost", "worker": 1, "more": 2},
            {"event": "lost", "worker": "1"},
            {"event": "done", "worker": 1.5},
        ),
        *({"event": "change_asked", "changes": {"lr": float("nan")}}, {"event": "change_asked", "changes": [1]}),
        *([], None, "lost"),
    ],
)
def test_rubbish_is_no_event(rubbish: Any) -> None:
    with pytest.raises(ValueError, match="no event|validation error"):
        decode_event(rubbish)


# -- meshes -----------------------------------------------------------------------------------------------------------

SHARDS = MeshChoice(Mesh(shard=2), shard=UNBOUNDED, tensor=2)


def standing(meshes: MeshChoice, workers: int, hosts: Sequence[str] = (), free: int = 0) -> Membership:
    """A run whose workers stand as ``meshes`` says."""
    numbers = range(workers)
    known = dict(enumerate(hosts))
    events: list[tuple[int | None, Event]] = []
    for worker in numbers:
        events += [(worker, Connected(known.get(worker, ""))), (worker, Ready())]
    state, _ = told(begin(numbers, 1, 8, 8, meshes), *events)
    assert state.proposed is not None
    return told(state, *run(1, 0, *state.proposed.members), (None, CapacityChanged(free)))[0]


def test_a_view_says_how_its_members_stand_and_on_which_hosts() -> None:
    view = standing(SHARDS, 4, ["a", "a", "b", "b"]).current
    assert view is not None
    assert (view.mesh, view.hosts) == ("data=2,shard=2", ("a", "a", "b", "b"))
    assert view.grid == Mesh(data=2, shard=2)
    one = standing(SHARDS, 4, ["a"] * 4).current
    assert one is not None
    assert one.hosts == ()


def test_survivors_take_the_mesh_of_so_many() -> None:
    state, instructions = told(standing(SHARDS, 4), (1, Lost()))
    assert instructions[-1] == InstallView(View(2, (0, 2, 3), mesh="shard=3"))
    state, instructions = told(state, *run(2, 5, 0, 2, 3), (None, CapacityChanged(1)))
    assert instructions == [Start((4,))]
    state, instructions = told(state, *warm(4))
    joins = View(3, (0, 2, 3, 4), scheduled=True, joiners=(4,), mesh="data=2,shard=2")
    assert instructions == [InstallView(joins)]


def test_a_reshape_is_a_scheduled_view_with_another_mesh_and_those_who_leave_hand_over() -> None:
    state, instructions = told(standing(SHARDS, 4), (None, ReshapeAsked("shard=2,tensor=2")))
    assert instructions == [InstallView(View(2, (0, 1, 2, 3), scheduled=True, mesh="shard=2,tensor=2"))]
    state, instructions = told(state, *run(2, 3, 0, 1, 2, 3), (None, ReshapeAsked("tensor=2")))
    fewer = View(3, (0, 1), scheduled=True, mesh="tensor=2", leavers=(2, 3))
    assert instructions == [InstallView(fewer)]
    state, instructions = told(state, *run(3, 4, 0, 1))
    assert set(instructions) == {Release(2), Release(3)}
    assert told(state, (None, ReshapeAsked("tensor=2")))[1] == [], "they stand like that"
    # A resize keeps the wanted mesh as near as can be.
    state, instructions = told(state, (None, CapacityChanged(2)), (None, ResizeAsked(4)))
    assert instructions == [Start((4, 5))]
    state, instructions = told(state, *warm(4, 5))
    grown = View(4, (0, 1, 4, 5), scheduled=True, joiners=(4, 5), mesh="data=2,tensor=2")
    assert instructions == [InstallView(grown)]


def test_who_has_no_place_waits_and_takes_the_place_of_one_that_dies() -> None:
    layers = MeshChoice(Mesh(data=2, tensor=2), tensor=2)
    state = standing(layers, 5)
    assert state.current is not None
    assert state.current.members == (0, 1, 2, 3)
    assert [worker.phase for worker in state.workers] == ["member"] * 4 + ["ready"]
    # Worker 1 dies: its part of the model is still at 3, and both 0 and 2 have the other part: one of them must go.
    state, instructions = told(state, (1, Lost()))
    assert instructions[-1] == InstallView(View(2, (0, 3), mesh="tensor=2"))
    assert Release(2) in instructions
    state, instructions = told(state, *run(2, 5, 0, 3))
    assert instructions == [], "one alone would change nothing: another is to come"
    state, instructions = told(state, (None, CapacityChanged(1)))
    assert instructions == [Start((5,))]
    state, instructions = told(state, *warm(5))
    back = View(3, (0, 3, 4, 5), scheduled=True, joiners=(4, 5), mesh="data=2,tensor=2")
    assert instructions == [InstallView(back)]


def test_a_pipeline_may_have_as_many_stages_as_workers_say_there_are_layers() -> None:
    state = begin(range(2), 1, 8, 8, MeshChoice(Mesh(pipeline=2), pipeline=2))
    assert "at most 2 workers along pipeline" in objection(state, ReshapeAsked("pipeline=3"))
    state, _ = told(state, *warm(0, 1), *run(1, 0, 0, 1), (None, LayersFound(3)))
    assert objection(state, ReshapeAsked("pipeline=3")) == ""
    assert "this run has from 1 to 8 workers" in objection(state, ReshapeAsked("data=3,pipeline=3"))
    assert "not along shard" in objection(state, ReshapeAsked("shard=2"))
    assert "axes of a mesh are" in objection(state, ReshapeAsked("depth=2"))


def test_a_number_of_workers_is_cut_unless_the_run_has_one_number_only() -> None:
    several, one = begin(range(2), 1, 4, 8), begin([0], 1, 1, 8)
    assert objection(several, ResizeAsked(9)) == objection(one, ResizeAsked(1)) == ""
    refused = objection(one, ResizeAsked(3))
    assert refused.startswith("this run has 1 worker throughout (got 3): begin a run with --workers 1:3")


def test_what_each_of_many_says_is_looked_at_once_all_have_said_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``derive`` looks at every worker: were it called for each event, a view of thousands would take minutes."""
    looks: list[int] = []
    derive, many = machine.derive, 200

    def looked(*facts: Any) -> Any:
        looks.append(1)
        return derive(*facts)

    monkeypatch.setattr(machine, "derive", looked)
    state, installed = begin(range(many), 1, many), list[InstallView]()
    for event in (Connected(), Ready(), Running(1, 0), Done()):
        before = len(looks)
        for worker in range(many):
            state, told = machine.transition(state, worker, event)
            installed += [view for view in told if isinstance(view, InstallView)]
        assert len(looks) - before <= 1
    assert (len(installed), state.stage) == (1, "over")
