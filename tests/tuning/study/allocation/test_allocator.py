"""The broker: what holds whatever happens to trials, and tables for what must be exact."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.core.journal.records import Reported
from elastune.tuning.study.allocate import Rules
from elastune.tuning.study.rebalancer import Allocation, Broker, WaitingTrial, rungs_passed, trial_priority
from elastune.tuning.study.throughput import MeasuredRates, ThroughputTable, samples_per_s
from elastune.tuning.study.trial_progress import TrialProgress

AT_ONCE = Rules(min_residence_s=0.0)


def report(epoch: int, seconds: float, samples: int = 1000, epochs: int = 9) -> Reported:
    return Reported(epoch, epoch * samples, epoch * samples, seconds, {}, epochs=epochs)


def running(broker: Broker, trial: int, workers: int, rate: float, low: int = 1, high: int = 8) -> None:
    """A trial that began at 0 and was seen twice, at ``rate`` samples a second."""
    broker.started(trial, workers, low, high, 0.0)
    for epoch in (1, 2):
        broker.reported(trial, report(epoch, epoch * 1000 / rate), workers, 0.0)


class World:
    """Trials that do as they are told: workers that are given back go at once, or (``slow``) later."""

    def __init__(self, workers: int, rules: Rules) -> None:
        self.broker = Broker(workers, rules)
        self.now_s = 0.0
        self.capacity = workers
        self.workers: dict[int, int] = {}
        self.leaving: dict[int, int] = {}
        self.bounds: dict[int, tuple[int, int]] = {}
        self.queue: list[WaitingTrial] = []
        self.number = 0

    def add(self, low: int, more: int, fresh: bool) -> None:
        self.bounds[self.number] = low, low + more
        self.queue.append(WaitingTrial(self.number, low, low + more, self.now_s, fresh))
        self.number += 1

    def apply(self, slow: bool, supply: bool) -> list[Allocation]:
        grants = self.broker.grants(self.now_s, self.queue, supply)
        assert grants == self.broker.grants(self.now_s, self.queue, supply), "asking changes nothing"
        for grant in grants:
            low, high = self.bounds[grant.trial]
            assert grant.after == 0 or low <= grant.after <= high
            assert grant.before == self.workers.get(grant.trial, 0)
            if grant.before == 0:
                self.queue = [one for one in self.queue if one.trial != grant.trial]
                self.broker.started(grant.trial, grant.after, low, high, self.now_s)
            elif grant.after == 0:
                self.broker.paused(grant.trial, self.now_s)
            else:
                self.broker.granted(grant, self.now_s)
                if grant.after < grant.before and slow:
                    self.leaving[grant.trial] = max(self.leaving.get(grant.trial, 0), grant.before)
                else:
                    self.settle(grant.trial, grant.after)
            self.workers[grant.trial] = grant.after
            if grant.after == 0:
                del self.workers[grant.trial]
                self.leaving.pop(grant.trial, None)
        held = sum(max(count, self.leaving.get(trial, 0)) for trial, count in self.workers.items())
        grew = any(grant.after > grant.before for grant in grants)
        assert held <= self.capacity or not grew, "nobody is given what another still has"
        assert self.broker.free == self.capacity - held
        return grants

    def settle(self, trial: int, workers: int) -> None:
        self.leaving.pop(trial, None)
        self.broker.regrouped(trial, workers, 0.5, self.now_s)

    def end(self, trial: int) -> None:
        self.broker.ended(trial, self.now_s)
        del self.workers[trial]
        self.leaving.pop(trial, None)


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 3), st.integers(0, 6), st.booleans()),
        st.tuples(st.just("report"), st.integers(0, 9), st.integers(1, 400)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("pass"), st.sampled_from([1.0, 40.0, 1000.0])),
        st.tuples(st.just("rank"), st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=10, max_size=10)),
    ),
    max_size=25,
)
rules = st.builds(
    Rules,
    min_residence_s=st.sampled_from([0.0, 30.0]),
    max_wait_s=st.sampled_from([math.inf, 500.0]),
    least_gain=st.sampled_from([0.0, 0.5]),
    deadline_s=st.sampled_from([math.inf, 2000.0]),
    budget_s=st.sampled_from([math.inf, 5000.0]),
)


@settings(max_examples=150, deadline=None)
@given(events, rules, st.booleans(), st.booleans())
def test_whatever_happens(happens: list[tuple], rules: Rules, slow: bool, supply: bool) -> None:
    world, reports = World(8, rules), {}
    for event in happens:
        alive = sorted(world.workers)
        match event:
            case "add", low, more, fresh:
                world.add(low, more, fresh)
            case "report", at, rate if alive:
                trial = alive[at % len(alive)]
                epoch, seconds = reports.get(trial, (0, 0.0))
                reports[trial] = epoch + 1, seconds + 1000 / rate
                world.broker.reported(trial, report(*reports[trial]), world.workers[trial], world.now_s)
            case "end", at if alive:
                world.end(alive[at % len(alive)])
            case "pass", seconds:
                world.now_s += seconds
                for trial in list(world.leaving):
                    world.settle(trial, world.workers[trial])
            case "rank", worth:
                world.broker.ranked(dict(enumerate(worth)))
        for _ in range(50):  # until nothing changes any more, everybody having let go
            grants = world.apply(slow, supply)
            if not grants and not world.leaving:
                break
            for trial in list(world.leaving):
                world.settle(trial, world.workers[trial])
        else:
            pytest.fail("workers went round and round")
        assert sum(world.workers.values()) <= world.capacity


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.booleans()), min_size=1, max_size=8))
@settings(deadline=None)
def test_with_patience_everybody_runs_some_day(asked: list[tuple[int, int, bool]]) -> None:
    world, ran = World(4, Rules(min_residence_s=5.0, max_wait_s=100.0)), set()
    for low, more, fresh in asked:
        world.add(low, more, fresh)
    for _ in range(6 * len(asked)):
        before = set(world.workers)
        world.apply(slow=False, supply=True)
        ran |= set(world.workers)
        for trial in before - set(world.workers):
            world.queue.append(WaitingTrial(trial, *world.bounds[trial], world.now_s, fresh=False))
        world.now_s += 120.0
    assert ran == set(range(len(asked)))


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 9.0]), min_size=2, max_size=6), st.integers(6, 30))
def test_less_worth_never_has_more(worth: list[float], workers: int) -> None:
    """Of trials that are alike but for what they are worth."""
    broker = Broker(workers, AT_ONCE)
    for trial in range(len(worth)):
        running(broker, trial, 1, 100.0, high=12)
    broker.ranked(dict(enumerate(worth)))
    given = dict.fromkeys(range(len(worth)), 1) | {grant.trial: grant.after for grant in broker.grants(10.0)}
    assert all(given[a] <= given[b] for a, b in permutations(given, 2) if worth[a] < worth[b])


def test_the_short_come_first() -> None:
    """Two trials of equal worth and equal scaling; one trains ten times as long."""
    broker = Broker(3, AT_ONCE)
    running(broker, 1, 1, 10.0, high=2)
    running(broker, 2, 1, 100.0, high=2)
    assert [(grant.trial, grant.after) for grant in broker.grants(10.0)] == [(2, 2)]


def test_what_is_longer_than_the_median_does_not_come_last_for_it() -> None:
    broker = Broker(4, AT_ONCE)
    for trial, rate in ((1, 10.0), (2, 100.0), (3, 100.0)):
        running(broker, trial, 1, rate, high=2)
    assert [(grant.trial, grant.after) for grant in broker.grants(10.0)] == [(1, 2)]  # of equals the first


def test_a_rung_hands_workers_on() -> None:
    """Two of three trials are paused: the third gets what they had, as far as its rate is known to rise."""
    broker = Broker(3, AT_ONCE)
    for trial in (1, 2, 3):
        running(broker, trial, 1, 100.0)
    assert broker.grants(10.0) == []
    broker.paused(1, 10.0)
    broker.paused(3, 10.0)
    broker.ranked({2: 3.0})
    assert broker.grants(10.0) == [Allocation(2, 1, 2, "rank 1 of 1 at epoch 2, trial 3 paused")]


def test_who_is_worth_less_makes_room_first() -> None:
    """A shrink, and the growth that needs its worker only once it has gone."""
    broker = Broker(4, AT_ONCE, pause_s=0.0)
    for trial in (1, 2):
        running(broker, trial, 2, 100.0, high=3)
    broker.ranked({1: 9.0, 2: 1.0})
    (shrink,) = broker.grants(10.0)
    assert shrink == Allocation(2, 2, 1, "makes room for trial 1")
    broker.granted(shrink, 10.0)
    assert broker.free == 0
    assert broker.grants(10.0) == []
    broker.regrouped(2, 1, 0.1, 11.0)
    (grow,) = broker.grants(11.0)
    assert (grow.trial, grow.before, grow.after) == (1, 2, 3)
    broker.granted(grow, 11.0)
    assert broker.grants(11.0) == []


@pytest.mark.parametrize(
    ("gain", "worth", "expected"),
    [
        (0.7, 1.0, {7: 1}),  # a new trial is worth more than a second worker that brings little
        (0.9, 1.0, {5: 2}),  # one that goes twice as fast for the same worker-seconds is done sooner
        (0.7, 9.0, {5: 2}),  # so is one that is worth nine
    ],
)
def test_one_more_trial_or_a_wider_one(gain: float, worth: float, expected: dict[int, int]) -> None:
    broker = Broker(2, AT_ONCE)
    running(broker, 5, 2, 100.0 * (1 + gain))
    broker.granted(Allocation(5, 2, 1, ""), 0.0)
    broker.regrouped(5, 1, 0.0, 0.0)
    for epoch, seconds in ((3, 20.0), (4, 30.0)):
        broker.reported(5, report(epoch, seconds), 1, 0.0)
    broker.ranked({5: worth})
    result = broker.grants(10.0, [WaitingTrial(7, 1, 4, 10.0)], supply=True)
    assert {grant.trial: grant.after for grant in result} == expected


def test_the_last_new_trials_begin_as_wide_as_there_is_room() -> None:
    broker = Broker(4, AT_ONCE)
    last = [WaitingTrial(7, 1, 4, 0.0)]
    assert [grant.after for grant in broker.grants(0.0, last)] == [2]  # nobody knows more than twice its least
    for trial in (1, 2):
        for workers in (1, 2, 4):
            broker.started(trial, workers, 1, 4, 0.0)
            broker.reported(trial, report(1, 10.0 / workers), workers, 0.0)
            broker.reported(trial, report(2, 20.0 / workers), workers, 0.0)
        broker.ended(trial, 0.0)
    assert [grant.after for grant in broker.grants(0.0, last)] == [4]  # others did well on more


def test_nobody_is_moved_to_and_fro() -> None:
    broker = Broker(2, Rules(min_residence_s=30.0))
    running(broker, 1, 1, 100.0)
    broker.granted(Allocation(1, 1, 2, ""), 100.0)
    broker.regrouped(1, 2, 0.1, 101.0)
    broker.ranked({1: 0.1})
    asking = [WaitingTrial(2, 1, 1, 101.0)]
    assert [grant.after for grant in broker.grants(120.0, asking)] == []
    assert [(grant.trial, grant.after) for grant in broker.grants(131.0, asking, supply=True)] == [(1, 1)]


def test_deadline_and_budget_are_those_of_the_study() -> None:
    """1,000 samples an epoch at 100 a second, 9 epochs: 90 s on one worker."""
    for bound in ({"deadline_s": 190.0}, {"budget_s": 190.0}):
        broker = Broker(2, Rules(min_residence_s=0.0, **bound))
        running(broker, 1, 1, 100.0, high=1)
        assert [grant.trial for grant in broker.grants(50.0, [WaitingTrial(2, 1, 1, 0.0)], supply=True)] == (
            [2] if "deadline_s" in bound else []  # 190 - 50 spent - 70 that trial 1 needs < 90
        )
        assert broker.grants(101.0, [WaitingTrial(2, 1, 1, 0.0)], supply=True)[-1:] == []


def test_more_new_trials_begin_at_once_where_no_budget_counts_them() -> None:
    one = [WaitingTrial(7, 1, 1, 0.0)]
    for bound, room in (({}, 7), ({"budget_s": 250.0}, 0)):
        broker = Broker(8, Rules(**bound))
        assert [grant.after for grant in broker.grants(0.0, one, supply=True)] == [1]
        assert broker.room == room
        broker.grants(0.0, one, supply=False)
        assert broker.room == 0, "the last ones begin as wide as there is room"


def held(trial: int, since_s: float = 0.0) -> WaitingTrial:
    return WaitingTrial(trial, 1, 4, since_s, fresh=False, last=True)


def test_who_is_held_back_has_what_is_idle_and_no_more() -> None:
    broker = Broker(2, AT_ONCE)
    running(broker, 1, 1, 100.0, high=2)
    assert [(grant.trial, grant.after) for grant in broker.grants(10.0, [held(2)])] == [(1, 2)], "others widen first"
    running(broker, 1, 1, 100.0, high=1)
    assert [(grant.trial, grant.after) for grant in broker.grants(10.0, [held(2)])] == [(2, 1)], "one is idle"
    asking = [WaitingTrial(3, 1, 1, 10.0)]
    assert [grant.trial for grant in broker.grants(10.0, asking)] == [3]


def test_who_was_held_back_too_long_comes_before_all_others() -> None:
    broker = Broker(1, Rules(min_residence_s=0.0, max_wait_s=100.0))
    running(broker, 1, 1, 100.0, high=1)
    assert broker.grants(50.0, [held(2)]) == []
    assert [(grant.trial, grant.after) for grant in broker.grants(101.0, [held(2)])] == [(1, 0)]


def test_known_courses_are_not_measured_again() -> None:
    """What a study's journal tells a broker is not asked of it a second time."""
    courses = TrialProgress()
    courses.speeds.add(1, 1, 100, 1.0)
    broker = Broker(2, AT_ONCE, courses=courses, feeds=False)
    running(broker, 1, 1, 55.0)
    assert dict(courses.speeds.of(1).points) == {1: 100.0}
    assert courses.progress == {}


def test_pace_is_measured_between_changes_only() -> None:
    broker = Broker(8, AT_ONCE, pause_s=0.0)
    running(broker, 1, 1, 100.0)
    broker.granted(Allocation(1, 1, 2, ""), 20.0)
    broker.reported(1, report(3, 25.0), 1, 25.0)  # on the old workers still
    broker.regrouped(1, 2, 0.0, 26.0)
    broker.reported(1, report(4, 40.0), 2, 40.0)
    assert [grant.after for grant in broker.grants(40.0)] == []  # two were not seen yet: nothing is known beyond
    broker.reported(1, report(5, 50.0), 2, 50.0)  # no faster than on one: given back, as soon as others want it
    assert [(grant.trial, grant.after) for grant in broker.grants(50.0, [WaitingTrial(2, 1, 1, 50.0)])] == [(2, 1)]


def test_others_tell_how_a_trial_would_scale() -> None:
    paces = ThroughputTable()
    for trial, rate in ((1, 100.0), (2, 10.0), (3, 50.0)):
        for workers, gain in ((1, 1.0), (2, 1.8), (4, 3.0)):
            paces.add(trial, workers, round(rate * gain * 100), 100.0)
    paces.add(4, 1, 2000, 100.0)
    assert dict(paces.of(4).points) == pytest.approx({1: 20.0, 2: 36.0})
    paces.add(4, 2, 3800, 100.0)
    assert dict(paces.of(4).points) == pytest.approx({1: 20.0, 2: 38.0, 4: 38.0 * 3.0 / 1.8})
    assert dict(paces.of(9).points) == pytest.approx({1: 35.0, 2: 63.0, 4: 105.0})  # nobody saw it: all that is known
    paces.add(4, 4, 5000, 100.0)
    assert dict(paces.of(4).points)[4] == 50.0  # what it measured itself counts
    assert ThroughputTable().of(1).points == ((1, 1.0),)


def test_what_nobody_ran_on_one_worker_is_not_taken_to_scale() -> None:
    paces = ThroughputTable()
    for trial, rate in ((1, 100.0), (2, 10.0), (3, 50.0)):
        for workers, gain in ((2, 1.0), (4, 1.1), (8, 1.15)):
            paces.add(trial, workers, round(rate * gain * 100), 100.0)
    assert dict(paces.of(9).points) == pytest.approx({2: 50.0, 4: 55.0, 8: 57.5})


def test_slots_make_steps() -> None:
    rates = samples_per_s(MeasuredRates(((1, 10.0), (4, 40.0), (5, 44.0)), slots=8), 16)
    assert rates.tolist() == pytest.approx(
        [0, 10, 20, 26.67, 42, 42, 42, 42, *[2 * 42 + 0 for _ in range(9)]], rel=0.08
    )


def test_worth_grows_with_rungs_and_falls_behind_the_front() -> None:
    points = {1: (1.0, 4.0), 2: (2.0, 2.0), 3: (3.0, 3.0), 4: (4.0, 4.0)}
    assert trial_priority(points, {1: 2, 2: 1, 3: 2, 7: 0}) == {1: 10.0, 2: 4.0, 3: 5.5, 7: 1.0}
    assert trial_priority({}, {1: 1, 2: 0}) == {1: 4.0, 2: 1.0}, "before the first rung nobody was chosen"


@pytest.mark.parametrize(
    ("epochs", "rungs"), [(52, (6, 18)), (10, (1, 3, 9)), (20, (2, 6, 18)), (5, (1, 3)), (1, ()), (0, ())]
)
def test_rungs_are_where_halving_has_them(epochs: int, rungs: tuple[int, ...]) -> None:
    for epoch in range(epochs + 1):
        assert rungs_passed(epoch, epochs) == sum(rung <= epoch for rung in rungs)
