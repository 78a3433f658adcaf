import math
from dataclasses import replace
from typing import ClassVar

import pytest

from elastune.adapt.policies.base import Limits
from elastune.adapt.policies.library.goodput import (
    Goodput,
    SearchBounds,
    better,
    gradient_noise,
    observe,
    step_time_model,
)
from elastune.core.decisions import Signal, Snapshot
from elastune.core.errors import UserError
from elastune.core.plan.batch_size import Noise, efficiency
from elastune.core.plan.data_parallel import DataParallelStep, Observation
from elastune.testing.kits.policy import CALM, PolicyDriver, PolicyKit, PolicyWorld

BASE_S, SAMPLE_S = 0.01, 0.0005
TRUTH = DataParallelStep.linear(BASE_S, SAMPLE_S, 0.02, 0.004, 1.6)
BASE = 32


class TestGoodput(PolicyKit):
    calm = None  # two workers that hardly wait: a third is worth a try

    def make(self):
        return Goodput(every=10)


class TestGoodputOfFixedWorkers(PolicyKit):
    calm: ClassVar = {**CALM, "gradient_variance": 1.0}  # twice the samples would hardly tell more

    def make(self):
        return Goodput(every=10, fixed_workers=True)


def measured(perf, workers, batch):
    return Observation(workers, batch, perf.step_s(batch, workers), perf.gradient_s(batch, workers))


def go(now, seen, noise, base, room, gain):
    return better(now, seen, step_time_model(seen), noise, base, room, gain)


def step_time(perf):
    def of(workers, batch):
        seen = measured(perf, workers, batch)
        return seen.step_s, seen.compute_s

    return of


def true_goodput(perf, variance, square, workers, batch):
    return batch / perf.step_s(batch, workers) * efficiency(Noise(square, variance / BASE), batch, BASE)


def test_settings_of_a_room():
    assert [b for _, b in SearchBounds(1, 1, 32, 200).settings()] == [32, 48, 64, 96, 128, 192, 200]
    assert list(SearchBounds(1, 3, 1, 2).settings()) == [(1, 1), (1, 2), (2, 2)]
    assert list(SearchBounds(2, 2, 64, 64).settings()) == [(2, 64)]


def test_only_what_gains_enough_is_worth_a_change():
    seen = [measured(TRUTH, 1, b) for b in (32, 64, 128)]
    room = SearchBounds(1, 1, 32, 128)
    noise = Noise(gradient_sqr=1.0, variance=1e9)  # every sample counts in full
    assert go((1, 32), seen, noise, BASE, room, 0.05) == (1, 128)
    now = (1, 64)
    gain = (128 / TRUTH.step_s(128, 1)) / (64 / TRUTH.step_s(64, 1)) - 1
    assert go(now, seen, noise, BASE, room, gain * 0.9) == (1, 128)
    assert go(now, seen, noise, BASE, room, gain * 1.1) == now
    assert go((1, 128), seen, Noise(1.0, 0.0), BASE, room, 0.05) == (1, 32), "no noise: small batches"


def test_what_was_measured_counts_before_the_model():
    step_s = step_time_model(
        [measured(TRUTH, 1, 32), measured(TRUTH, 1, 64), replace(measured(TRUTH, 2, 64), step_s=7.0)]
    )
    assert step_s(64, 2) == 7.0
    assert step_s(128, 1) == pytest.approx(TRUTH.step_s(128, 1))


def test_it_explores_by_doubling():
    seen = [measured(DataParallelStep.linear(BASE_S, SAMPLE_S, 0.0, 0.0, 1.6), 1, 32)]
    workers, batch = go((1, 32), seen, Noise(1.0, 1e9), BASE, SearchBounds(1, 16, 32, 4096), 0.05)
    assert (workers, batch) == (1, 64), "fewer workers first, where both promise the same"
    seen.append(measured(DataParallelStep.linear(BASE_S, SAMPLE_S, 0.0, 0.0, 1.6), 1, 64))
    assert go((1, 64), seen, Noise(1.0, 1e9), BASE, SearchBounds(1, 16, 32, 4096), 0.05) == (2, 128)


def test_a_setting_that_disappointed_is_left():
    """Measured times count, where the model would go back for ever."""
    seen = [measured(TRUTH, 1, 32), replace(measured(TRUTH, 2, 64), step_s=10.0)]
    assert go((2, 64), seen, Noise(1.0, 1e9), BASE, SearchBounds(1, 2, 32, 64), 0.05) != (2, 64)


WORLDS = {
    "noisy gradients": (TRUTH, 3000.0, 1.0),
    "quiet gradients": (TRUTH, 60.0, 1.0),
    "slow network": (DataParallelStep.linear(BASE_S, SAMPLE_S, 0.3, 0.1, 1.6), 1000.0, 1.0),
    "fast network": (DataParallelStep.linear(BASE_S, SAMPLE_S, 0.001, 0.0001, 1.6), 1000.0, 1.0),
    "costly start of a step": (replace(TRUTH, base_s=0.2), 500.0, 1.0),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("jitter", [0.0, 0.03])
@pytest.mark.parametrize("seed", range(2))
def test_it_ends_near_the_best_and_stays(name, jitter, seed):
    perf, variance, square = WORLDS[name]
    world = PolicyWorld(
        step_time(perf), Limits(1, 8), 1, BASE, variance=variance, square=square, jitter=jitter, seed=seed
    )
    policy = PolicyDriver(Goodput(every=30, lr="adascale"))
    world.train(policy, 1500)
    best = max(true_goodput(perf, variance, square, *at) for at in SearchBounds(1, 8, BASE, 4096).settings())
    at = (world.workers, world.batch)
    assert true_goodput(perf, variance, square, *at) >= 0.95 * best
    world.train(policy, 500)
    assert (world.workers, world.batch) == at
    assert all(32 <= (d.batch_size or 32) <= 4096 and 1 <= (d.workers or 1) <= 8 for _, d in world.decisions)


def test_the_batch_follows_the_noise_while_it_grows():
    world = PolicyWorld(step_time(TRUTH), Limits(4, 4), 4, BASE, variance=100.0)
    policy = PolicyDriver(Goodput(every=20))
    world.train(policy, 600)
    before = world.batch
    world.variance = 5000.0
    world.train(policy, 600)
    assert world.batch > 1.5 * before
    assert world.workers == 4


def test_workers_that_never_come_leave_the_best_batch_for_those_there():
    world = PolicyWorld(step_time(TRUTH), Limits(1, 8), 1, BASE, variance=1000.0, free=1)
    world.train(PolicyDriver(Goodput(every=20)), 1000)
    best = max(true_goodput(TRUTH, 1000.0, 1.0, *at) for at in SearchBounds(1, 1, BASE, 4096).settings())
    assert true_goodput(TRUTH, 1000.0, 1.0, 1, world.batch) >= 0.95 * best
    asked = [step for step, d in world.decisions if d.workers]
    assert len(asked) <= 6, "asked again now and then, not at every look"


def test_fixed_workers_and_bounds():
    world = PolicyWorld(step_time(TRUTH), Limits(1, 8, longest_batch=100), 2, BASE, variance=1e5)
    world.train(PolicyDriver(Goodput(every=20, fixed_workers=True)), 800)
    assert world.workers == 2
    assert world.batch == 100


def snapshot(**signals):
    named = {name: Signal(value) for name, value in signals.items()}
    return Snapshot(9, 0, 0, 1.0, 2, 64, 0.1, signals=named, batch_at_start=32)


def test_what_is_not_measured_decides_nothing():
    assert observe(snapshot()) is None
    assert observe(snapshot(step_s=0.2)) is None
    assert observe(snapshot(step_s=0.2, data_s=0.0, compute_s=0.0)) is None
    assert observe(snapshot(step_s=math.inf, data_s=0.1, compute_s=0.1)) is None
    assert observe(snapshot(step_s=0.4, data_s=0.1, compute_s=0.2)) == Observation(2, 64, 0.4, pytest.approx(0.3))
    assert observe(snapshot(step_s=0.2, data_s=0.1, compute_s=0.2)) == Observation(2, 64, 0.2, 0.2), (
        "medians may differ"
    )
    assert gradient_noise(snapshot()) is None
    assert gradient_noise(snapshot(gradient_variance=64.0, gradient_square=2.0)) == Noise(2.0, 2.0)
    assert gradient_noise(snapshot(gradient_variance=64.0, gradient_square=-1.0)) == Noise(0.0, 2.0)
    world = PolicyWorld(step_time(TRUTH), Limits(1, 8), 1, BASE, variance=math.nan)
    world.train(PolicyDriver(Goodput(every=20)), 200)
    assert world.decisions == []


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"every": 0}, {"every": 4}, {"gain": 0.0}, {"lr": "cubic"}])
def test_wrong_options(wrong):
    with pytest.raises(UserError):
        Goodput(**wrong)
