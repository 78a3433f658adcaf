"""What the policy is told of a run that goes on: its pace is measured, its hosts are paid for."""

from elastune.adapt.policies.library.spot import SpotChoice, SpotRules
from elastune.core.clock import VirtualClock
from elastune.core.cost import ON_DEMAND, SPOT, Prices
from elastune.runtime.spot import SpotState, SpotWatch

HOUR = 3600.0
STEPS = ((0.0, 1.0), (HOUR, 2.0))


def watch(clock: VirtualClock, prices: Prices, **rules: float) -> SpotWatch:
    return SpotWatch(SpotRules(4 * HOUR, 8, patience=0.0, **rules), prices, clock)  # type: ignore[arg-type]


def test_a_run_on_time_needs_no_on_demand_workers_and_one_that_is_late_does() -> None:
    clock = VirtualClock()
    seen = watch(clock, Prices({SPOT: ((0.0, 1.0),), ON_DEMAND: ((0.0, 3.0),)}))
    assert seen.look(SpotState({SPOT: 4, ON_DEMAND: 4}, 0, 4, 0, 1000)) is None  # nothing is known yet
    clock.advance_to(HOUR)
    assert seen.look(SpotState({SPOT: 4, ON_DEMAND: 4}, 0, 4, 300, 1000)) == SpotChoice(4, 0)  # 250 would do
    clock.advance_to(2 * HOUR)
    late = seen.look(SpotState({SPOT: 1, ON_DEMAND: 4}, 0, 4, 400, 1000))  # 50 an hour and worker: 6 do 600 in 2 h
    assert late is not None
    assert (late.spot, late.on_demand) == (1, 6)


def test_rooms_are_paid_for_whether_used_or_not_at_the_prices_of_the_time() -> None:
    clock = VirtualClock(wall_s=1e9)
    relative = watch(clock, Prices({SPOT: STEPS, ON_DEMAND: ((0.0, 3.0),)}))
    dated = Prices(
        {SPOT: tuple((1e9 + at - HOUR, price) for at, price in STEPS), ON_DEMAND: ((0.0, 3.0),)}, absolute=True
    )
    by_date = watch(clock, dated)
    for each in (relative, by_date):
        each.look(SpotState({SPOT: 2, ON_DEMAND: 1}, 0, 1, 0, 1000))
    clock.advance_to(2 * HOUR)
    for each in (relative, by_date):
        each.look(SpotState({SPOT: 0, ON_DEMAND: 1}, 0, 1, 10, 1000))
    assert relative.spent == 2 * (1.0 + 2.0) + 2 * 3.0
    assert by_date.spent == 2 * (2.0 + 2.0) + 2 * 3.0


def test_a_resumed_run_is_paced_by_the_steps_that_are_left() -> None:
    clock = VirtualClock()
    seen = watch(clock, Prices.constant(1.0))
    seen.look(SpotState({SPOT: 1}, 0, 1, 900, 1000))
    clock.advance_to(HOUR)
    assert seen.look(SpotState({SPOT: 1}, 0, 1, 930, 1000)) == SpotChoice(1, 0)  # 100 in 4 h


def test_a_spent_budget_leaves_nobody() -> None:
    clock = VirtualClock()
    seen = watch(clock, Prices.constant(1.0), budget=0.5)
    seen.look(SpotState({SPOT: 1}, 0, 1, 0, 1000))
    clock.advance_to(HOUR)
    assert seen.look(SpotState({SPOT: 1}, 0, 1, 10, 1000)) == SpotChoice(0, 0)


def test_until_the_steps_are_known_all_hosts_are_used_and_paid_for() -> None:
    clock = VirtualClock()
    seen = watch(clock, Prices.constant(1.0))
    seen.look(SpotState({SPOT: 1}, 0, 1, 0, None))
    clock.advance_to(HOUR)
    assert seen.look(SpotState({SPOT: 1}, 0, 1, 500, None)) is None
    clock.advance_to(2 * HOUR)
    assert seen.look(SpotState({SPOT: 1}, 0, 1, 800, 1000)) == SpotChoice(1, 0)
    assert seen.spent == 2.0
