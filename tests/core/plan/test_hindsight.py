"""The least cost, against a linear programme and against trying everything."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.core.cost import ON_DEMAND, SPOT, Prices
from elastune.core.plan.prices import Availability, MarketSpan, least_cost, market_spans

MOST = 3
MARKETS = st.lists(
    st.builds(MarketSpan, st.integers(1, 5).map(float), st.integers(0, 4), st.integers(1, 9), st.integers(1, 9)),
    min_size=1,
    max_size=4,
)
SPEEDS = st.lists(st.floats(0.1, 4.0), min_size=MOST, max_size=MOST).map(lambda more: [0.0, *more])


def price_of(stretch: MarketSpan, n: int) -> float:
    """A second of the cheapest n workers, by trying all divisions."""
    ways = range(min(stretch.spot, n) + 1)
    return min(k * stretch.spot_price + (n - k) * stretch.on_demand_price for k in ways)


@settings(deadline=None)
@given(MARKETS, SPEEDS, st.floats(0.01, 1.2))
def test_it_is_the_optimum_of_the_linear_programme(market: list[MarketSpan], speeds: list[float], part: float) -> None:
    """Variables: the seconds of each stretch on each number of workers."""
    from scipy.optimize import linprog

    work = part * sum(stretch.seconds * max(speeds) for stretch in market)
    costs = [price_of(stretch, n) for stretch in market for n in range(MOST + 1)]
    once = np.kron(np.eye(len(market)), np.ones(MOST + 1))
    done = np.tile(speeds, len(market))
    result = linprog(costs, A_ub=[-done], b_ub=[-work], A_eq=once, b_eq=[stretch.seconds for stretch in market])
    least = least_cost(work, MOST, lambda n: speeds[n], market)
    if result.status == 2:
        assert least is None or part > 1 - 1e-6
    else:
        assert least == pytest.approx(result.fun, rel=1e-6, abs=1e-6)


@given(
    st.lists(
        st.builds(MarketSpan, st.just(1.0), st.integers(0, 3), st.integers(1, 5), st.just(6)), min_size=3, max_size=3
    )
)
def test_nobody_who_chooses_whole_workers_pays_less(market: list[MarketSpan]) -> None:
    for work in range(1, 3 * MOST + 1):
        ways = product(range(MOST + 1), repeat=3)
        paid = [sum(map(price_of, market, way)) for way in ways if sum(way) >= work]
        assert least_cost(work, MOST, float, market) == pytest.approx(min(paid))


def test_a_market_is_cut_where_anything_changes() -> None:
    offer = Availability(((0.0, 4), (10.0, 2), (50.0, 2)))
    prices = Prices({SPOT: ((0.0, 3600.0), (20.0, 7200.0)), ON_DEMAND: ((0.0, 36000.0),)})
    assert market_spans(offer, prices, 30.0) == [
        MarketSpan(10.0, 4, 1.0, 10.0),
        MarketSpan(10.0, 2, 1.0, 10.0),
        MarketSpan(10.0, 2, 2.0, 10.0),
    ]
