"""Step times, throughput, stragglers and scaling efficiency."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.adapt.monitors.base import Reading, State, WorkerTimes
from elastune.adapt.monitors.performance import Performance
from elastune.core.decisions import Signal

EVEN = WorkerTimes(0.01, 0.06, 0.03)


def taken(step: int, *times: WorkerTimes, batch: int = 100) -> Reading:
    return Reading(step, batch, len(times), loss=1.0, times=times)


def after(*readings: Reading, state: State | None = None, monitor: Performance | None = None) -> State:
    monitor = monitor or Performance()
    state = state or monitor.init()
    for reading in readings:
        state = monitor.update(state, reading)
    return state


def said(state: State) -> dict[str, Signal]:
    return Performance().signals(state)


def test_the_parts_of_a_step_and_what_follows_from_them() -> None:
    other = WorkerTimes(0.03, 0.06, 0.01)
    result = said(after(*(taken(step, EVEN, other) for step in range(1, 6))))
    values = {name: signal.value for name, signal in result.items()}
    assert values == pytest.approx(
        {
            "step_s": 0.1, "data_s": 0.02, "compute_s": 0.06, "reduce_s": 0.01, "wait_s": 0.01,
            "throughput": 1000.0, "busy_share": 0.8,
        }
    )  # fmt: skip
    assert result["step_s"].error == pytest.approx(0, abs=1e-12)


def test_a_pause_leaves_the_medians_alone() -> None:
    pause = WorkerTimes(0.01, 5.0, 0.0)
    result = said(after(*(taken(step, pause if step == 5 else EVEN) for step in range(1, 10))))
    assert result["step_s"].value == pytest.approx(0.1)


def test_a_short_last_batch_leaves_the_throughput_alone() -> None:
    readings = [taken(step, EVEN, EVEN, batch=30 if step % 5 == 0 else 100) for step in range(1, 30)]
    result = said(after(*readings))
    assert result["throughput"].value == pytest.approx(1000)
    assert len(after(*readings)["window"]) > 10


def test_a_change_replaces_what_was_known_and_never_silences() -> None:
    fast = WorkerTimes(0.01, 0.03, 0.01)
    state = after(*(taken(step, EVEN, EVEN) for step in range(1, 15)))
    state = after(taken(15, EVEN, EVEN, EVEN, EVEN), state=state)  # these times are of the step before the change
    assert said(state)["step_s"].value == pytest.approx(0.1)
    state = after(taken(16, fast, fast, fast, fast), state=state)
    assert said(state)["step_s"].value == pytest.approx(0.05)
    state = after(taken(17, fast, fast, fast, fast, batch=400), state=state)
    assert said(state)["throughput"].value == pytest.approx(2000)
    state = after(taken(18, EVEN, EVEN, EVEN, EVEN, batch=400), state=state)
    assert said(state)["throughput"].value == pytest.approx(4000)


def test_rounds_that_a_pass_cuts_short_in_turns_are_measured() -> None:
    """Of 32 steps and of 18, after those of 16: the whole ones are told of, and nothing of what was before."""
    whole, cut = WorkerTimes(0.0, 3.2, 0.8), WorkerTimes(0.0, 1.8, 0.7)
    state = after(*(taken(step, EVEN, EVEN, batch=1600) for step in range(1, 9)))
    state = after(taken(9, EVEN, EVEN, batch=3200), state=state)
    assert said(state)["reduce_s"].value == pytest.approx(0.03), "of the last round of 16"
    for turn in range(8):  # each brings the times of the one before
        state = after(taken(10, whole, whole, batch=1800), taken(11, cut, cut, batch=3200), state=state)
        result = said(state)
        assert (result["reduce_s"].value, result["throughput"].value) == pytest.approx((0.8, 800)), turn
    seldom = Performance(every=10)
    state = after(taken(1, EVEN, EVEN), taken(11, EVEN, EVEN), taken(21, whole, whole, batch=50), monitor=seldom)
    assert said(state)["reduce_s"].value == pytest.approx(0.03), "of the step before nobody knows the batch"


def test_what_lasts_for_five_steps_is_no_pause() -> None:
    slow = WorkerTimes(0.01, 0.06, 0.3)
    state = after(*(taken(step, EVEN, EVEN) for step in range(30)))
    results = []
    for step in range(30, 36):
        state = after(taken(step, slow, slow), state=state)
        results.append(said(state)["reduce_s"].value)
    assert results == pytest.approx([0.03] * 4 + [0.3] * 2)
    for step in range(36, 41):
        assert said(state)["reduce_s"].value == pytest.approx(0.3)
        state = after(taken(step, EVEN, EVEN), state=state)
    assert said(state)["reduce_s"].value == pytest.approx(0.03)


def test_workers_that_know_nothing_yet_do_not_count() -> None:
    result = said(after(*(taken(step, EVEN, WorkerTimes()) for step in range(1, 4))))
    assert result["step_s"].value == pytest.approx(0.1)


def test_a_straggler_is_named_while_it_lasts() -> None:
    slow = WorkerTimes(0.02, 0.09, 0.0)
    state = after(*(taken(step, EVEN, EVEN, slow) for step in range(1, 6)))
    assert "straggler" not in said(state)  # the first reading has no neighbour: four so far
    state = after(taken(6, EVEN, EVEN, slow), state=state)
    assert said(state)["straggler"] == Signal(2.0)
    state = after(taken(7, EVEN, EVEN, EVEN), state=state)
    assert "straggler" not in said(state)


def test_one_of_two_can_be_the_straggler_and_the_slowest_is_told() -> None:
    slow, slower = WorkerTimes(0.0, 0.2, 0.0), WorkerTimes(0.0, 0.3, 0.0)
    assert said(after(*(taken(step, slow, EVEN) for step in range(9))))["straggler"] == Signal(0.0)
    crowd = (EVEN, slow, slower, EVEN, EVEN)
    assert said(after(*(taken(step, *crowd) for step in range(9))))["straggler"] == Signal(2.0)


def test_ordinary_spread_is_no_straggler_and_a_lone_worker_is_none() -> None:
    busier = WorkerTimes(0.01, 0.09, 0.0)
    assert "straggler" not in said(after(*(taken(step, EVEN, busier) for step in range(20))))
    assert "straggler" not in said(after(*(taken(step, busier) for step in range(20))))


def test_ranks_start_afresh_when_workers_change() -> None:
    slow = WorkerTimes(0.0, 0.2, 0.0)
    state = after(*(taken(step, EVEN, slow) for step in range(9)))
    state = after(taken(9, EVEN, EVEN, EVEN), state=state)
    assert "straggler" not in said(state)


@given(st.lists(st.floats(0.001, 10), min_size=2, max_size=9))
def test_slowness_is_over_the_median_of_the_others(busy: list[float]) -> None:
    state = after(*(taken(step, *(WorkerTimes(0.0, s, 0.01) for s in busy)) for step in (1, 2)))
    for rank, (_, excess) in enumerate(state["slow"]):
        assert excess == pytest.approx(busy[rank] / statistics.median(busy[:rank] + busy[rank + 1 :]))
