"""A job on a market: what is paid for, what is useful, and whether it is done in time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.adapt.policies.library.spot import SpotRules
from elastune.core.cost import ON_DEMAND, SPOT, Prices
from elastune.core.errors import UserError
from elastune.core.plan.prices import Availability, least_cost, market_spans
from elastune.tuning.simulate.market import (
    GANG,
    HINDSIGHT,
    ON_DEMAND_ALONE,
    POLICY,
    SPOT_ALONE,
    Market,
    MarketJob,
    Overheads,
    forecasts,
    gang,
    mixed,
    on_demand_alone,
    replay,
    spot_alone,
)

HOUR = 3600.0
PRICES = Prices({SPOT: ((0.0, 1.0),), ON_DEMAND: ((0.0, 3.0),)})


def market(*steps: tuple[float, int]) -> Market:
    return Market(Availability(steps), PRICES)


def test_every_second_of_a_worker_is_paid_and_only_progress_is_useful() -> None:
    offers = market((0.0, 2), (1000.0, 1), (2000.0, 3), (10_000.0, 3))
    replayed = replay(
        MarketJob(4000.0), offers, spot_alone(8), Overheads(start_s=100.0, join_s=5.0, loss_s=10.0, redo_s=20.0)
    )
    # Until 100 nothing; to 1000 two, of which 40 are done again; 10 s nothing; to 2000 one; to 2100 one while two
    # start; 5 s nothing; then three.
    done_by_2100 = 2 * 900 - 40 + 990 + 100
    assert replayed.done_s == pytest.approx(2105 + (4000 - done_by_2100) / 3)
    assert replayed.spot_s == pytest.approx(2 * 1000 + 1 * 1000 + 3 * (replayed.done_s - 2000))
    assert replayed.useful_s == pytest.approx(4000.0)
    assert replayed.cost == pytest.approx(replayed.spot_s / HOUR)
    assert (replayed.losses, replayed.on_demand_s) == (1, 0.0)


def test_workers_that_stay_need_no_trace_and_no_change() -> None:
    replayed = replay(MarketJob(4000.0), market((0.0, 0), (9000.0, 0)), on_demand_alone(4))
    assert (replayed.done_s, replayed.changes, replayed.goodput) == (1000.0, 1, pytest.approx(1.0))
    assert replayed.cost == pytest.approx(4000.0 / HOUR * 3)


def test_what_is_not_done_by_the_end_says_how_far_it_came() -> None:
    replayed = replay(MarketJob(4000.0), market((0.0, 1), (1000.0, 1)), spot_alone(4))
    assert (replayed.done_s, replayed.done) == (None, pytest.approx(0.25))


def test_a_gang_waits_for_all_of_its_spot_workers_and_for_the_line() -> None:
    offers = market((0.0, 3), (1000.0, 4), (3000.0, 3), (8000.0, 3))
    replayed = replay(MarketJob(16_000.0), offers, gang(4, 8000.0, 0.0))
    # Behind the line from the first moment on, so on demand until level with it; spot while four are there.
    assert replayed.done_s is not None
    assert replayed.done_s <= 8000.0
    assert replayed.spot_s == pytest.approx(4 * 2000.0, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(60, 3000), st.integers(0, 8)), min_size=2, max_size=12),
    st.floats(0.3, 0.85),
    st.floats(0.0, 0.9),
)
def test_the_policy_is_in_time_and_never_cheaper_than_the_optimum(
    spans: list[tuple[int, int]], part: float, patience: float
) -> None:
    most, steps, at = 8, [], 0.0
    for seconds, n in spans:
        steps.append((at, n))
        at += seconds
    offers = market(*steps, (at + 20_000.0, 4))
    deadline_s = offers.offer.end_s
    job, own = MarketJob(part * most * deadline_s), Overheads(start_s=30.0, join_s=1.0, loss_s=2.0)
    rules = SpotRules(deadline_s, most, patience=patience, changeover_s=32.0)
    replayed = replay(job, offers, mixed(rules), own)
    assert replayed.done_s is not None
    best = least_cost(job.work_s, most, float, market_spans(offers.offer, PRICES, deadline_s))
    assert best is not None
    assert replayed.cost >= best * (1 - 1e-9)


def test_a_forecast_has_the_policy_the_baselines_and_the_optimum() -> None:
    offers = market((0.0, 8), (2 * HOUR, 2), (3 * HOUR, 8), (12 * HOUR, 8))
    results = {
        each.name: each
        for each in forecasts(MarketJob(40 * HOUR), offers, SpotRules(10 * HOUR, 8), Overheads(2.0, 0.1, 0.1))
    }
    best, ours = results[HINDSIGHT].cost, results[POLICY].cost
    assert best == pytest.approx(40.0)
    assert ours == pytest.approx(best, rel=0.01)
    assert results[ON_DEMAND_ALONE].cost == pytest.approx(3 * 40.0, rel=0.01)
    assert results[SPOT_ALONE].cost == pytest.approx(best, rel=0.01)
    assert results[GANG].cost > ours  # type: ignore[operator]
    assert all(each.in_time(10 * HOUR) for each in results.values())


def test_a_trace_that_ends_before_the_deadline_says_nothing_of_it() -> None:
    with pytest.raises(UserError, match="must reach to the deadline"):
        forecasts(MarketJob(HOUR), market((0.0, 8), (HOUR, 8)), SpotRules(2 * HOUR, 8), Overheads())
