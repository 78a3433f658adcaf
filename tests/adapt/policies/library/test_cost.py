import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.adapt.policies.base import Limits
from elastune.adapt.policies.host import PolicyState
from elastune.adapt.policies.library.cost import Caps, CostCap, Meter, judge
from elastune.core.cost import Cost
from elastune.core.errors import UserError
from elastune.testing.kits.policy import PolicyDriver, PolicyKit, PolicyWorld

HOUR = 3600.0


class TestCostCap(PolicyKit):
    def make(self):
        return CostCap(worker_hours=1.0)


class TestSpent(PolicyKit):
    """0.1 s a step of 2 workers, and a cap that is reached in the middle."""

    calm = None

    def make(self):
        return CostCap(cap=10 / HOUR, price_per_worker_hour=1.0)


@pytest.mark.parametrize(
    ("spent", "newest", "verdict"),
    [
        (0.0, 0.01, "go"),
        (0.79, 0.01, "go"),
        (0.8, 0.01, "shrink"),
        (0.97, 0.01, "shrink"),
        (0.99, 0.01, "stop"),
        (1.5, 0.0, "stop"),
        (0.5, 0.3, "stop"),
    ],
)
def test_verdicts(spent, newest, verdict):
    caps = Caps(money=math.inf, worker_hours=1.0, price_per_worker_hour=0.0, shrink_at=0.8)
    assert judge(Meter(spent * HOUR, newest * HOUR), caps) == verdict


def test_the_nearer_cap_counts():
    caps = Caps(money=10.0, worker_hours=5.0, price_per_worker_hour=4.0, shrink_at=0.8)
    assert caps.used(HOUR) == pytest.approx(0.4)
    assert Caps(100.0, 5.0, 4.0, 0.8).used(HOUR) == pytest.approx(0.2)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 1e4)), max_size=50))
def test_the_meter_adds_up(steps):
    meter, at, total = Meter(), 0.0, 0.0
    for workers, took_s in steps:
        at += took_s
        total += workers * took_s
        meter = meter.after(workers, at)
    assert meter.worker_seconds == pytest.approx(total, abs=1e-6)


def test_a_clock_that_begins_anew():
    assert Meter(100.0, 1.0, 50.0).after(2, 3.0).worker_seconds == pytest.approx(106.0)


def perfect(workers, batch):
    return 0.4 / workers + 0.05, 0.4 / workers


def test_it_shrinks_then_stops_before_the_cap():
    cap, price = 2.0, 36.0  # 200 worker-seconds
    world = PolicyWorld(perfect, Limits(1, 8), workers=4, batch=64)
    policy = PolicyDriver(CostCap(cap=cap, price_per_worker_hour=price))
    world.train(policy, 5000)
    assert world.stopped
    assert [d.workers for _, d in world.decisions if d.workers] == [1]
    spent = Cost(policy.state.worker_seconds, price).total
    assert 0.9 * cap < spent <= cap
    assert world.workers == 1


def test_no_shrinking_at_one():
    world = PolicyWorld(perfect, Limits(1, 8), workers=4, batch=64)
    world.train(PolicyDriver(CostCap(worker_hours=0.05, shrink_at=1.0)), 5000)
    assert world.stopped
    assert not [d for _, d in world.decisions if d.workers]


def spent(worker_hours):
    policy = PolicyDriver(CostCap(worker_hours=1.0))
    policy.policy_state = PolicyState(Meter(worker_hours * HOUR, 0.0, 10.0))
    return policy


def test_it_asks_again_when_another_grows():
    policy = spent(0.85)
    asked = [step for step in range(350) if policy.decide(step=step, workers=4, limits=Limits(2, 4)).workers == 2]
    assert asked == [0, 100, 200, 300]


def test_fixed_workers_are_left_alone_until_the_end():
    policy = spent(0.85)
    assert policy.decide(workers=4, limits=Limits(4, 4)).empty
    assert spent(1.1).decide(workers=4, limits=Limits(4, 4)).stop


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"cap": 5.0},
        {"price_per_worker_hour": 5.0, "worker_hours": 1.0},
        {"worker_hours": -1.0},
        {"worker_hours": math.nan},
        {"worker_hours": 1.0, "shrink_at": 0.0},
        {"worker_hours": 1.0, "shrink_at": 1.1},
    ],
)
def test_wrong_options(wrong):
    with pytest.raises(UserError):
        CostCap(**wrong)
