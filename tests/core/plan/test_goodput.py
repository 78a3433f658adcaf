import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.plan.batch_size import Noise, efficiency
from elastune.core.plan.data_parallel import DataParallelStep

NOISE = Noise(gradient_sqr=0.0015, variance=0.09)
ONE_NODE = DataParallelStep.linear(0.02, 0.001, 0.01, 0.002, overlap=1.8)
NODES = DataParallelStep.linear(0.02, 0.001, 0.05, 0.004, overlap=1.8)


@pytest.mark.parametrize(
    ("model", "replicas", "local", "accumulation", "rate", "useful", "product"),
    [
        (ONE_NODE, 4, 64, 0, 2982.3315160, 0.9838709677, 2934.2293947),
        (NODES, 8, 64, 1, 5112.4600658, 0.8970588235, 4586.1774119),
    ],
)
def test_equals_adaptdl(model, replicas, local, accumulation, rate, useful, product):
    passed = replicas * local
    batch = passed * (accumulation + 1)
    result = batch / (accumulation * model.gradient_s(passed, replicas) + model.step_s(passed, replicas))
    assert result == pytest.approx(rate, rel=1e-9)
    assert efficiency(NOISE, batch, 128) == pytest.approx(useful, rel=1e-9)
    assert result * efficiency(NOISE, batch, 128) == pytest.approx(product, rel=1e-9)


@given(st.floats(0, 10), st.floats(1e-6, 10), st.integers(128, 8192))
def test_a_larger_batch_is_never_more_efficient(gradient_sqr, variance, batch):
    noise = Noise(gradient_sqr, variance)
    assert efficiency(noise, 128, 128) == pytest.approx(1)
    assert efficiency(noise, batch, 128) <= 1 + 1e-9


def test_efficiency_without_signal_or_noise():
    assert efficiency(Noise(0.0, 1.0), 1024, 128) == pytest.approx(1), "pure noise: averaging loses nothing"
    assert efficiency(Noise(1.0, 0.0), 1024, 128) == pytest.approx(1 / 8), "no noise: seven of eight are wasted"
