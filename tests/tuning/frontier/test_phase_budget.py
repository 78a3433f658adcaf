"""How a budget is split among the phases: the search has its share, and what does not fit is left out and told."""

from __future__ import annotations

import random

import pytest

from elastune.core.errors import UserError
from elastune.tuning.frontier.budget import (
    LEAST_SEEDS,
    LEAST_STEPS,
    LONGEST_S,
    SEARCH_SHARE,
    TIMED_STEPS,
    PhaseBudget,
    PhaseWork,
    TrainingCost,
    plan_phases,
    refuse_small,
    timed_steps,
    trainings_s,
)

DIGITS = TrainingCost(step_s=0.0031, steps=384, report_s=0.066, reports=12, start_s=0.1)  # measured on two idle cores
BUSY = TrainingCost(step_s=0.012, steps=384, report_s=0.25, reports=12, start_s=0.7)  # beside eight other processes
WORK = PhaseWork((1,) * 5, seeds=3, cores=2, timings=(16, 2, 0.06, 4), rows=(1, 2), spent_s=5.0)


def test_an_idle_machine_does_all_of_it_in_90_seconds() -> None:
    phases = plan_phases(DIGITS, WORK, 90.0)
    assert (phases.seeds, phases.confirmed, phases.left_out) == (3, 5, ())
    assert phases.search >= SEARCH_SHARE * 90
    assert sum(phases.seconds.values()) == pytest.approx(90.0)


def test_a_busy_machine_is_told_what_it_needs_and_with_short_leaves_the_search_out() -> None:
    phases = plan_phases(BUSY, WORK, 60.0)
    with pytest.raises(UserError, match=r"40% of a budget are for the search.*use --budget \d+0s, or --short"):
        refuse_small(phases, BUSY)
    short = plan_phases(BUSY, WORK, 60.0, short=True)
    assert (short.search, short.confirm, short.searches) == (0.0, 0.0, False)
    assert short.naive > 0
    assert short.left_out[0].startswith("the search: a budget of 1.0 min has no time for it")


def test_what_a_refusal_names_is_enough() -> None:
    phases = plan_phases(BUSY, WORK, 30.0)
    enough = plan_phases(BUSY, WORK, 1.15 * phases.needs_s)
    assert enough.searches
    refuse_small(enough, BUSY)
    assert not plan_phases(BUSY, WORK, 0.9 * phases.needs_s).searches


def test_seeds_go_before_settings_to_confirm_and_both_are_told() -> None:
    results: list[tuple[int, int, tuple[str, ...]]] = []
    for budget_s in range(420, 60, -5):
        phases = plan_phases(BUSY, WORK, float(budget_s))
        if phases.searches:
            results.append((phases.seeds, phases.confirmed, phases.left_out))
    assert [each[:2] for each in results] == sorted((each[:2] for each in results), reverse=True)
    assert {seeds for seeds, _, _ in results} == {3, 2}
    for seeds, confirmed, left_out in results:
        words = "; ".join(left_out)
        assert ("1 seed of 3" in words) is (seeds < 3)
        assert (f"time for {confirmed} of 5" in words) is (confirmed < 5)


def test_a_budget_that_is_chosen_holds_all_of_it() -> None:
    for cost in (DIGITS, BUSY):
        phases = plan_phases(cost, WORK, None)
        assert (phases.seeds, phases.confirmed, phases.left_out) == (3, 5, ())
        assert plan_phases(cost, WORK, phases.budget_s).seconds == phases.seconds
        assert plan_phases(cost, WORK, 0.7 * phases.budget_s).left_out
    slow = TrainingCost(step_s=1.0, steps=100)
    assert plan_phases(slow, WORK, None).budget_s > LONGEST_S, "no shorter one has a search"


def test_throughput_is_the_first_to_be_shortened() -> None:
    work = PhaseWork((1,) * 5, seeds=3, cores=2, throughput=20, rows=(1,), spent_s=5.0)
    whole = plan_phases(DIGITS, work, None)
    assert whole.throughput == pytest.approx(20 * DIGITS.timing_s())
    less = plan_phases(DIGITS, work, 0.82 * whole.budget_s)
    assert 0 < less.throughput < whole.throughput
    assert any("throughput" in words for words in less.left_out)
    assert less.seeds == 3
    assert sum(less.seconds.values()) == pytest.approx(less.budget_s)


def test_what_was_done_before_is_not_paid_again() -> None:
    begun = PhaseWork((1,) * 5, seeds=3, cores=2, spent_s=60.0, done=15, searched_s=30.0)
    phases = plan_phases(BUSY, begun, 120.0)
    assert phases.naive == 0.0
    assert phases.search >= SEARCH_SHARE * 120 - 30


@pytest.mark.parametrize("seed", range(40))
def test_no_split_takes_more_than_the_budget_or_the_searchs_share(seed: int) -> None:
    draw = random.Random(seed)
    cost = TrainingCost(draw.uniform(1e-4, 2), draw.randint(1, 2000), draw.uniform(0, 1), draw.randint(1, 20), 0.3)
    counts = draw.randint(1, 6)
    work = PhaseWork(
        trainers=tuple(draw.choice((1, 1, 2, 8)) for _ in range(counts)),
        policies=(2,) * draw.choice((0, 0, counts)),
        seeds=draw.randint(2, 5),
        cores=draw.choice((1, 2, 8)),
        timings=(4.0, 0.1),
        throughput=draw.choice((0, 10)),
        rows=(1.0,),
        spent_s=draw.uniform(0, 20),
    )
    budget_s = draw.uniform(1, 5000)
    phases = plan_phases(cost, work, budget_s)
    if phases.searches:
        assert sum(phases.seconds.values()) == pytest.approx(budget_s)
        assert min(phases.seconds.values()) >= 0
        assert phases.search >= SEARCH_SHARE * budget_s - 1e-6
        assert LEAST_SEEDS <= phases.seeds <= work.seeds
        assert (phases.seeds < work.seeds or phases.confirmed < counts) <= bool(phases.left_out)
    else:
        assert isinstance(phases, PhaseBudget)
        assert phases.left_out[0].startswith("the search")
        assert phases.needs_s > 0


def test_long_steps_are_timed_by_fewer_of_them() -> None:
    assert timed_steps(0.004, 90.0) == TIMED_STEPS
    assert timed_steps(0.09, 90.0) == 10
    assert timed_steps(10.0, 90.0) == LEAST_STEPS
    assert TrainingCost(0.1, 100).timing_s(20.0, 90.0) == pytest.approx(LEAST_STEPS * 2.0)


def test_trainings_share_a_machine() -> None:
    assert trainings_s((1,), 3.0, 2) == 3.0
    assert trainings_s((1,) * 6, 3.0, 2) == pytest.approx(12.0), "two at a time are no twice as fast"
    assert trainings_s((8,), 3.0, 2) == pytest.approx(12.0), "as wide as four machines"
    assert trainings_s((), 3.0, 2) == 0.0
