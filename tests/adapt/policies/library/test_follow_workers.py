import pytest

from elastune.adapt.policies.base import Limits
from elastune.adapt.policies.library.follow_workers import FollowWorkers
from elastune.adapt.policies.library.registry import build
from elastune.core.decisions import Decision
from elastune.core.errors import UserError
from elastune.testing.kits.policy import PolicyDriver, PolicyKit


class TestIt(PolicyKit):
    def make(self):
        return FollowWorkers()


class TestWithNoise(PolicyKit):
    def make(self):
        return FollowWorkers(lr="adascale", ramp_steps=10)


def follow(policy, sizes, batch=64, **fixed):
    """The batch and the learning rate's factor after each of ``sizes``, where every decision is done."""
    policy, result = PolicyDriver(policy), []
    for step, workers in enumerate(sizes):
        decision = policy.decide("before_step", workers=workers, batch_size=batch, step=step, **fixed)
        batch = decision.batch_size or batch
        result.append((batch, decision.lr_factor))
    return result


def test_twice_the_workers_twice_the_batch_twice_the_rate_and_back():
    followed = follow(FollowWorkers(), [2, 2, 4, 4, 1, 2])
    assert followed == [(64, None), (64, None), (128, 2.0), (128, None), (32, 0.25), (64, 2.0)]


def test_the_momentum_is_corrected_unless_it_is_not_wanted():
    policy = PolicyDriver(FollowWorkers(ramp_steps=5))
    assert policy.decide("before_step", workers=1).empty
    expected = Decision(batch_size=192, lr_factor=3.0, ramp_steps=5, correct_momentum=True)
    assert policy.decide("before_step", workers=3) == expected
    plain = PolicyDriver(build("follow_workers:correct_momentum=false,lr=sqrt"))
    plain.decide("before_step", workers=1)
    assert plain.decide("before_step", workers=4) == Decision(batch_size=256, lr_factor=2.0)


def test_odd_numbers_of_workers_do_not_add_up_to_a_drift():
    followed = follow(FollowWorkers(), [3, 7, 2, 5, 1, 3] * 20, batch=64)
    assert followed[-1][0] == 64
    assert {batch for batch, _ in followed} == {64, round(64 * 7 / 3), 43, 107, 21}


def test_a_batch_is_cut_to_the_epoch_and_comes_back():
    followed = follow(FollowWorkers(), [1, 4, 1], limits=Limits(low=1, high=4, longest_batch=200))
    assert [batch for batch, _ in followed] == [64, 200, 64]


def test_what_another_policy_made_of_the_batch_is_what_it_goes_on_from():
    policy = PolicyDriver(FollowWorkers())
    policy.decide("before_step", workers=2, batch_size=64)
    policy.decide("before_step", workers=2, batch_size=256)  # somebody doubled it twice
    assert policy.decide("before_step", workers=4, batch_size=256).batch_size == 512


def test_it_goes_on_after_a_resume_on_other_workers():
    policy, resumed = PolicyDriver(FollowWorkers()), PolicyDriver(FollowWorkers())
    policy.decide("before_step", workers=2, batch_size=64)
    policy.travel_to(resumed)
    assert resumed.decide("before_step", workers=4, batch_size=64).batch_size == 128


@pytest.mark.parametrize("text", ["follow_workers:lr=cubic", "follow_workers:ramp_steps=-1"])
def test_wrong_options_are_user_errors(text):
    with pytest.raises(UserError):
        build(text)
