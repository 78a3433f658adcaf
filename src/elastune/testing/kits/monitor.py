"""Tests that every monitor must pass, for inheritance.

class TestMine(MonitorKit):
    def make(self) -> Monitor: ...
"""

from __future__ import annotations

import copy
import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

import pytest

from elastune.adapt.monitors.base import GradientNorms, Monitor, Need, Reading, State, WorkerTimes
from elastune.core.decisions import Signal

RUBBISH = (math.nan, math.inf, -math.inf)


def reading(step: int, *, batch: int = 64, workers: int = 2, rng: random.Random | None = None) -> Reading:
    """Return a reading with everything in it; ``rng`` spreads its values (None: seeded by ``step``)."""
    spread = rng or random.Random(step)

    def around(value: float) -> float:
        return value * spread.uniform(0.8, 1.25)

    square = around(1.0) + 20 / batch
    norms = GradientNorms(batch, 8, square + around(7 * 20 / batch), square)
    return Reading(
        step=step,
        batch=batch,
        workers=workers,
        loss=around(2.0),
        norms=norms,
        preconditioned=replace(norms, square=100 * norms.square, part_square=100 * norms.part_square),
        times=tuple(WorkerTimes(around(0.001), around(0.02), around(0.004)) for _ in range(workers)),
        sharpness=around(12.0),
        trace=around(90.0),
    )


def spoiled(good: Reading, value: float) -> Reading:
    """Return ``good`` with ``value`` for each of its measured numbers."""
    norms = replace(good.norms, square=value, part_square=value) if good.norms else None
    times = tuple(WorkerTimes(value, value, value) for _ in good.times)
    return replace(good, loss=value, norms=norms, preconditioned=norms, times=times, sharpness=value, trace=value)


def without_measurements(good: Reading) -> Reading:
    """Return ``good`` for a step in which nothing was measured."""
    return Reading(good.step, good.batch, good.workers, loss=math.nan)


def fed(monitor: Monitor, readings: Iterable[Reading], state: State | None = None) -> State:
    """Return the state after ``readings``; signals are asked for after each, as training does."""
    state = monitor.init() if state is None else state
    for entry in readings:
        state = monitor.update(state, entry)
        assert_sound(monitor.signals(state))
    return state


def assert_sound(signals: dict[str, Signal]) -> None:
    """Check that no value or error is NaN or infinite, and no error negative."""
    for name, signal in signals.items():
        assert math.isfinite(signal.value), name
        assert signal.error is None or (math.isfinite(signal.error) and signal.error >= 0), name


class MonitorKit(ABC):
    """The tests of the contract ``elastune.adapt.monitors.base``."""

    @abstractmethod
    def make(self) -> Monitor:
        """Return the monitor, with its default options."""

    def test_says_what_it_is(self) -> None:
        monitor = self.make()
        assert monitor.name
        assert monitor.every >= 1
        assert monitor.needs <= set(get_args(Need))

    def test_has_nothing_to_say_before_the_first_reading(self) -> None:
        monitor = self.make()
        assert monitor.signals(monitor.init()) == {}

    def test_says_something_after_two_readings(self) -> None:
        monitor = self.make()
        signals = monitor.signals(fed(monitor, [reading(1), reading(2)]))
        assert signals
        assert set(signals) <= monitor.gives

    def test_state_survives_json_and_goes_on_as_it_would_have(self) -> None:
        monitor = self.make()
        state = monitor.init()
        for step in range(1, 30):
            copied = json.loads(json.dumps(state, allow_nan=False))
            assert copied == state
            state = monitor.update(state, reading(step))
            assert monitor.update(copied, reading(step)) == state
            assert monitor.signals(json.loads(json.dumps(state))) == monitor.signals(state)

    def test_update_changes_nothing_that_it_was_given(self) -> None:
        monitor = self.make()
        state = monitor.init()
        for step in range(1, 5):
            before = copy.deepcopy(state)
            after = monitor.update(state, reading(step))
            monitor.signals(after)
            assert state == before
            state = after

    def test_what_is_missing_leaves_the_state_alone(self) -> None:
        monitor = self.make()
        assert monitor.update(monitor.init(), without_measurements(reading(1))) == monitor.init()
        state = fed(monitor, map(reading, range(1, 10)))
        assert monitor.update(state, without_measurements(reading(10))) == state

    @pytest.mark.parametrize("value", RUBBISH)
    def test_what_is_not_finite_leaves_the_state_alone(self, value: float) -> None:
        monitor = self.make()
        assert monitor.update(monitor.init(), spoiled(reading(1), value)) == monitor.init()
        state = fed(monitor, map(reading, range(1, 10)))
        assert monitor.update(state, spoiled(reading(10), value)) == state

    @pytest.mark.parametrize("value", [0.0, -1.0, 1e-300, 1e300])
    def test_odd_values_never_make_it_unsound(self, value: float) -> None:
        monitor = self.make()
        odd = [spoiled(reading(step), value) for step in range(1, 10)]
        state = fed(monitor, odd)
        state = fed(monitor, map(reading, range(10, 20)), state)
        fed(monitor, odd, state)

    def test_zeros_are_forgotten(self) -> None:
        monitor = self.make()
        good = [reading(step) for step in range(1, 2001)]
        state = fed(monitor, [spoiled(reading(step), 0.0) for step in range(1, 20)])
        clean, recovered = monitor.signals(fed(monitor, good)), monitor.signals(fed(monitor, good, state))
        assert clean.keys() == recovered.keys()
        for name, signal in clean.items():
            assert recovered[name].value == pytest.approx(signal.value, rel=1e-3), name

    def test_changes_of_batch_and_workers_leave_it_talking(self) -> None:
        monitor = self.make()
        state = fed(monitor, map(reading, range(1, 10)))
        names = monitor.signals(state).keys()
        for step, (batch, workers) in enumerate([(256, 2), (256, 3), (64, 1), (4096, 4), (16, 8)] * 4, 10):
            for offset in range(3):
                state = fed(monitor, [reading(3 * step + offset, batch=batch, workers=workers)], state)
                assert monitor.signals(state).keys() >= names
