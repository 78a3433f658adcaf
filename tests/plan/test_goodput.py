import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.plan.goodput import Noise, Performance, efficiency, goodput, overlapped, throughput

PERF = Performance(0.02, 0.001, 0.05, 0.004, 0.01, 0.002, 1.8)
NOISE = Noise(gradient_sqr=0.0015, variance=0.09)


@pytest.mark.parametrize(
    ("nodes", "replicas", "local", "accumulation", "rate", "useful", "product"),
    [
        (1, 4, 64, 0, 2982.3315160, 0.9838709677, 2934.2293947),
        (2, 8, 64, 1, 5112.4600658, 0.8970588235, 4586.1774119),
    ],
)
def test_equals_adaptdl(nodes, replicas, local, accumulation, rate, useful, product):
    batch = replicas * local * (accumulation + 1)
    assert throughput(PERF, nodes, replicas, local, accumulation) == pytest.approx(rate, rel=1e-9)
    assert efficiency(NOISE, batch, 128) == pytest.approx(useful, rel=1e-9)
    assert goodput(PERF, NOISE, 128, nodes, replicas, local, accumulation) == pytest.approx(product, rel=1e-9)


def test_a_lone_replica_reduces_nothing():
    assert throughput(PERF, 1, 1, 100) == pytest.approx(100 / 0.12)


@given(st.floats(1e-9, 10), st.floats(0, 10), st.floats(1, 50))
def test_overlap_lies_between_the_longer_and_the_sum(compute_s, reduce_s, overlap):
    total = overlapped(compute_s, reduce_s, overlap)
    assert max(compute_s, reduce_s) * (1 - 1e-12) <= total <= (compute_s + reduce_s) * (1 + 1e-12)
    assert overlapped(compute_s, reduce_s, 1.0) == pytest.approx(compute_s + reduce_s)


@given(st.floats(0, 10), st.floats(1e-6, 10), st.integers(128, 8192))
def test_a_larger_batch_is_never_more_efficient(gradient_sqr, variance, batch):
    noise = Noise(gradient_sqr, variance)
    assert efficiency(noise, 128, 128) == pytest.approx(1)
    assert efficiency(noise, batch, 128) <= 1 + 1e-9


def test_efficiency_without_signal_or_noise():
    assert efficiency(Noise(0.0, 1.0), 1024, 128) == pytest.approx(1), "pure noise: averaging loses nothing"
    assert efficiency(Noise(1.0, 0.0), 1024, 128) == pytest.approx(1 / 8), "no noise: seven of eight are wasted"


@pytest.mark.parametrize(("nodes", "replicas", "local", "accumulation"), [(2, 1, 8, 0), (1, 1, 0, 0), (1, 1, 8, -1)])
def test_impossible_placements_are_refused(nodes, replicas, local, accumulation):
    with pytest.raises(ValueError, match="throughput needs"):
        throughput(PERF, nodes, replicas, local, accumulation)
