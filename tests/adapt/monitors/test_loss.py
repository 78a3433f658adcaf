"""The smoothed loss."""

import pytest

from elastune.adapt.monitors.base import Reading
from elastune.adapt.monitors.registry import Loss


def test_samples_count_alike() -> None:
    monitor = Loss(memory=1e9)
    state = monitor.init()
    for step, (batch, loss) in enumerate([(96, 1.0), (32, 3.0)], 1):
        state = monitor.update(state, Reading(step, batch, 1, loss))
    assert monitor.signals(state)["loss"].value == pytest.approx(1.5)


def test_memory_of_one_is_the_newest() -> None:
    monitor = Loss(memory=1)
    state = monitor.init()
    for step in range(1, 6):
        state = monitor.update(state, Reading(step, 10, 1, float(step)))
    assert monitor.signals(state)["loss"].value == 5.0
