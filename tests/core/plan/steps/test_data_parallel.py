"""Steps of data parallelism by hand, and beside the form of which they are a part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.plan.data_parallel import DataParallelStep, overlapped
from elastune.core.plan.links import Hosts, RingLink
from elastune.core.plan.step_time import CONSTANTS, StepSplits, chain_of, seconds

TRUTH = DataParallelStep(base_s=2e-3, per_sample_s=1e-4, latency_s=3e-4, seconds_per_byte=1e-9, grad_bytes=4_000_000)
SEVERAL = replace(TRUTH, hosts=Hosts(RingLink(1e-3, 8e-9), 4))


def test_by_hand() -> None:
    assert TRUTH.step_s(64, 1) == pytest.approx(2e-3 + 64e-4)
    assert TRUTH.gradient_s(65, 4) == pytest.approx(2e-3 + 17e-4), "the largest share decides"
    assert TRUTH.reduction_s(4) == pytest.approx(6 * 3e-4 + 1.5 * 4e-3)
    assert TRUTH.step_s(64, 4) == pytest.approx(2e-3 + 16e-4 + 6 * 3e-4 + 6e-3)
    assert TRUTH.step_s(64, 4, passes=3, every=2) == pytest.approx(3 * 2e-3 + 16e-4 + (6 * 3e-4 + 6e-3) / 2)
    with pytest.raises(ValueError, match="batch >= 1"):
        TRUTH.step_s(0, 1)


@pytest.mark.parametrize("model", [TRUTH, SEVERAL], ids=["one host", "hosts of four"])
@pytest.mark.parametrize("passes", [1, 4])
def test_it_takes_what_the_form_takes(model: DataParallelStep, passes: int) -> None:
    """Of ``terms``, where an operation is a sample; also where workers do not fill their hosts: the fullest decides."""
    across = model.link if model.hosts is None else model.hosts.link
    per_node = 64 if model.hosts is None else model.hosts.workers_each
    known = {
        "flop_s": model.per_sample_s,
        "pass_s": model.base_s,
        "gradient_hop_s": model.latency_s,
        "gradient_byte_s": model.seconds_per_byte,
        "across_hop_s": across.latency_s - model.latency_s,
        "across_byte_s": across.seconds_per_byte,
    }
    workers, micro = np.arange(1.0, 21.0), 12.0
    splits = StepSplits(*np.broadcast_arrays(workers * micro * passes, micro, workers, 1.0, 1.0, 1.0, per_node))
    work = chain_of(1, 1.0, 0.0, model.grad_bytes)
    result = seconds(np.array([known.get(name, 1e-30) for name in CONSTANTS]), work, splits)
    here = [model.step_s(12 * n * passes, n, passes=passes) for n in range(1, 21)]
    assert here == pytest.approx(result.tolist(), rel=1e-12)


def test_a_linear_reduction_is_polluxs() -> None:
    model = DataParallelStep.linear(0.01, 0.001, pair_s=0.05, per_worker_s=0.004)
    assert [model.reduction_s(n) for n in (1, 2, 3, 8)] == pytest.approx([0.0, 0.05, 0.054, 0.074])
    assert DataParallelStep.linear(0.01, 0.001, 0.0, 0.0).step_s(64, 4) == pytest.approx(0.026)


@given(st.floats(1e-9, 10), st.floats(0, 10), st.floats(1, 50))
def test_overlap_lies_between_the_longer_and_the_sum(compute_s: float, reduce_s: float, overlap: float) -> None:
    total = overlapped(compute_s, reduce_s, overlap)
    assert max(compute_s, reduce_s) * (1 - 1e-12) <= total <= (compute_s + reduce_s) * (1 + 1e-12)
    assert overlapped(compute_s, reduce_s, 1.0) == pytest.approx(compute_s + reduce_s)


def test_overlap_hides_the_shorter_part() -> None:
    hidden = replace(TRUTH, overlap=30.0)
    assert hidden.step_s(64, 4) == pytest.approx(max(hidden.gradient_s(64, 4), hidden.reduction_s(4)), rel=1e-2)
    assert hidden.step_s(64, 4) < TRUTH.step_s(64, 4)
