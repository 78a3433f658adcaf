"""Who gets the workers: what holds for any claims, and tables for what must be exact."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.tuning.study.allocate import Demand, Rules, allocate
from elastune.tuning.study.throughput import MeasuredRates, samples_per_s

FREE = Rules(min_residence_s=0.0)  # moves are weighed by their pauses alone


def demand(trial: int, current: int = 0, low: int = 1, high: int = 8, **more) -> Demand:
    """Perfect scaling up to 1,000 workers at 100 samples a second each, unless told."""
    known = {"remaining": 1e6, "throughput": MeasuredRates(((1, 100.0), (1000, 100_000.0)))}
    return Demand(trial, current, low, high, **{**known, **more})


def concave(gains: list[float]) -> MeasuredRates:
    """What each worker brings, the most first."""
    total, points = 0.0, []
    for workers, gain in enumerate(sorted(gains, reverse=True), 1):
        total += gain
        points.append((workers, total))
    return MeasuredRates(tuple(points))


SLOWING = demand(1, remaining=2000.0, throughput=concave([100.0, 60.0, 40.0]))
CURVE = tuple((n, 64 / (0.01 + 0.064 / n)) for n in range(1, 17))
gains = st.lists(st.integers(1, 60).map(float), min_size=6, max_size=6)
known = st.one_of(
    gains.map(concave),
    gains.map(lambda rates: MeasuredRates(tuple(enumerate(rates, 1)))),  # any shape
    st.builds(
        lambda slots: MeasuredRates(tuple((n, 64 / (0.01 + 0.064 / n)) for n in range(1, 17)), slots),
        st.integers(1, 16),
    ),
)
paces = st.one_of(known, st.just(MeasuredRates()))
seconds = st.sampled_from([0.0, 1.0, 10.0, 100.0, 1000.0])


@st.composite
def many(draw: st.DrawFn, pace: st.SearchStrategy = paces) -> list[Demand]:
    found = []
    for trial in draw(st.lists(st.integers(0, 99), max_size=7, unique=True)):
        low = draw(st.integers(1, 4))
        found.append(
            Demand(
                trial,
                current=draw(st.integers(0, 9)),
                low=low,
                high=low + draw(st.integers(0, 6)),
                remaining=draw(st.sampled_from([10.0, 1e3, 1e4, 1e6])),
                throughput=draw(pace),
                worth=draw(st.sampled_from([0.5, 1.0, 1.0, 3.0])),
                pause_s=draw(st.sampled_from([0.0, 1.0, 20.0])),
                since_s=draw(seconds),
            )
        )
    return found


rules = st.builds(
    Rules,
    horizon_s=st.sampled_from([5.0, 600.0]),
    min_residence_s=st.sampled_from([0.0, 30.0]),
    max_wait_s=st.sampled_from([50.0, math.inf]),
    least_gain=st.sampled_from([0.0, 0.5]),
    deadline_s=st.sampled_from([math.inf, 1e4, 100.0, 15.0]),
    budget_s=st.sampled_from([math.inf, 1e5, 1e3]),
)


def after(demands: list[Demand], given: dict[int, int]) -> list[Demand]:
    """The claims once ``given`` is so."""
    return [c if c.current == given[c.trial] else replace(c, current=given[c.trial], since_s=0.0) for c in demands]


def worth(demands: list[Demand], given: dict[int, int]) -> float:
    """Value a second of an allocation."""
    return sum(c.worth * float(samples_per_s(c.throughput, 99)[given[c.trial]]) for c in demands)


@given(many(), st.integers(0, 30), rules)
def test_bounds_hold(demands: list[Demand], workers: int, rules: Rules) -> None:
    given = allocate(demands, workers, rules)
    assert set(given) == {c.trial for c in demands}
    assert sum(given.values()) <= workers
    for c in demands:
        assert given[c.trial] == 0 or (c.low <= given[c.trial] <= c.high)


@settings(max_examples=300)
@given(many(), st.integers(0, 30), rules)
def test_a_result_is_its_own_result(demands: list[Demand], workers: int, rules: Rules) -> None:
    given = allocate(demands, workers, rules)
    assert allocate(after(demands, given), workers, rules) == given


def test_of_two_that_waited_too_long_the_one_let_in_stays_in() -> None:
    """Without a least stay, too: asked again at the same moment, the other one would take its place, and so on."""
    patient = [demand(1, low=2, high=2, since_s=1000.0), demand(2, low=2, high=2, since_s=100.0)]
    rules = Rules(min_residence_s=0.0, max_wait_s=50.0)
    given = allocate(patient, 3, rules)
    assert given == {1: 2, 2: 0}
    assert allocate(after(patient, given), 3, rules) == given
    later = [replace(one, since_s=one.since_s + 60.0) for one in after(patient, given)]
    assert allocate(later, 3, rules) == {1: 0, 2: 2}, "but some time later it has its turn"


@given(many(), st.integers(0, 30), rules, st.randoms())
def test_the_order_of_claims_does_not_matter(
    demands: list[Demand], workers: int, rules: Rules, rng: random.Random
) -> None:
    mixed = rng.sample(demands, len(demands))
    assert allocate(mixed, workers, rules) == allocate(demands, workers, rules)


@given(many(gains.map(concave)), st.integers(0, 12))
def test_equals_brute_force_where_values_are_concave(demands: list[Demand], workers: int) -> None:
    demands = [replace(c, low=1, high=min(c.high, 6), pause_s=0.0, remaining=1e6) for c in demands[:4]]
    workers = max(workers, len(demands))
    rooms = product(*(range(c.low, c.high + 1) for c in demands))
    shares = (dict(zip([c.trial for c in demands], room, strict=True)) for room in rooms if sum(room) <= workers)
    best = max(worth(demands, share) for share in shares)
    assert worth(demands, allocate(demands, workers, FREE)) == pytest.approx(best)


@given(many(gains.map(concave)), st.integers(0, 30))
def test_a_worker_more_takes_from_nobody_where_values_are_concave(demands: list[Demand], workers: int) -> None:
    demands = [replace(c, current=0, high=min(c.high, 6)) for c in demands]
    workers = max(workers, sum(c.low for c in demands))
    few, more = allocate(demands, workers), allocate(demands, workers + 1)
    assert all(low <= few[trial] <= more[trial] for trial, low in ((c.trial, c.low) for c in demands))


@given(many(), st.integers(0, 30), rules)
def test_who_runs_is_not_stopped_while_there_is_room(demands: list[Demand], workers: int, rules: Rules) -> None:
    workers = max(workers, sum(c.low for c in demands))
    given = allocate(demands, workers, replace(rules, budget_s=math.inf))
    assert all(given[c.trial] >= c.low for c in demands if c.current)


@given(many(known), st.integers(0, 30), st.sampled_from([0.0, 30.0]))
def test_a_move_is_worth_its_pauses(demands: list[Demand], workers: int, min_residence_s: float) -> None:
    """Where nothing must be (all run, within their bounds, and fit), the work done within the horizon only grows."""
    demands = [replace(c, current=min(max(c.current, c.low), c.high), remaining=1e9) for c in demands]
    workers = max(workers, sum(c.current for c in demands))
    given = allocate(demands, workers, Rules(min_residence_s=min_residence_s))
    kept = {c.trial: c.current for c in demands}
    lost = sum(
        c.worth * c.pause_s * float(samples_per_s(c.throughput, 99)[given[c.trial]])
        for c in demands
        if given[c.trial] != c.current
    )
    assert worth(demands, given) * 600 - lost >= worth(demands, kept) * 600 * (1 - 1e-9)
    if min_residence_s:
        assert all(given[c.trial] == c.current for c in demands if c.since_s < min_residence_s)


@given(many(), st.integers(4, 12))
def test_nobody_starves(demands: list[Demand], workers: int) -> None:
    """With patience everybody who could run has run after some rounds."""
    rules, ran = Rules(min_residence_s=5.0, max_wait_s=50.0), set()
    for _ in range(4 * len(demands)):
        given = allocate(demands, workers, rules)
        ran |= {trial for trial, count in given.items() if count}
        demands = [replace(c, since_s=c.since_s + 60.0) for c in after(demands, given)]
    assert ran == {c.trial for c in demands}


def test_without_patience_the_running_keep_their_workers() -> None:
    demands = [demand(1, 2, low=2, worth=1.0, since_s=100.0), demand(2, low=2, worth=9.0, since_s=1e6)]
    assert allocate(demands, 3) == {1: 3, 2: 0}
    assert allocate(demands, 3, Rules(max_wait_s=500.0)) == {1: 0, 2: 3}
    just = [replace(demands[0], since_s=10.0), demands[1]]  # whoever was let in has its least stay
    assert allocate(just, 3, Rules(max_wait_s=500.0, min_residence_s=30.0)) == {1: 2, 2: 0}


@pytest.mark.parametrize(
    ("demands", "workers", "expected"),
    [
        ([], 4, {}),
        ([demand(1)], 0, {1: 0}),
        ([demand(1, low=3)], 2, {1: 0}),
        ([demand(1, worth=1.0), demand(2, worth=2.0)], 10, {1: 2, 2: 8}),  # the steeper first, to its bound
        ([demand(1), demand(2)], 9, {1: 8, 2: 1}),  # ties by trial number
        ([demand(1, 8), demand(2, low=2)], 8, {1: 6, 2: 2}),  # a new trial has its least at once
        ([demand(1, 8)], 3, {1: 3}),  # workers were lost
        ([demand(1, 4, throughput=MeasuredRates(((1, 10.0), (2, 20.0), (4, 5.0))))], 4, {1: 2}),  # more is slower
        ([demand(1, throughput=MeasuredRates()), demand(2, high=2)], 8, {1: 2, 2: 2}),  # unseen: twice its least
    ],
)
def test_table(demands: list[Demand], workers: int, expected: dict[int, int]) -> None:
    assert allocate(demands, workers) == expected


@pytest.mark.parametrize(("workers", "expected"), [(4, 4), (5, 4), (7, 4), (8, 8), (12, 8)])
def test_slots_make_blocks(workers: int, expected: int) -> None:
    """8 slots: 5 to 7 workers are as fast as 4."""
    pace = MeasuredRates(((1, 1000.0), (8, 8000.0)), slots=8)
    assert allocate([demand(1, high=12, throughput=pace)], workers) == {1: expected}


def test_what_a_block_leaves_goes_to_others() -> None:
    pace = MeasuredRates(((1, 1000.0), (8, 8000.0)), slots=8)
    assert allocate([demand(1, throughput=pace), demand(2)], 7) == {1: 4, 2: 3}


def test_a_block_that_no_longer_fits_is_looked_at_anew() -> None:
    slots = MeasuredRates(((1, 1000.0), (8, 8000.0)), slots=8)
    fast = MeasuredRates(((1, 2000.0), (3, 6000.0)))
    demands = [demand(1, low=4, throughput=slots), demand(2, high=3, throughput=fast), demand(3)]
    assert allocate(demands, 11) == {1: 4, 2: 3, 3: 4}


def test_free_workers_go_where_they_bring_most() -> None:
    """Trial 3 has one too many, but its pause would cost more than trial 1 gains."""
    demands = [
        demand(1, 1, high=2, throughput=concave([100.0, 50.0])),
        demand(2, 1, high=2, throughput=concave([100.0, 90.0])),
        demand(3, 2, high=2, throughput=concave([100.0, 10.0]), pause_s=300.0),
    ]
    assert allocate(demands, 5) == {1: 1, 2: 2, 3: 2}


def test_what_was_given_back_is_given_on_at_once() -> None:
    """Not worth taking from trial 1, whose pause counts; once it gives back what brings too little, free."""
    giving = demand(1, 4, high=4, throughput=concave([100.0, 60.0, 40.0, 30.0]), pause_s=100.0)
    demands = [giving, demand(2, 1, high=2, throughput=concave([100.0, 55.0]))]
    assert allocate(demands, 5, Rules(least_gain=0.5)) == {1: 2, 2: 2}


@pytest.mark.parametrize(("pause_s", "expected"), [(1.0, {1: 1, 2: 3}), (250.0, {1: 2, 2: 2})])
def test_a_worker_moves_only_where_that_pays_its_pauses(pause_s: float, expected: dict[int, int]) -> None:
    slow = MeasuredRates(((1, 90.0), (2, 100.0)))
    demands = [demand(1, 2, throughput=slow, pause_s=pause_s), demand(2, 2, pause_s=pause_s)]
    assert allocate(demands, 4) == expected


@pytest.mark.parametrize(("remaining", "expected"), [(1000.0, {1: 2, 2: 2}), (1e6, {1: 1, 2: 3})])
def test_nobody_is_robbed_who_ends_soon(remaining: float, expected: dict[int, int]) -> None:
    slow = MeasuredRates(((1, 90.0), (2, 100.0)))
    demands = [demand(1, 2, throughput=slow, remaining=remaining, pause_s=5.0), demand(2, 2, pause_s=5.0)]
    assert allocate(demands, 4) == expected


def test_nobody_is_resized_twice_at_once() -> None:
    demands = [demand(1, 2, since_s=10.0)]
    assert allocate(demands, 4, Rules(min_residence_s=30.0)) == {1: 2}
    assert allocate(demands, 4, Rules(min_residence_s=5.0)) == {1: 4}
    assert allocate(demands, 1, Rules(min_residence_s=30.0)) == {1: 1}  # a loss does not ask


@pytest.mark.parametrize(("least_gain", "expected"), [(0.0, 4), (0.35, 3), (0.5, 2), (1.0, 1)])
def test_a_worker_must_bring_enough(least_gain: float, expected: int) -> None:
    pace = concave([100.0, 60.0, 40.0, 30.0])
    assert allocate([demand(1, high=4, throughput=pace)], 8, Rules(least_gain=least_gain)) == {1: expected}


@pytest.mark.parametrize(("pause_s", "expected"), [(0.0, 2), (100.0, 2), (400.0, 4)])
def test_who_brings_too_little_is_given_back_where_that_pays(pause_s: float, expected: int) -> None:
    """Two workers spared, worth 100, against a loss of 70 and the pause."""
    pace = concave([100.0, 60.0, 40.0, 30.0])
    demands = [demand(1, 4, high=4, throughput=pace, pause_s=pause_s)]
    assert allocate(demands, 8, Rules(least_gain=0.5)) == {1: expected}


@pytest.mark.parametrize(
    ("demands", "workers", "deadline_s", "expected"),
    [
        # The promising has what it needs, though the other gains more by each worker.
        ([SLOWING, demand(2, remaining=1000.0, worth=0.9)], 5, math.inf, {1: 1, 2: 4}),
        ([SLOWING, demand(2, remaining=1000.0, worth=0.9)], 5, 10.0, {1: 3, 2: 2}),
        # Both could be in time, together they cannot: the most worth.
        ([demand(1, remaining=4000.0), demand(2, remaining=4000.0, worth=2.0)], 6, 10.0, {1: 1, 2: 5}),
        # Beyond hope: no more than its least while it runs, nothing where it has not begun.
        ([demand(1, 4, remaining=9000.0, worth=9.0), demand(2, remaining=1000.0)], 6, 10.0, {1: 1, 2: 5}),
        ([demand(1, 0, remaining=9000.0, worth=9.0), demand(2, remaining=1000.0)], 6, 10.0, {1: 0, 2: 6}),
        # In time only if nobody touches it: 5 s left, and a resize takes as long.
        ([demand(1, 2, remaining=1000.0, pause_s=5.0), demand(2, 2, remaining=900.0)], 6, 5.0, {1: 2, 2: 4}),
        # A start takes its time too: 800 samples in 8 of 10 s.
        (
            [demand(1, remaining=800.0, pause_s=2.0), demand(2, worth=9.0, current=4, remaining=1000.0)],
            4,
            10.0,
            {1: 1, 2: 3},
        ),
        (
            [demand(1, remaining=810.0, pause_s=2.0, high=1), demand(2, current=4, remaining=1000.0)],
            4,
            10.0,
            {1: 0, 2: 4},
        ),
    ],
)
def test_deadline(demands: list[Demand], workers: int, deadline_s: float, expected: dict[int, int]) -> None:
    assert allocate(demands, workers, Rules(deadline_s=deadline_s)) == expected


@given(many(known), st.integers(0, 30), rules)
def test_a_budget_is_kept(demands: list[Demand], workers: int, rules: Rules) -> None:
    given = allocate(demands, workers, rules)
    rate = {c.trial: float(samples_per_s(c.throughput, 99)[given[c.trial]]) for c in demands}
    spent = sum(given[c.trial] * c.remaining / rate[c.trial] for c in demands if given[c.trial])
    assert spent <= rules.budget_s * (1 + 1e-9)


@pytest.mark.parametrize(("budget_s", "expected"), [(9.0, 0), (10.0, 1), (12.4, 1), (12.5, 2), (20.0, 4)])
def test_a_budget_bounds_what_is_added(budget_s: float, expected: int) -> None:
    """1,000 samples: 10 worker-seconds on one worker, 2 x 1000/160 on two, 3 x 1000/200, 4 x 1000/230."""
    pace = concave([100.0, 60.0, 40.0, 30.0])
    assert allocate([demand(1, high=4, throughput=pace, remaining=1000.0)], 8, Rules(budget_s=budget_s)) == {
        1: expected
    }


def test_a_budget_does_not_ask_whether_a_move_pays() -> None:
    demands = [demand(1, 4, high=4, throughput=concave([100.0, 60.0, 40.0, 30.0]), remaining=1000.0, pause_s=100.0)]
    assert allocate(demands, 8, Rules(budget_s=10.0)) == {1: 1}


def test_measured_rates_between_and_beyond() -> None:
    pace = MeasuredRates(((4, 300.0), (1, 100.0), (2, 200.0)))
    assert samples_per_s(pace, 10).tolist() == [0, 100, 200, 250, 300, 350, 400, 450, 500, 500, 500]
    assert samples_per_s(MeasuredRates(), 5, low=2, unknown=7.0).tolist() == [0, 7, 14, 21, 28, 28]


@pytest.mark.parametrize(
    "make",
    [
        lambda: demand(1, low=0),
        lambda: demand(1, low=3, high=2),
        lambda: demand(1, worth=0.0),
        lambda: demand(1, remaining=-1.0),
        lambda: demand(1, pause_s=math.inf),
        lambda: demand(1, worth=math.nan),
        lambda: MeasuredRates(((1, 1.0), (1, 2.0))),
        lambda: MeasuredRates(((1, 0.0),)),
        lambda: Rules(horizon_s=0.0),
        lambda: Rules(deadline_s=-1.0),
        lambda: allocate([demand(1), demand(1)], 4),
        lambda: allocate([], -1),
    ],
)
def test_nonsense_is_refused(make) -> None:
    with pytest.raises(ValueError, match="need"):
        make()


@pytest.mark.parametrize("shape", ["curve", "slots", "line"])
def test_256_trials_on_2048_workers_take_less_than_a_tenth_of_a_second(shape: str) -> None:
    rng = random.Random(7)
    demands = []
    for trial in range(256):
        sample_s = rng.uniform(1e-4, 1e-3)
        curve = tuple((1 << k, 4096 / (0.01 + sample_s * (4096 >> k))) for k in range(12))
        pace = (
            MeasuredRates(((1, 100.0),)) if shape == "line" else MeasuredRates(curve, 64 if shape == "slots" else None)
        )
        more = {"worth": rng.uniform(1, 3), "pause_s": 2.0, "throughput": pace}
        demands.append(demand(trial, rng.randrange(16), 1, 2048, **more))
    took = []
    for _ in range(5):
        started = time.process_time()
        given = allocate(demands, 2048)
        took.append(time.process_time() - started)
    assert sum(given.values()) <= 2048
    assert min(took) < 0.1, took  # of CPU, the best of several: others may use the machine
