import heapq
import math

import numpy as np
import pytest

from elastune.core.errors import UserError
from elastune.tuning.search.halving import Halving
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.registry import STOPPINGS, make_schedule
from elastune.tuning.search.schedule import IntermediateResult, NewTrial, Resume, RungEntry, ToTheEnd, levels, ranked

ONE = parse_objectives({"error": "min"})
TWO = parse_objectives({"error": "min", "seconds": "min"})
EPOCHS = 27


class Loop:
    """Workers that train trials on a virtual clock; ``curve(trial, epoch)`` are the values, ``at`` who came how far."""

    def __init__(self, schedule, curve, workers=1, epochs=EPOCHS, violation=lambda trial: 0.0):
        self.schedule, self.curve, self.workers, self.epochs = schedule, curve, workers, epochs
        self.violation = violation
        self.at, self.done, self.calls = {}, [], []
        self.heap, self.now = [], 0.0

    def tell(self, name, *args):
        self.calls.append((name, args))
        return getattr(self.schedule, name)(*args)

    def run(self, trials):
        while True:
            while len(self.heap) < self.workers:
                first = self.schedule.next(len(self.at) < trials)
                assert self.schedule.next(len(self.at) < trials) == first
                if first is None:
                    break
                if isinstance(first, Resume):
                    number = first.trial
                    self.tell("resumed", number)
                else:
                    number = len(self.at)
                    self.at[number] = 0
                    self.tell("started", number, {})
                self.push(number)
            if not self.heap:
                return self
            self.now, number = heapq.heappop(self.heap)
            self.epoch(number)

    def push(self, number):
        heapq.heappush(self.heap, (self.now + 1 + 0.3 * math.sin(7.0 * number), number))

    def epoch(self, number):
        self.at[number] += 1
        values = self.curve(number, self.at[number])
        intermediate = IntermediateResult(number, self.at[number], self.epochs, values, self.violation(number))
        reason = self.tell("reported", intermediate)
        if self.at[number] == self.epochs:
            self.done.append(number)
            self.tell("ended", number, values, self.violation(number))
        elif reason:
            self.tell("paused", number, self.at[number])
        else:
            self.push(number)


def asha(losses, workers, trials):
    """Li et al. 2020, algorithm 2, as written: eta 3, rungs after 1, 3 and 9 of 27 passes. Who passed which rung."""
    rungs = [{} for _ in range(3)]
    promoted = [[] for _ in range(3)]
    started, heap, now = 0, [], 0.0

    def get_job():
        nonlocal started
        for k in (2, 1, 0):
            best = sorted(rungs[k], key=rungs[k].get)[: len(rungs[k]) // 3]
            for trial in best:
                if trial not in promoted[k]:
                    promoted[k].append(trial)
                    return trial, k + 1
        if started == trials:
            return None
        started += 1
        return started - 1, 0

    while True:
        while len(heap) < workers and (job := get_job()):
            trial, k = job
            passes = [1, 2, 6, 18][k]
            heapq.heappush(heap, (now + passes * (1 + 0.3 * math.sin(7.0 * trial)), trial, k))
        if not heap:
            return promoted
        now, trial, k = heapq.heappop(heap)
        if k < 3:
            rungs[k][trial] = losses[trial] / (1, 3, 9)[k]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_with_one_objective_it_is_plain_asha(workers, sign):
    losses = np.random.default_rng(5).random(60)
    objectives = ONE if sign > 0 else parse_objectives({"accuracy": "max"})
    schedule = make_schedule("asha:min_resource=1", objectives)
    loop = Loop(schedule, lambda trial, epoch: (sign * losses[trial] / epoch,), workers)
    schedule._last = lambda waiting: None  # what is brought to an end afterwards is not in the paper
    loop.run(60)
    passed = [[t for t, epoch in loop.at.items() if epoch > level] for level in (1, 3, 9)]
    assert [sorted(rung) for rung in asha(losses, workers, 60)] == passed
    assert len(passed[2]) >= 1


def falling(trial, epoch):
    """Trial 0, 3, 6... on the front, the others far from it; error against time."""
    rng = np.random.default_rng(trial)
    speed = rng.uniform(1, 4)
    error = 0.2 / speed + (0.0 if trial % 3 == 0 else rng.uniform(0.2, 0.5))
    return error + (0.5 + 0.05 * rng.standard_normal()) * epoch**-1.0, speed * epoch


def test_several_objectives_are_stopped_by_what_they_would_reach():
    loop = Loop(make_schedule("asha", TWO), falling, 4).run(90)
    good = [trial for trial in loop.at if trial % 3 == 0]
    late = [trial for trial in loop.at if trial >= 45]
    assert sum(loop.at.values()) < 0.65 * 90 * EPOCHS
    assert sum(t in loop.done for t in good) > 0.6 * len(good)
    assert sum(t in loop.done for t in late if t % 3) <= 0.2 * len(late)


def test_it_does_not_stop_a_sampler_that_proposes_only_good_trials():
    loop = Loop(make_schedule("asha", TWO), lambda trial, epoch: falling(3 * trial, epoch), 4).run(60)
    naive = Loop(
        make_schedule("asha:promote_margin=0,prune_margin=100", ONE), lambda t, e: falling(3 * t, e)[:1], 4
    ).run(60)
    late = range(30, 60)
    assert sum(t in loop.done for t in late) > 2 * sum(t in naive.done for t in late)


def test_a_study_rebuilt_from_its_events_goes_on_alike():
    loop = Loop(make_schedule("asha", TWO), falling, 4).run(70)  # so many that forecasts and ranks wait for more
    for end in range(0, len(loop.calls), 211):
        rebuilt, again = make_schedule("asha", TWO), make_schedule("asha", TWO)
        for name, args in loop.calls[:end]:
            getattr(rebuilt, name)(*args)
            again.estimates()
            again.next(True)  # questions change nothing
            getattr(again, name)(*args)
        assert rebuilt.next(True) == again.next(True)
        assert rebuilt.next(False) == again.next(False)
        assert rebuilt.estimates() == again.estimates()


@pytest.mark.parametrize("objectives", [ONE, TWO])
@pytest.mark.parametrize("text", ["asha", "hyperband", "asha:min_resource=1"])
def test_a_single_trial_completes(objectives, text):
    loop = Loop(make_schedule(text, objectives), lambda t, e: (1.0 / e, float(e))[: len(objectives)]).run(1)
    assert loop.done == [0]


def test_what_could_be_on_the_front_is_brought_to_its_end():
    loop = Loop(make_schedule("asha", TWO), falling, 4).run(40)
    assert loop.schedule.next(False) is None
    assert loop.schedule.next(True) == NewTrial()
    ends = {trial: falling(trial, EPOCHS) for trial in loop.at}
    front = [t for t in ends if not any(u[0] < ends[t][0] and u[1] < ends[t][1] for u in ends.values())]
    assert sum(trial in loop.done for trial in front) >= 0.75 * len(front)


def test_a_broken_constraint_ranks_behind_all_that_are_feasible():
    bad = {2, 3, 7}
    loop = Loop(
        make_schedule("asha:min_resource=1", ONE),
        lambda trial, epoch: (0.0 if trial in bad else 1.0 + trial / epoch,),
        violation=lambda trial: 1.0 if trial in bad else -1.0,
    ).run(30)
    assert not bad & set(loop.done)
    assert loop.done


def test_ranks_are_by_constrained_domination():
    entrants = [
        RungEntry(0, (0.0, 0.0), 2.0),
        RungEntry(1, (3.0, 3.0)),
        RungEntry(2, (1.0, 2.0)),
        RungEntry(3, (2.0, 1.0), -5.0),
        RungEntry(4, (0.0, 0.0), 1.0),
        RungEntry(5, (math.nan, 0.0)),
        RungEntry(6, (1.0, 2.0)),
    ]
    assert set(ranked(entrants, 3)) == {2, 3, 6}
    assert ranked(entrants, 7)[3:] == [1, 4, 0, 5]


def test_the_loneliest_are_those_on_the_scale_that_samplers_see():
    """On a front over four decades of seconds, by raw distances only the slowest would be lonely."""
    errors = [1 - 0.02 * i for i in range(12)]
    for decades in ([10.0 ** (i / 3) for i in range(12)], [-(10.0 ** (4 - i / 3)) for i in range(12)]):
        best = ranked([RungEntry(i, (decades[i], errors[i])) for i in range(12)], 6)
        assert {0, 11} <= set(best)
        assert 2 <= sum(i < 6 for i in best) <= 4, best


def test_a_trial_that_diverges_is_paused_and_never_estimated():
    schedule = make_schedule("asha:min_resource=1", TWO)
    schedule.started(0, {})
    schedule.started(1, {})
    assert schedule.reported(IntermediateResult(0, 1, EPOCHS, (math.nan, 1.0)))
    schedule.paused(0, 1)
    assert schedule.reported(IntermediateResult(1, 1, EPOCHS, (0.5, 1.0)))
    schedule.paused(1, 1)
    assert set(schedule.estimates()) == {1}
    assert schedule.next(False).trial == 1


def test_a_trial_told_to_pause_is_not_told_otherwise_by_later_reports():
    schedule = make_schedule("asha:min_resource=1", ONE)
    schedule.started(0, {})
    reason = schedule.reported(IntermediateResult(0, 1, EPOCHS, (0.5,)))
    assert reason
    assert schedule.reported(IntermediateResult(0, 2, EPOCHS, (0.4,))) == reason
    schedule.paused(0, 2)
    schedule.resumed(0)
    assert schedule.reported(IntermediateResult(0, 2, EPOCHS, (0.4,))) == ""


def test_a_trial_paused_for_another_cause_goes_on_first():
    schedule = make_schedule("asha:min_resource=3", ONE)
    schedule.started(0, {})
    schedule.reported(IntermediateResult(0, 1, EPOCHS, (0.5,)))
    schedule.paused(0, 1)
    assert schedule.next(True).trial == 0
    schedule.resumed(0)
    assert schedule.next(True) == NewTrial()


def test_hyperband_fills_its_brackets_in_proportion():
    schedule = make_schedule("hyperband", ONE)
    for trial in range(110):
        schedule.started(trial, {})
    brackets = [schedule._trials[trial].bracket for trial in range(110)]
    assert [brackets.count(b) for b in range(3)] == pytest.approx([60, 30, 20], abs=1)
    last = brackets.index(2)
    assert all(
        schedule.reported(IntermediateResult(last, epoch, EPOCHS, (9.0,))) == "" for epoch in range(1, EPOCHS + 1)
    )
    first, second = brackets.index(0), brackets.index(1)
    assert [schedule.reported(IntermediateResult(first, e, EPOCHS, (9.0,))) != "" for e in (2, 3)] == [False, True]
    assert [schedule.reported(IntermediateResult(second, e, EPOCHS, (9.0,))) != "" for e in (3, 9)] == [False, True]


def test_rungs_end_before_the_training_does():
    assert levels(1, 3, 27) == [1, 3, 9]
    assert levels(6, 3, 52) == [6, 18]
    assert levels(4, 2, 4) == []


def test_without_early_stopping_everything_runs_to_its_end():
    schedule = make_schedule("none", TWO)
    assert isinstance(schedule, ToTheEnd)
    assert len(Loop(schedule, falling, 3).run(5).done) == 5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ash",
        "none:eta=3",
        "asha:",
        "asha:eta",
        "asha:eta=1",
        "asha:eta=2.5",
        "asha:eta=3,eta=3",
        "asha:min_resource=0",
        "asha:brackets=2",
        "asha:promote_margin=nan",
        "asha:prune_margin=inf",
        "hyperband:brackets=0",
        "hyperband:x=1",
    ],
)
def test_rubbish_is_refused(text):
    with pytest.raises(UserError):
        make_schedule(text, TWO)


def test_every_stopping_can_be_made():
    assert {"none", "asha", "hyperband"} <= set(STOPPINGS)
    text = "hyperband:eta=4,min_resource=2,brackets=2,promote_margin=1,prune_margin=3"
    assert make_schedule(text, TWO)._halving == Halving(4, 2, 2, 1.0, 3.0)
    assert make_schedule("hyperband", TWO)._halving == Halving(brackets=3)
    assert make_schedule("asha", TWO)._halving == Halving()


@pytest.mark.parametrize(
    ("name", "forecast"),
    [("seconds", 18.0), ("cost", 18.0), ("time", 18.0), ("latency_s", 2.0), ("step_seconds", 2.0), ("size", 2.0)],
)
def test_totals_grow_with_the_passes_and_nothing_else_does(name, forecast):
    schedule = make_schedule("asha:min_resource=1", parse_objectives({name: "min"}))
    schedule.started(0, {})
    schedule.reported(IntermediateResult(0, 1, 9, (2.0,)))
    assert schedule.estimates()[0] == pytest.approx((forecast,))
