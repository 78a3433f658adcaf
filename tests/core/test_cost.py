"""What workers cost: by kind, over time, at prices that change."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.cost import ANY, ON_DEMAND, SPOT, Cost, Paid, Prices, bill
from elastune.core.errors import UserError

HOUR, DAY = 3600.0, 86400.0
TWO = Prices({SPOT: ((0.0, 1.0), (HOUR, 3.0)), ON_DEMAND: ((0.0, 4.0),)})


def test_the_published_arithmetic_of_a_large_training() -> None:
    """512 V100 for 2.1 days: $92,613 on demand, $15,152 on spot hosts, 83.6 % less (KungFu's slides on transient
    resources, after Megatron-LM)."""
    worker_s = 512 * 2.1 * DAY
    on_demand = 92_613 / (worker_s / HOUR)
    assert on_demand == pytest.approx(3.589, abs=5e-4)
    assert Cost(worker_s, on_demand).total == pytest.approx(92_613)
    prices = Prices({ON_DEMAND: ((0.0, 3.589),), SPOT: ((0.0, 3.589 * 15_152 / 92_613),)})
    dear, cheap = (bill([Paid(kind, 512, 0.0, 2.1 * DAY)], prices) for kind in (ON_DEMAND, SPOT))
    assert dear == pytest.approx(92_613, rel=1e-3)
    assert cheap == pytest.approx(15_152, rel=1e-3)
    assert 1 - cheap / dear == pytest.approx(0.836, abs=5e-4)


def test_prices_hold_from_their_time_on() -> None:
    assert [TWO.at(SPOT, now) for now in (-5.0, 0.0, HOUR - 1, HOUR, 9 * HOUR)] == [1.0, 1.0, 1.0, 3.0, 3.0]
    assert TWO.cost(Paid(SPOT, 2, HOUR / 2, 2 * HOUR)) == pytest.approx(2 * (0.5 * 1.0 + 1.0 * 3.0))
    assert bill([Paid(SPOT, 1, 0.0, HOUR), Paid(ON_DEMAND, 3, 0.0, HOUR)], TWO) == pytest.approx(13.0)
    assert Prices.constant(2.0).at("a-kind-of-its-own", 7.0) == 2.0
    with pytest.raises(UserError, match="every kind of host needs a price"):
        TWO.at("reserved", 0.0)


def test_dates_become_seconds_since_a_date() -> None:
    dated = Prices({ANY: ((1e9, 1.0), (1e9 + 60, 2.0))}, absolute=True)
    assert dated.since(1e9 + 10).steps[ANY] == ((-10.0, 1.0), (50.0, 2.0))
    assert dated.since(None).steps[ANY][0] == (0.0, 1.0)
    assert TWO.since(1e9) is TWO


@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 100)), min_size=1, max_size=6, unique_by=lambda step: step[0]),
    st.lists(st.floats(0, 2e5), min_size=3, max_size=3).map(sorted),
)
def test_a_bill_is_the_sum_of_its_parts(steps: list[tuple[float, float]], times: list[float]) -> None:
    prices = Prices({ANY: tuple(sorted(steps))})
    begin, middle, end = times
    parts = [Paid(SPOT, 3, begin, middle), Paid(SPOT, 3, middle, end)]
    assert bill(parts, prices) == pytest.approx(prices.cost(Paid(SPOT, 3, begin, end)), abs=1e-9)
