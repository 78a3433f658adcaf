"""Whether a round goes on without those that were lost in it, and who has which learner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastune.elastic.wire.view import View
from elastune.elastic.worker.group import LearnerAssignment
from elastune.elastic.worker.recovery import NO_ROUND, MemberStatus, OpenRound, goes_on, reconcile

BEGUN = OpenRound(assignment_view=1, learners=4, quorum=3)
FOUR = View(1, (0, 1, 2, 3))


def decided(rounds: list[OpenRound], *seats: int | None, size: int = 4) -> int:
    return goes_on(rounds, lambda view: seats, lambda view: size)


@pytest.mark.parametrize(
    ("rounds", "seats", "on"),
    [
        ([BEGUN, BEGUN, BEGUN], (0, 1, 3), True),
        ([NO_ROUND, BEGUN, NO_ROUND], (0, 1, 3), True),  # who has not begun begins with what it had
        ([BEGUN, BEGUN], (0, 1), False),
        ([BEGUN] * 4, (0, 1, 2, 3), True),  # a collective failed, and nobody was lost
        ([NO_ROUND] * 3, (0, 1, 3), False),
        ([], (0, 1), False),
        ([replace(BEGUN, quorum=0)] * 3, (0, 1, 3), False),
        ([BEGUN, BEGUN, BEGUN], (0, 1, None), False),  # one has come since
    ],
)
def test_a_round_goes_on_with_a_quorum_of_its_learners(
    rounds: list[OpenRound], seats: tuple[int | None, ...], on: bool
) -> None:
    assert decided(rounds, *seats) == (1 if on else 0)


def test_the_newest_deal_counts() -> None:
    """One had gone back to the round's beginning and begun it again, before the others heard that they had to."""
    again = OpenRound(assignment_view=2, learners=4, quorum=2)
    assert decided([BEGUN, again], 0, 1, size=2) == 2


def test_learners_count_and_not_workers() -> None:
    assert decided([BEGUN, BEGUN], 1, 2, size=3) == 1  # they have one and two of four
    assert decided([BEGUN, BEGUN], 0, 1, size=3) == 0


def test_who_has_which_learner() -> None:
    dealing, three = LearnerAssignment(), View(2, (0, 1, 3))
    dealing.entered(FOUR)
    assert dealing.by(FOUR) is FOUR
    dealing.entered(three)
    dealing.decided(1)
    assert dealing.by(three) is FOUR
    assert dealing.seats(1, three.members) == [0, 1, 3]
    assert dealing.learner_workers(1, 8) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3}
    dealing.round_over(three)
    assert dealing.by(three) is three
    dealing.decided(2)
    dealing.decided(0)
    assert dealing.by(three) is three


def test_what_goes_on_is_not_repeated() -> None:
    """Where workers meet in a place that cannot be done again, all go back only if the round does not go on."""
    row = MemberStatus(7, 5, True, True, 5, 0, False, open=BEGUN)
    rows = [row, replace(row, unrepeatable=False), replace(row, unrepeatable=False)]
    plan = reconcile(rows, (), lambda rounds: decided(list(rounds), 0, 1, 3))
    assert (plan.rewind_to, plan.assignment_view) == (None, 1)
    plan = reconcile(rows, (), lambda rounds: 0)
    assert (plan.rewind_to, plan.assignment_view) == (5, 0)
    # Who has evaluated since the last step, and has not begun the round, may lack a lost worker's part of that.
    evaluated = replace(row, open=NO_ROUND)
    assert reconcile([row, row, evaluated], (), lambda rounds: 1).rewind_to == 5


def test_who_lacks_the_last_rounds_result_gets_it_before_the_next_goes_on() -> None:
    ahead = MemberStatus(7, 5, False, True, -1, 0, False, open=BEGUN)
    behind = replace(ahead, completed=6, step=4, open=replace(BEGUN, assignment_view=1))
    heard: list[int] = []

    def on(rounds: object) -> int:
        heard.append(len(list(rounds)))  # type: ignore[call-overload]
        return 1

    plan = reconcile([ahead, behind, ahead], (), on)
    assert (plan.lagging, plan.assignment_view, heard) == ((1,), 1, [2])
