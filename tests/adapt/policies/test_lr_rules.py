import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.decisions import Signal, Snapshot
from elastune.core.errors import UserError
from elastune.core.plan.batch_size import RULES, LrChange, gain, lr_change, rule_monitors

positive = st.floats(1e-12, 1e12)
batches = st.integers(1, 65536)


def snapshot(variance=math.nan, square=math.nan, **more):
    signals = {"gradient_variance": Signal(variance), "gradient_square": Signal(square)}
    at = {"step": 0, "epoch": 0, "samples": 0, "seconds": 0.0, "workers": 1, "batch_size": 64, "lr": 0.1}
    return Snapshot(**{**at, "signals": signals, "batch_at_start": 64, **more})


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0), ("legw", 2.0)])
def test_four_times_the_batch(rule, factor):
    assert lr_change(rule, 64, 256, snapshot()).factor == pytest.approx(factor)
    assert lr_change(rule, 256, 64, snapshot()).factor == pytest.approx(1 / factor)


def test_adascale_has_the_value_of_the_paper():
    # sigma^2 = 640 / 64 = 10 at the base batch, mu^2 = 2, S = 4: (10 + 2) / (10 / 4 + 2)
    assert lr_change("adascale", 64, 256, snapshot(640.0, 2.0)).factor == pytest.approx(12 / 4.5)


@given(positive, positive, batches, batches)
def test_the_gain_lies_between_one_and_the_ratio(variance, square, base, batch):
    result = gain(variance, square, base, batch)
    low, high = sorted((1.0, batch / base))
    assert low * (1 - 1e-9) <= result <= high * (1 + 1e-9)


@pytest.mark.parametrize(
    ("variance", "square", "expected"),
    [
        (0.0, 1.0, 1.0),
        (1.0, 0.0, 4.0),
        (0.0, 0.0, 1.0),
        (math.nan, 1.0, 1.0),
        (1.0, math.nan, 1.0),
        (math.inf, 1.0, 1.0),
        (-1.0, 1.0, 1.0),
        (1e308, 1e308, 4.0 * 65 / 68),
    ],
)
def test_the_gain_at_its_ends(variance, square, expected):
    # at base 64: (v / 64 + m) / (v / 256 + m) with v = m is (1 + 64) / (1 + 256) * 256 / 64
    expected = 65 / 257 * 4 if variance == square == 1e308 else expected
    assert gain(variance, square, 64, 256) == pytest.approx(expected)


@given(st.sampled_from(RULES), batches, batches, batches, positive, positive)
def test_rules_compose(rule, old, middle, new, variance, square):
    at = snapshot(variance, square)
    by_way = lr_change(rule, old, middle, at).factor * lr_change(rule, middle, new, at).factor
    assert by_way == pytest.approx(lr_change(rule, old, new, at).factor)


def test_unmeasured_adascale_changes_nothing():
    bare = Snapshot(step=0, epoch=0, samples=0, seconds=0.0, workers=1, batch_size=64, lr=0.1)
    assert lr_change("adascale", 64, 256, bare) == LrChange(1.0, 0)


def test_legw_keeps_the_steps_of_its_warm_up():
    at = snapshot()
    steps = [lr_change("legw", 64, new, at, epoch_samples=6400, warmup_epochs=2.0).ramp_steps for new in (128, 1024)]
    assert steps == [200, 200]  # 2 epochs of 100 steps at the batch of the start; 4 epochs of 50, 32 of 6.25
    assert lr_change("legw", 128, 64, at, epoch_samples=6400).ramp_steps == 0  # falls at once


def test_legw_takes_the_length_of_an_epoch_from_what_was():
    assert lr_change("legw", 64, 128, snapshot(epoch=2, samples=12800), warmup_epochs=1.0).ramp_steps == 100
    assert lr_change("legw", 64, 128, snapshot(), warmup_epochs=1.0) == LrChange(math.sqrt(2), 0)


def test_rules_say_what_they_need():
    assert {rule: rule_monitors(rule) for rule in RULES if rule_monitors(rule)} == {"adascale": ("noise_scale",)}


@pytest.mark.parametrize("rule", RULES)
def test_empty_batches_are_refused(rule):
    with pytest.raises(UserError, match="at least one sample"):
        lr_change(rule, 0, 64, snapshot(1.0, 1.0))


def test_unknown_rules_name_the_known_ones():
    with pytest.raises(UserError, match=r"cubic.*none, sqrt, linear, adascale, legw"):
        lr_change("cubic", 64, 128, snapshot())
