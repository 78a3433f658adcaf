import pytest

from elastune.adapt.policies.base import Limits
from elastune.adapt.policies.library.registry import build, monitors_for
from elastune.adapt.policies.library.schedules import ScheduledBatch, ScheduledWorkers
from elastune.core.decisions import Decision
from elastune.core.errors import UserError
from elastune.testing.kits.policy import PolicyDriver, PolicyKit, decide


class Schedule(PolicyKit):
    """What a schedule says is done, or reported: it is not cut to what a run can bear."""

    calm = None

    @pytest.mark.parametrize("seed", range(5))
    def test_it_asks_for_nothing_that_cannot_be(self, seed):
        super().test_it_asks_for_nothing_that_cannot_be(seed, None)


class TestScheduledBatch(Schedule):
    def make(self):
        return ScheduledBatch(at=(0, 1, 2), lr="adascale")


class TestScheduledWorkers(Schedule):
    def make(self):
        return ScheduledWorkers(at=(7, 70, 100), workers=(3, 1, 8), by="step")


class TestGuarded(Schedule):
    def make(self):
        return build("scheduled_batch:at=0/9/99,by=step,factor=1.5,max_batch=100,cooldown=50,budget=2,patience=2")


def follow(policy, epochs, **fixed):
    """Batch and workers after each of ``epochs`` epochs' first steps, where every decision is done."""
    policy = PolicyDriver(policy)
    at = {"batch_size": 64, "workers": 2}
    seen = []
    for epoch in range(epochs):
        decision = policy.decide("before_step", epoch=epoch, step=10 * epoch, **{**at, **fixed})
        at["batch_size"] = decision.batch_size or at["batch_size"]
        at["workers"] = decision.workers or at["workers"]
        seen.append((at["batch_size"], at["workers"]))
    return seen


def test_the_batch_doubles_at_its_epochs():
    followed = follow(ScheduledBatch(at=(2, 4)), 6)
    assert [batch for batch, _ in followed] == [64, 64, 128, 128, 256, 256]


def test_explicit_batches():
    followed = follow(ScheduledBatch(at=(0, 2), batches=(100, 50)), 4)
    assert [batch for batch, _ in followed] == [100, 100, 50, 50]


def test_workers_by_step():
    followed = follow(ScheduledWorkers(at=(10, 30), workers=(4, 1), by="step"), 5)
    assert [workers for _, workers in followed] == [2, 4, 4, 1, 1]


def test_milestones_that_were_passed_together_count_together():
    assert decide(ScheduledBatch(at=(1, 2, 3)), "before_step", epoch=2).batch_size == 256
    assert decide(ScheduledWorkers(at=(1, 2), workers=(3, 4)), "before_step", epoch=7).workers == 4


def test_the_learning_rate_follows():
    policy = ScheduledBatch(at=(0,), factor=4.0, lr="sqrt", ramp_steps=5, correct_momentum=True)
    expected = Decision(batch_size=256, lr_factor=2.0, ramp_steps=5, correct_momentum=True)
    assert decide(policy, "before_step", epoch=0) == expected


def test_a_milestone_counts_once_after_a_resume():
    policy, resumed = PolicyDriver(ScheduledBatch(at=(1, 2))), PolicyDriver(ScheduledBatch(at=(1, 2)))
    assert policy.decide("before_step", epoch=1).batch_size == 128
    policy.travel_to(resumed)
    assert resumed.decide("before_step", epoch=1, batch_size=128).empty
    assert resumed.decide("before_step", epoch=2, batch_size=128).batch_size == 256


def test_a_cooldown_makes_a_schedule_late_not_lost():
    policy = build("scheduled_batch:at=1/2/3,cooldown=15")
    followed = follow(policy, 7)  # an epoch is 10 steps
    assert [batch for batch, _ in followed] == [64, 128, 128, 512, 512, 512, 512]


def test_the_impossible_raises_and_is_asked_again():
    policy = PolicyDriver(ScheduledBatch(at=(0,), batches=(999,)))
    with pytest.raises(UserError, match="longer than an epoch"):
        policy.decide("before_step", limits=Limits(longest_batch=100))
    assert policy.state == {}


def test_as_many_workers_as_there_may_be():
    limits = Limits(low=1, high=4)
    assert decide(ScheduledWorkers(at=(0,), workers=(99,)), "before_step", limits=limits).workers == 4


def test_only_adascale_needs_a_monitor():
    assert ScheduledBatch(at=(1,)).monitors == ()
    assert ScheduledBatch(at=(1,), lr="adascale").monitors == ("noise_scale",)
    assert monitors_for([build("scheduled_batch:at=1,lr=adascale,cooldown=1")]) == ("noise_scale",)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ScheduledBatch(at=()),
        lambda: ScheduledBatch(at=(2, 1)),
        lambda: ScheduledBatch(at=(1, 1)),
        lambda: ScheduledBatch(at=(-1,)),
        lambda: ScheduledBatch(at=(1,), factor=0.0),
        lambda: ScheduledBatch(at=(1,), batches=(1, 2)),
        lambda: ScheduledBatch(at=(1,), batches=(0,)),
        lambda: ScheduledBatch(at=(1,), lr="cubic"),
        lambda: ScheduledBatch(at=(1,), ramp_steps=-1),
        lambda: ScheduledWorkers(at=(1,), workers=()),
        lambda: ScheduledWorkers(at=(1,), workers=(0,)),
    ],
)
def test_impossible_options_are_refused(make):
    with pytest.raises(UserError):
        make()
