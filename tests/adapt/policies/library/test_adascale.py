import math

import pytest

from elastune.adapt.policies.library.adascale import AdaScale
from elastune.adapt.policies.library.registry import build
from elastune.core.errors import UserError
from elastune.testing.kits.policy import PolicyDriver, PolicyKit, decide

NOISE = {"gradient_variance": 640.0, "gradient_square": 2.0}  # sigma^2 = 10 at batch 64, mu^2 = 2


class TestIt(PolicyKit):
    def make(self):
        return AdaScale()


class TestWithABaseOfItsOwn(PolicyKit):
    calm = None

    def make(self):
        return AdaScale(base_batch=16)


def test_the_learning_rate_is_what_the_batch_has_earned():
    policy = PolicyDriver(AdaScale())
    assert policy.decide("after_step", signals=NOISE).empty  # the batch it began with
    assert policy.decide("after_step", batch_size=256, signals=NOISE).lr_factor == pytest.approx(12 / 4.5)
    assert policy.decide("after_step", batch_size=256, signals=NOISE).empty  # once
    assert policy.decide("after_step", batch_size=64, signals=NOISE).lr_factor == pytest.approx(4.5 / 12)


def test_a_base_batch_of_its_own():
    policy = PolicyDriver(AdaScale(base_batch=16))
    assert policy.decide("after_step", signals=NOISE).lr_factor == pytest.approx(42 / 12)


def test_small_moves_are_left_alone():
    policy = PolicyDriver(AdaScale())
    policy.decide("after_step", batch_size=256, signals=NOISE)
    moved = {"gradient_variance": 640.0, "gradient_square": 1.9}  # 11.9 / 4.4, 1.4 % more
    assert policy.decide("after_step", batch_size=256, signals=moved).empty
    moved = {"gradient_variance": 640.0, "gradient_square": 1.0}  # 11 / 3.5, 18 % more
    result = policy.decide("after_step", batch_size=256, signals=moved).lr_factor
    assert result == pytest.approx(11 / 3.5 / (12 / 4.5))


def test_steps_count_as_much_as_the_rate():
    policy = PolicyDriver(AdaScale())
    for _ in range(3):
        policy.decide("before_step")
    policy.decide("after_step", batch_size=256, signals=NOISE)
    policy.decide("before_step", batch_size=256, signals=NOISE)
    assert policy.state["scale_invariant_steps"] == pytest.approx(3 + 12 / 4.5)


def test_a_guard_that_drops_the_change_keeps_the_count():
    policy = PolicyDriver(build("adascale:budget=0"))
    for step in range(4):
        policy.decide("before_step", step=step, batch_size=256, signals=NOISE)
        assert policy.decide("after_step", step=step, batch_size=256, signals=NOISE).empty
    assert policy.state == {"scale_invariant_steps": 4.0}, "the gain is what it was, as the rate is"


@pytest.mark.parametrize("signals", [{}, {**NOISE, "gradient_square": math.nan}, {"gradient_variance": 1.0}])
def test_nothing_measured_nothing_done(signals):
    assert decide(AdaScale(), "after_step", batch_size=256, signals=signals).empty


def test_its_state_travels_and_its_options_do_not():
    policy, other = PolicyDriver(AdaScale()), PolicyDriver(AdaScale(tolerance=0.2))
    policy.decide("after_step", batch_size=256, signals=NOISE)
    policy.travel_to(other)
    assert other.state == policy.state == {"gain": pytest.approx(12 / 4.5)}


@pytest.mark.parametrize("options", [{"base_batch": 0}, {"tolerance": -0.1}])
def test_impossible_options_are_refused(options):
    with pytest.raises(UserError):
        AdaScale(**options)
