"""Optuna's own tests of samplers, on ours: as it comes, and with a Gaussian process from the first result on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    MultiObjectiveSamplerTestCase,
    RelativeSamplerTestCase,
)

import elastune.optuna


@pytest.mark.sampled(8)
class TestAsItComes(BasicSamplerTestCase, MultiObjectiveSamplerTestCase):
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return lambda: elastune.optuna.Sampler(seed=0)


@pytest.mark.sampled(8)
class TestFromTheFirstResultOn(BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    @pytest.fixture
    def sampler(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], BaseSampler]:
        monkeypatch.setattr("elastune.tuning.search.gaussian.DRAWN", 0)
        return lambda: elastune.optuna.Sampler(seed=0)
