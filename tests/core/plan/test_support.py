"""How many workers a noise scale supports."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.plan.batch_size import smallest_share, supported_workers
from elastune.core.plan.data_parallel import DataParallelStep


def test_half_of_a_step_at_the_smallest_share_goes_into_samples() -> None:
    share = smallest_share(base_s=3e-3, per_sample_s=1e-4)
    assert share == pytest.approx(30)
    times = DataParallelStep(3e-3, 1e-4, 0.0, 0.0, 0)
    assert times.gradient_s(30, 1) == pytest.approx(2 * 30 * 1e-4)
    assert smallest_share(3e-3, 1e-4, efficiency=0.75) == pytest.approx(90)


def test_edges_of_the_step_time_model() -> None:
    assert smallest_share(0.0, 1e-4) == 1.0, "nothing fixed: one sample is as good as many"
    assert smallest_share(1e-9, 1e-4) == 1.0, "there is no smaller share than a sample"
    assert smallest_share(3e-3, 0.0) == math.inf, "samples cost nothing: sharing them out gains nothing"
    assert supported_workers(1e6, math.inf) == 0


@given(noise_scale=st.floats(0, 1e9), share=st.floats(1, 1e6))
def test_it_is_the_largest_number_of_workers_with_a_large_enough_share(noise_scale: float, share: float) -> None:
    workers = supported_workers(noise_scale, share)
    assert workers == 0 or noise_scale / workers >= share * (1 - 1e-12)
    assert noise_scale / (workers + 1) <= share * (1 + 1e-12)


def test_what_is_no_time_is_refused() -> None:
    for times in ((-1.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.inf)):
        with pytest.raises(ValueError, match="no times"):
            smallest_share(*times)
    with pytest.raises(ValueError, match="no times"):
        smallest_share(1.0, 1.0, efficiency=1.0)
    for noise_scale in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="noise scale"):
            supported_workers(noise_scale, 4.0)
