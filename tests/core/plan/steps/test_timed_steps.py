"""What measured steps of a program tell of its others, against models whose truth is known."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.core.journal.records import LinkMeasured, TimesFitted, decode, encode
from elastune.core.plan.data_parallel import DataParallelStep, Fit, Observation, fit_gradient, fit_parts, fit_steps
from elastune.core.plan.links import Hosts, RingLink

TRUTH = DataParallelStep(base_s=2e-3, per_sample_s=1e-4, latency_s=3e-4, seconds_per_byte=1e-9, grad_bytes=4_000_000)


@given(
    base=st.floats(1e-4, 1e-2),
    per_sample=st.floats(1e-5, 1e-3),
    latency=st.floats(1e-5, 1e-3),
    per_byte=st.floats(1e-10, 1e-8),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=60)
def test_fit_predicts_planted_models_under_noise(base, per_sample, latency, per_byte, seed):
    truth = DataParallelStep(base, per_sample, latency, per_byte, 1_000_000)
    noise = np.random.default_rng(seed)

    def measured(seconds):
        return float(seconds * noise.lognormal(0, 0.02))

    gradients = [(b, measured(truth.gradient_s(b, 1))) for b in (8, 32, 128, 512) for _ in range(5)]
    links = [LinkMeasured(2, measured(2 * latency), measured(per_byte)) for _ in range(5)]
    result = fit_parts(gradients, truth.grad_bytes, links).model
    for batch, workers in [(16, 1), (256, 2), (256, 4), (2048, 8)]:
        assert result.step_s(batch, workers) == pytest.approx(truth.step_s(batch, workers), rel=0.06)


@given(st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-3))
@settings(deadline=None)
def test_fit_is_exact_without_noise(base, per_sample):
    result = fit_gradient([(b, base + per_sample * b) for b in (1, 10, 100, 1000)])
    assert result == (pytest.approx(base, rel=1e-5), pytest.approx(per_sample, rel=1e-5))


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


def test_errors_are_predicted_over_measured_on_steps_the_fit_never_saw():
    gradients = [(b, TRUTH.gradient_s(b, 1)) for b in (16, 64, 256)]
    links = [LinkMeasured(workers=2, latency_s=2 * TRUTH.latency_s, seconds_per_byte=TRUTH.seconds_per_byte)]
    steps = [
        Observation(2, 64, TRUTH.step_s(64, 2)),
        Observation(2, 256, TRUTH.step_s(256, 2) / 1.25),
    ]
    result = fit_parts(gradients, TRUTH.grad_bytes, links, steps)
    assert result.errors == {
        "batch 64 on 2 workers": pytest.approx(1.0),
        "batch 256 on 2 workers": pytest.approx(1.25),
    }
    assert result.measured_workers == (1, 2)
    assert fit_parts(gradients, TRUTH.grad_bytes, links).model == result.model
    assert fit_parts(gradients, TRUTH.grad_bytes).model.link == RingLink(), "without a link, reducing is free"


def test_through_the_journal_and_back():
    record = Fit(TRUTH, (1, 2), {"batch 64 on 2 workers": 1.1}).to_record()
    back = decode(encode(record))
    assert isinstance(back, TimesFitted)
    assert DataParallelStep.from_record(back) == TRUTH
    assert back.measured_workers == [1, 2]
    with pytest.raises(ValueError, match="overlap"):
        Fit(DataParallelStep(0, 0, 0, 0, 0, overlap=2.0), (1,), {}).to_record()
    with pytest.raises(ValueError, match="no fixed part"):
        Fit(DataParallelStep.linear(0, 0, 0.1, 0.0), (1,), {}).to_record()
    several = replace(TRUTH, hosts=Hosts(RingLink(1e-3, 8e-9), 2))
    assert DataParallelStep.from_record(decode(encode(Fit(several, (1, 2), {}).to_record()))) == several
    with pytest.raises(ValueError, match="workers_per_host: must be at least 1"):
        replace(Fit(several, (1, 2), {}).to_record(), workers_per_host=0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_no_times_are_refused(seconds):
    with pytest.raises(ValueError, match="positive and finite"):
        fit_gradient([(8, 0.1), (16, seconds)])


def test_nothing_measured_is_told():
    with pytest.raises(UserError, match="measure one step"):
        fit_gradient([])


# -- fitted to whole steps


JOB = DataParallelStep.linear(0.01, 0.0005, 0.02, 0.004, 1.6)


def seen_of(workers, batch):
    return Observation(workers, batch, JOB.step_s(batch, workers), JOB.gradient_s(batch, workers))


def test_fit_recovers_what_it_has_seen_enough_of():
    seen = [seen_of(w, b) for w in (1, 2, 4, 8) for b in (32, 64, 256, 1024)]
    perf = fit_steps(seen)
    for workers, batch in ((3, 128), (6, 512), (16, 2048)):
        assert perf.step_s(batch, workers) == pytest.approx(JOB.step_s(batch, workers), rel=0.05)


def test_fit_of_one_setting_is_optimistic():
    perf = fit_steps([seen_of(1, 32)])
    assert perf.step_s(32, 1) == pytest.approx(0.026, rel=1e-3)
    assert perf.step_s(64, 1) == pytest.approx(0.026), "samples cost nothing until another batch was seen"
    assert perf.step_s(128, 4) == pytest.approx(0.026), "reductions cost nothing until one was seen"


def test_fit_of_two_workers_takes_a_third_to_cost_nothing_more():
    perf = fit_steps([seen_of(1, 32), seen_of(2, 32), seen_of(2, 64)])
    assert perf.latency_s < 1e-8
    assert perf.step_s(64, 2) == pytest.approx(JOB.step_s(64, 2), rel=0.02)
    assert perf.base_s == pytest.approx(0.01, rel=0.05)


times = st.floats(1e-4, 100.0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 8192), times, st.floats(0.01, 1.0)), min_size=1, max_size=12)
)
def test_fit_survives_any_times(rows):
    perf = fit_steps([Observation(w, max(b, w), s, s * part) for w, b, s, part in rows])
    assert perf.overlap >= 1
    for workers, batch in ((1, 1), (2, 64), (64, 8192)):
        assert 0 < perf.step_s(batch, workers) < math.inf
