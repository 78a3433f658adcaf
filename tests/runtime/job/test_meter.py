"""What jobs on one cluster cost: their own workers, and their share of what nobody uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.cost import ON_DEMAND, SPOT, UNKNOWN, Prices
from elastune.core.errors import UserError
from elastune.runtime.job.pool import MoneyMeter

HOUR = 3600.0
PRICES = Prices({SPOT: ((0.0, 1.0), (2 * HOUR, 3.0)), ON_DEMAND: ((0.0, 4.0),)})


def test_workers_are_paid_for_by_their_kind_and_idle_ones_by_those_that_run() -> None:
    meter = MoneyMeter(PRICES)
    meter.look(0.0, {SPOT: 4, ON_DEMAND: 1}, {})
    assert (meter.costs[7], meter.idle) == (0, 0)
    meter.look(HOUR, {SPOT: 4, ON_DEMAND: 1}, {7: {SPOT: 2}, 8: {ON_DEMAND: 1}, 9: {}})
    assert meter.idle == pytest.approx(4 * 1.0 + 4.0), "nobody ran"
    meter.look(2 * HOUR, {SPOT: 3}, {7: {SPOT: 3}})
    assert meter.costs[7] == pytest.approx(2 * 1.0 + 2 / 3 * 2.0), "two unused ones, shared by workers"
    assert meter.costs[8] == pytest.approx(4.0 + 1 / 3 * 2.0)
    assert meter.costs[9] == 0, "it waits"
    meter.look(3 * HOUR, {}, {})
    assert meter.costs[7] == pytest.approx(2 * 1.0 + 4 / 3 + 3 * 3.0), "at the price of the third hour"


def test_workers_beyond_the_room_are_paid_for_and_make_nobody_s_share_less() -> None:
    meter = MoneyMeter(PRICES)
    meter.look(0.0, {SPOT: 1, ON_DEMAND: 1}, {1: {SPOT: 3}})
    meter.look(HOUR, {}, {})
    assert meter.costs[1] == pytest.approx(3 * 1.0 + 4.0)


def test_times_of_prices_are_those_of_the_clock_and_an_offset_more() -> None:
    meter = MoneyMeter(PRICES, offset_s=2 * HOUR - 100.0)
    meter.look(100.0, {SPOT: 1}, {1: {SPOT: 1}})
    meter.look(100.0 + HOUR, {SPOT: 1}, {1: {SPOT: 1}})
    assert meter.costs[1] == pytest.approx(3.0)


def test_a_kind_without_a_price_is_told() -> None:
    meter = MoneyMeter(PRICES)
    meter.look(0.0, {UNKNOWN: 1}, {})
    with pytest.raises(UserError, match="every kind of host needs a price"):
        meter.look(1.0, {UNKNOWN: 1}, {})


_WORKERS = st.dictionaries(st.sampled_from([SPOT, ON_DEMAND]), st.integers(0, 4))


@given(st.lists(st.tuples(st.floats(0.0, HOUR), st.dictionaries(st.integers(0, 3), _WORKERS)), min_size=2, max_size=8))
def test_what_is_paid_for_is_paid_for_once(told: list[tuple[float, dict[int, dict[str, int]]]]) -> None:
    """All that jobs cost, and what was idle, is what the room cost, whoever had which part of it when."""
    meter, now, room = MoneyMeter(PRICES), 0.0, {SPOT: 16, ON_DEMAND: 16}
    for seconds, held in told:
        meter.look(now, room, held)
        now += seconds
    meter.look(now, room, {})
    whole = MoneyMeter(PRICES)
    whole.look(0.0, room, {})
    whole.look(now, room, {})
    assert sum(meter.costs.values()) + meter.idle == pytest.approx(whole.idle, rel=1e-9, abs=1e-9)
