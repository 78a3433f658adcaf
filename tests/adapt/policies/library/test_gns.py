import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.adapt.policies.base import Limits
from elastune.adapt.policies.library.gns import GrowWithNoise, wanted_batch, with_batch
from elastune.adapt.policies.library.registry import build
from elastune.core.decisions import Decision
from elastune.core.errors import UserError
from elastune.testing.kits.policy import PolicyDriver, PolicyKit, decide


class TestIt(PolicyKit):
    def make(self):
        return GrowWithNoise(max_batch=1024, workers=True)


class TestWithItsGuards(PolicyKit):
    def make(self):
        return build("gns:max_batch=1024,most_doublings=3,ramp_steps=4")


RULES = {"factor": 2.0, "low": 1, "high": 4096, "most_doublings": 1, "shrink": False}


@pytest.mark.parametrize(
    ("noise", "error", "rules", "wanted"),
    [
        (128.0, 0.0, {}, 128),
        (127.9, 0.0, {}, 64),
        (140.0, 13.0, {}, 64),  # less its error it is too small
        (140.0, 12.0, {}, 128),
        (140.0, math.nan, {}, 128),
        (math.nan, 0.0, {}, 64),
        (1e6, 0.0, {}, 128),
        (1e6, 0.0, {"most_doublings": 3}, 512),
        (300.0, 0.0, {"most_doublings": 9}, 256),
        (1e6, 0.0, {"most_doublings": 9, "high": 300}, 256),
        (1e6, 0.0, {"high": 100}, 64),
        (64.0, 0.0, {"factor": 1.0}, 128),
        (10.0, 0.0, {}, 64),
        (10.0, 0.0, {"shrink": True}, 32),
        (10.0, 25.0, {"shrink": True}, 64),
        (10.0, 0.0, {"shrink": True, "low": 33}, 64),
    ],
)
def test_the_batch_that_the_noise_asks_for(noise, error, rules, wanted):
    assert wanted_batch(64, noise, error, **{**RULES, **rules}) == wanted


@given(st.integers(1, 4096), st.floats(0.1, 1e7), st.floats(1.0, 8.0), st.integers(1, 12))
def test_it_comes_to_rest(batch, noise, factor, doublings):
    """With a constant scale, growing and shrinking end, and never chase each other."""
    rules = {**RULES, "factor": factor, "most_doublings": doublings, "shrink": True}
    seen = [batch]
    while (wanted := wanted_batch(seen[-1], noise, 0.0, **rules)) != seen[-1]:
        assert len(seen) < 40
        seen.append(wanted)
    assert seen in (sorted(seen), sorted(seen, reverse=True))


def test_workers_grow_with_the_batch():
    assert with_batch(2, 64, 128, 1, 8) == 4
    assert with_batch(3, 64, 512, 1, 8) == 8
    assert with_batch(1, 64, 32, 1, 8) == 1


def test_it_doubles_the_batch_and_lets_the_learning_rate_follow():
    noisy = {"noise_scale": (500.0, 50.0)}
    assert decide(GrowWithNoise(lr="linear", ramp_steps=7, correct_momentum=True), "after_step", signals=noisy) == (
        Decision(batch_size=128, lr_factor=2.0, ramp_steps=7, correct_momentum=True)
    )
    both = decide(GrowWithNoise(lr="none", workers=True), "after_step", signals=noisy)
    assert both == Decision(batch_size=128, workers=4)
    # the rate goes by what is measured: (6400 / 64 + 1) / (6400 / 128 + 1)
    measured = {**noisy, "gradient_variance": 6400.0, "gradient_square": 1.0}
    assert decide(GrowWithNoise(), "after_step", signals=measured).lr_factor == pytest.approx(101 / 51)


def test_workers_that_cannot_change_stay():
    fixed = Limits(low=2, high=2, longest_batch=4096)
    decision = decide(
        GrowWithNoise(lr="none", workers=True), "after_step", limits=fixed, signals={"noise_scale": 500.0}
    )
    assert decision == Decision(batch_size=128)


@pytest.mark.parametrize(("longest", "most", "wanted"), [(100, None, None), (None, 100, None), (None, None, 128)])
def test_it_stays_within_the_epoch_and_its_own_bound(longest, most, wanted):
    limits = Limits(low=1, high=1, longest_batch=longest)
    decision = decide(
        GrowWithNoise(max_batch=most, lr="none"), "after_step", limits=limits, signals={"noise_scale": 1e6}
    )
    assert decision.batch_size == wanted


def test_nothing_measured_nothing_done():
    assert decide(GrowWithNoise(), "after_step").empty


def test_one_high_reading_does_not_ratchet():
    """Readings swing between 100 and 400 about 200 at batch 128: by default nothing happens."""
    policy = PolicyDriver(build("gns"))
    swings = [100.0, 400.0, 300.0] * 200
    decided = []
    for step, noise in enumerate(swings):
        decided.append(policy.decide(step=step, batch_size=128, signals={"noise_scale": noise}))
    assert all(decision.empty for decision in decided)
    assert decide(GrowWithNoise(), batch_size=128, signals={"noise_scale": 400.0}).batch_size == 256


@pytest.mark.parametrize(
    "options",
    [
        {"min_batch": 0},
        {"min_batch": 9, "max_batch": 8},
        {"max_batch": 0},
        {"factor": 0.5},
        {"most_doublings": 0},
        {"ramp_steps": -1},
        {"lr": "cubic"},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(UserError):
        GrowWithNoise(**options)
