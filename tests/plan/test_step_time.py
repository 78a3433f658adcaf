import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.journal.records import LinkMeasured, TimesFitted, decode, encode
from elastune.plan.step_time import (
    Fit,
    ReductionObserved,
    StepObserved,
    StepTime,
    fit,
    fit_gradient,
    fit_reduction,
)

TRUTH = StepTime(base_s=2e-3, per_sample_s=1e-4, latency_s=3e-4, seconds_per_byte=1e-9, grad_bytes=4_000_000)


def test_by_hand():
    assert TRUTH.step_s(64, 1) == pytest.approx(2e-3 + 64e-4)
    assert TRUTH.gradient_s(65, 4) == pytest.approx(2e-3 + 17e-4), "the largest share decides"
    assert TRUTH.reduction_s(4) == pytest.approx(6 * 3e-4 + 1.5 * 4e-3)
    assert TRUTH.step_s(64, 4) == pytest.approx(2e-3 + 16e-4 + 6 * 3e-4 + 6e-3)
    assert TRUTH.epoch_s(130, 64, 1) == pytest.approx(3 * 2e-3 + 130e-4)
    assert TRUTH.epoch_s(10, 64, 2) == pytest.approx(TRUTH.step_s(10, 2))


def test_overlap_hides_the_shorter_part():
    hidden = StepTime(2e-3, 1e-4, 3e-4, 1e-9, 4_000_000, overlap=30.0)
    assert hidden.step_s(64, 4) == pytest.approx(max(hidden.gradient_s(64, 4), hidden.reduction_s(4)), rel=1e-2)
    assert hidden.step_s(64, 4) < TRUTH.step_s(64, 4)


@given(
    base=st.floats(1e-4, 1e-2),
    per_sample=st.floats(1e-5, 1e-3),
    latency=st.floats(1e-5, 1e-3),
    per_byte=st.floats(1e-10, 1e-8),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=60)
def test_fit_predicts_planted_models_under_noise(base, per_sample, latency, per_byte, seed):
    truth = StepTime(base, per_sample, latency, per_byte, 1_000_000)
    noise = np.random.default_rng(seed)

    def measured(seconds):
        return float(seconds * noise.lognormal(0, 0.02))

    gradients = [(b, measured(truth.gradient_s(b, 1))) for b in (8, 32, 128, 512) for _ in range(5)]
    reductions = [
        ReductionObserved(size, 2, measured(StepTime(0, 0, latency, per_byte, size).reduction_s(2)))
        for size in (1_000, 100_000, 1_000_000, 10_000_000)
        for _ in range(5)
    ]
    found = fit(gradients, truth.grad_bytes, reductions).model
    for batch, workers in [(16, 1), (256, 2), (256, 4), (2048, 8)]:
        assert found.step_s(batch, workers) == pytest.approx(truth.step_s(batch, workers), rel=0.06)


@given(st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-3))
@settings(deadline=None)
def test_fit_is_exact_without_noise(base, per_sample):
    found = fit_gradient([(b, base + per_sample * b) for b in (1, 10, 100, 1000)])
    assert found == (pytest.approx(base, rel=1e-5), pytest.approx(per_sample, rel=1e-5))


def test_repeats_count_by_their_median():
    clean = [(b, 1e-3 + 1e-5 * b) for b in (16, 64, 256)]
    stalls = [(b, 50 * seconds) for b, seconds in clean]
    assert fit_gradient(clean * 3 + stalls) == pytest.approx((1e-3, 1e-5), rel=1e-6)


def test_parameters_are_never_negative():
    base, per_sample = fit_gradient([(10, 1e-3), (20, 2.2e-3), (40, 5e-3)])
    assert base == 0
    assert per_sample > 0


def test_a_single_share_promises_no_gain():
    assert fit_gradient([(50, 0.1), (50, 0.1)]) == (0.0, pytest.approx(0.002))


def test_links_are_divided_by_the_rings_share():
    links = [
        LinkMeasured(workers=w, latency_s=2 * (w - 1) * 3e-4, seconds_per_byte=2 * (w - 1) / w * 1e-9)
        for w in (1, 2, 4)
    ]
    assert fit_reduction(links=links) == (pytest.approx(3e-4), pytest.approx(1e-9))
    assert fit_reduction(links=links[:1]) == (0.0, 0.0)


def test_measured_reductions_go_before_links():
    seen = [ReductionObserved(n, 2, 2 * 1e-4 + n * 2e-9) for n in (1_000, 1_000_000)]
    lie = LinkMeasured(workers=2, latency_s=5.0, seconds_per_byte=5.0)
    assert fit_reduction(seen, [lie]) == (pytest.approx(1e-4), pytest.approx(2e-9))


def test_errors_are_predicted_over_measured_on_steps_the_fit_never_saw():
    gradients = [(b, TRUTH.gradient_s(b, 1)) for b in (16, 64, 256)]
    links = [LinkMeasured(workers=2, latency_s=2 * TRUTH.latency_s, seconds_per_byte=TRUTH.seconds_per_byte)]
    steps = [
        StepObserved(64, 2, TRUTH.step_s(64, 2)),
        StepObserved(256, 2, TRUTH.step_s(256, 2) / 1.25),
    ]
    found = fit(gradients, TRUTH.grad_bytes, links=links, held_out=steps)
    assert found.errors == {
        "batch 64 on 2 workers": pytest.approx(1.0),
        "batch 256 on 2 workers": pytest.approx(1.25),
    }
    assert found.measured_workers == (1, 2)
    assert fit(gradients, TRUTH.grad_bytes, links=links).model == found.model


def test_through_the_journal_and_back():
    record = Fit(TRUTH, (1, 2), {"batch 64 on 2 workers": 1.1}).to_record()
    back = decode(encode(record))
    assert isinstance(back, TimesFitted)
    assert StepTime.from_record(back) == TRUTH
    assert back.measured_workers == [1, 2]
    with pytest.raises(ValueError, match="overlap"):
        Fit(StepTime(0, 0, 0, 0, 0, overlap=2.0), (1,), {}).to_record()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_no_times_are_refused(seconds):
    with pytest.raises(ValueError, match="positive and finite"):
        fit_gradient([(8, 0.1), (16, seconds)])


def test_nothing_measured_is_told():
    with pytest.raises(UserError, match="measure one step"):
        fit_gradient([])
    with pytest.raises(ValueError, match="batch >= 1"):
        TRUTH.step_s(0, 1)
