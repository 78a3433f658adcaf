import math

import pytest

from elastune.adapt.policies.base import Limits
from elastune.adapt.policies.library.warmup import WarmUp
from elastune.core.decisions import Decision
from elastune.core.errors import UserError
from elastune.testing.kits.policy import PolicyDriver, PolicyKit, decide


class TestIt(PolicyKit):
    calm = None

    def make(self):
        return WarmUp(steps=30)


def at_start(policy, **run):
    return policy.decide("before_train", step=0, epoch=0, **run)


def test_it_divides_the_rate_and_then_ramps():
    policy = PolicyDriver(WarmUp(k=4.0, steps=10))
    assert at_start(policy) == Decision(lr_factor=0.25)
    assert policy.decide("after_step", step=1) == Decision(lr_factor=4.0, ramp_steps=10)
    assert all(policy.decide("after_step", step=step).empty for step in range(2, 20))


@pytest.mark.parametrize(("batch", "epochs", "steps"), [(50, 5.0, 1000), (64, 0.1, 16), (4096, 0.01, 1)])
def test_epochs_are_counted_in_steps(batch, epochs, steps):
    policy = PolicyDriver(WarmUp(epochs=epochs))
    at_start(policy, batch_size=batch)
    assert policy.decide("after_step", step=1, batch_size=batch).ramp_steps == steps


def test_epochs_of_unknown_length_are_refused():
    policy = PolicyDriver(WarmUp(epochs=1.0))
    policy.decide("before_train", step=0)
    with pytest.raises(UserError, match="how long"):
        policy.decide(limits=Limits(), step=1)


def test_a_resumed_run_is_not_warmed_up_again():
    done, resumed = PolicyDriver(WarmUp(steps=10)), PolicyDriver(WarmUp(steps=10))
    at_start(done)
    done.travel_to(resumed)
    assert resumed.decide("before_train", step=1).empty
    assert resumed.decide("after_step", step=2).lr_factor == 8.0  # what was begun is ended
    assert decide(WarmUp(steps=10), "before_train", step=50).empty  # it was named after the run had begun


def test_it_composes_with_others():
    """Its factors cancel: another's in between stays, whatever the order."""
    policy = PolicyDriver(WarmUp(k=8.0, steps=3))
    factors = [at_start(policy).lr_factor, 2.0, policy.decide("after_step", step=1).lr_factor]
    assert math.prod(factors) == 2.0


@pytest.mark.parametrize(
    "options",
    [
        {"k": 1.0, "steps": 1},
        {"k": math.inf, "steps": 1},
        {"k": math.nan, "steps": 1},
        {},
        {"steps": 1, "epochs": 1.0},
        {"steps": -1, "epochs": 1.0},
        {"steps": -1},
        {"epochs": math.nan},
        {"epochs": math.inf},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(UserError):
        WarmUp(**options)
