"""Who has come too late for a round: one place decides, from what workers say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from elastune.elastic.coordinator.machine import Membership
from elastune.elastic.coordinator.round_quorum import STALL_S, RoundQuorum, RoundWatch, Timers, patience_s
from elastune.elastic.wire.messages import RoundTaken, Running, decode, encode
from elastune.elastic.wire.view import View


def taken(
    step: int = 12,
    version: int = 1,
    learners: int = 1,
    quorum: int = 3,
    grace_s: float = 1.0,
    most: int = 1,
    took_s: float = 0.0,
) -> RoundTaken:
    return RoundTaken(version, step, learners, quorum, grace_s, max(learners, most), took_s)


def test_the_grace_begins_with_the_quorum() -> None:
    late = RoundQuorum()
    assert late.message_received(0, taken(), 10.0) is None
    assert late.message_received(1, taken(), 11.0) is None
    assert late.late((0, 1, 2, 3), 99.0) == []
    assert late.message_received(3, taken(), 12.0) == 13.0
    assert late.late((0, 1, 2, 3), 12.99) == []
    assert late.late((0, 1, 2, 3), 13.0) == [2]
    assert "1 s after a quorum" in late.why


@pytest.mark.parametrize(
    ("rounds", "waited_s"),
    [
        ([taken(took_s=1.0), taken(took_s=1.5)], 1.0),  # half of it is less than the grace
        ([taken(took_s=6.0), taken(took_s=8.0)], 4.0),
        ([taken(learners=2, took_s=6.0), taken(most=2, took_s=3.0)], 3.0),  # who has two is there
        ([taken(most=2, took_s=6.0), taken(most=2, took_s=5.0)], 9.0),  # one that has two has its time to come
        ([taken(learners=3, most=4, took_s=6.0)], 5.0),
        ([taken(learners=2, most=3, took_s=0.2), taken(learners=2, most=3, took_s=0.2)], 1.1),
        ([taken(learners=2, took_s=2.0), taken(most=2, took_s=1.5)], 2.0),  # at the pace of the slowest of these
    ],
)
def test_the_grace_grows_with_the_round_and_with_learners(rounds: list[RoundTaken], waited_s: float) -> None:
    assert patience_s(rounds) == pytest.approx(waited_s)


def test_who_has_two_learners_where_the_others_have_one_is_not_late_at_their_pace() -> None:
    """Seven workers have eight learners, and six are a quorum: each loss had led to the next one."""
    late = RoundQuorum()
    for worker in range(5):
        assert late.message_received(worker, taken(quorum=6, grace_s=0.25, most=2, took_s=0.8), 10.0) is None
    due = late.message_received(5, taken(quorum=6, grace_s=0.25, most=2, took_s=0.8), 10.0)
    assert due == pytest.approx(11.2)
    assert late.late(range(7), 11.1) == []
    assert late.late(range(7), 11.3) == [6]
    assert "1.2 s after a quorum" in late.why


def test_who_comes_within_the_grace_is_not_late() -> None:
    late = RoundQuorum()
    assert late.message_received(0, taken(learners=3), 10.0) == 11.0
    assert late.message_received(1, taken(), 10.9) is None
    assert late.late((0, 1), 11.0) == []


def test_only_the_newest_round_counts() -> None:
    late = RoundQuorum()
    assert late.message_received(0, taken(learners=3), 10.0) == 11.0
    assert late.message_received(0, taken(step=24), 10.5) is None
    assert late.message_received(1, taken(learners=4), 10.6) is None  # it had been under way
    assert late.late((0, 1), 11.0) == []
    assert (
        late.message_received(0, taken(step=24, version=2, learners=3), 11.0) == 12.0
    )  # and again among those that are left
    assert late.view == 2


def test_who_runs_a_view_later_has_as_much_longer_in_its_first_round() -> None:
    late = RoundQuorum()
    late.runs(1, 0.0)
    late.runs(1, 7.0)
    assert late.message_received(0, taken(learners=3), 10.0) == 18.0
    late.runs(1, 9.0)
    assert late.late((0, 1), 19.9) == []
    assert late.late((0, 1), 20.0) == [1]
    assert late.message_received(0, taken(step=24, learners=3), 30.0) == 31.0
    late.runs(2, 32.0)
    assert late.message_received(0, taken(step=24, version=2, learners=3), 33.0) == 34.0


class Watched:
    """A ``RoundWatch`` of a run whose membership and clock a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, current: View | None, proposed: View | None = None) -> None:
        monkeypatch.setattr("elastune.elastic.coordinator.round_quorum.time.monotonic", lambda: self.now)
        self.now, self.deaf, self.lost, self.later = 0.0, False, list[int](), Timers()
        self.hurried: list[tuple[int, int, float]] = []
        self.membership = Membership(1, 4, 4, 1, 4, (), current=current, proposed=proposed)
        self.rounds = RoundWatch(
            self.later,
            lambda worker, why: self.lost.append(worker),
            lambda: self.membership,
            lambda: self.deaf,
            lambda worker, step, grace_s, now: self.hurried.append((worker, step, now)),
        )

    def at(self, now: float) -> list[int]:
        """Who is lost by then."""
        self.now = now
        self.later.run(now)
        return self.lost


def test_nobody_is_late_while_nobody_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(monkeypatch, View(1, (0, 1, 2)))
    run.deaf = True
    run.rounds.message_received(0, taken(learners=3), 0.0)
    assert run.at(1.0) == run.at(1.0 + STALL_S) == []
    run.deaf = False
    assert run.at(60.0) == []  # this process stood still
    assert run.at(60.0 + STALL_S) == [1, 2]
    assert run.later.next_at == []


def test_of_a_view_that_is_over_nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(monkeypatch, View(1, (0, 1)))
    run.rounds.message_received(0, taken(learners=3), 0.0)
    run.membership = replace(run.membership, current=View(2, (0, 1)))
    run.rounds.message_received(1, taken(version=9), 0.5)  # there is none
    run.rounds.message_received(7, taken(version=2, learners=3), 0.5)  # it is no member
    assert run.at(1.0) == []
    run.rounds.message_received(1, taken(version=2, learners=3), 1.0)
    assert run.later.next_at == [2.0]


def test_whom_the_first_or_a_quorum_waits_for_may_be_silent_as_little_as_they(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(monkeypatch, View(1, (0, 1, 2, 3)))
    run.rounds.message_received(0, taken(), 1.0)
    assert run.hurried == [(0, 12, 1.0), (1, 12, 1.0), (2, 12, 1.0), (3, 12, 1.0)]
    run.rounds.message_received(2, taken(), 2.0)
    assert run.hurried[4:] == [(2, 12, 2.0)]
    run.rounds.message_received(3, taken(), 2.5)
    assert run.hurried[5:] == [(3, 12, 2.5), (1, 12, 2.5)]


def test_while_a_joiner_gets_its_state_neither_it_nor_who_sends_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(2, (0, 1, 2, 3), scheduled=True, joiners=(3,))
    run = Watched(monkeypatch, View(1, (0, 1, 2)), view)
    for worker in (1, 2):
        run.rounds.message_received(worker, Running(2, 12), 10.0)
        run.rounds.message_received(worker, taken(version=2, learners=2), 12.0)
    assert {worker for worker, *_ in run.hurried} == {1, 2}
    assert [run.at(13.0 + look * STALL_S) for look in range(29)] == [[]] * 29
    for worker in (0, 3):
        run.rounds.message_received(worker, Running(2, 12), 20.0)
    run.membership = replace(run.membership, current=view, proposed=None)
    run.rounds.message_received(0, taken(version=2), 22.0)
    assert [run.at(look) for look in (20.25, 22.9)] == [[]] * 2
    assert run.at(23.0) == [3]  # two seconds and the grace after it could begin, as the others


def test_what_is_no_part_of_a_round_is_refused() -> None:
    assert decode(encode(taken())) == taken()
    for wrong in (b'"learners":-1', b'"learners":"1"'):
        with pytest.raises(ValidationError):
            decode(encode(taken()).replace(b'"learners":1', wrong))
    with pytest.raises(ValidationError):
        decode(encode(taken()).replace(b'"grace_s":1.0', b'"grace_s":NaN'))
