"""What is learned of a machine from few steps, against machines whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from elastune.core.plan.step_model import fit_machine, prior_model, probe
from elastune.core.plan.step_time import CONSTANTS, Constant, Floats, StepSplits, StepWork, seconds, transformer

TRUTH = {
    "flop_s": 1 / 150e12,
    "edge_flop_s": 1 / 100e12,
    "split_byte_s": 1 / 1e12,
    "whole_byte_s": 1e-11,
    "launch_s": 1e-3,
    "tensor_begin_s": 1e-5,
    "tensor_sum_s": 1e-5,
    "tensor_byte_s": 4e-12,
    "send_s": 2e-5,
    "send_byte_s": 4e-12,
    "gradient_hop_s": 1e-5,
    "gradient_byte_s": 8e-12,
    "across_hop_s": 1e-4,
    "across_byte_s": 1e-10,
    "update_byte_s": 1e-11,
    "pass_s": 2e-3,
    "fixed_s": 5e-3,
}
PRIOR = [Constant(name, value * (1.7 if i % 2 else 0.6), 2.0) for i, (name, value) in enumerate(TRUTH.items())]


def plans() -> StepSplits:
    rows = [
        (batch, micro, data, 1, tensor, stages, 8)
        for batch in (16, 64)
        for micro in (1, 4)
        for data in (1, 2, 4)
        for tensor in (1, 2, 4)
        for stages in (1, 2)
        if data * micro <= batch
    ]
    return StepSplits(*np.array(rows, float).T)


def gpt() -> StepWork:
    return transformer(np.float64(1024), np.float64(12), np.float64(16), np.float64(1024), 51_200)


def times(seed: int, error: float = 0.02) -> Floats:
    clean = seconds(np.array([TRUTH[name] for name in CONSTANTS]), gpt(), plans())
    return clean * np.exp(error * np.random.default_rng(seed).normal(size=len(clean)))


def test_twelve_chosen_steps_tell_the_time_of_all_plans() -> None:
    truth = times(0)
    model, chosen = probe(PRIOR, gpt(), plans(), 12, lambda i: float(truth[i]), 0.02)
    assert len(set(chosen)) == 12
    told = model.estimate(gpt(), plans()).step_s
    assert np.mean(np.abs(told / times(0, 0.0) - 1)) < 0.04
    before = prior_model(PRIOR, gpt(), plans(), 0.02).estimate(gpt(), plans()).step_s
    assert np.mean(np.abs(before / times(0, 0.0) - 1)) > 0.1


def test_intervals_hold_about_as_often_as_they_say() -> None:
    inside = []
    for seed in range(3):
        truth = times(seed, 0.04)
        model, _ = probe(PRIOR, gpt(), plans(), 12, lambda i, truth=truth: float(truth[i]), 0.04)
        told = model.estimate(gpt(), plans())
        inside.append(np.mean((told.low_s <= truth) & (truth <= told.high_s)))
    assert 0.7 < np.mean(inside) < 0.97


def test_no_time_is_asked_for_that_was_not_chosen_and_none_twice() -> None:
    asked: list[int] = []

    def measure(i: int) -> float:
        asked.append(i)
        return float(times(1)[i])

    _, chosen = probe(PRIOR, gpt(), plans(), 5, measure, 0.02)
    assert asked == list(chosen)
    assert len(set(asked)) == 5


def test_what_was_measured_is_told_as_measured_within_its_noise() -> None:
    index = np.arange(0, len(plans()), 5)
    truth = times(2)
    model = fit_machine(PRIOR, gpt(), plans().take(index), truth[index], 0.02)
    told = model.estimate(gpt(), plans().take(index))
    assert np.all(np.abs(np.log(told.step_s / truth[index])) < 0.12)
    far = StepSplits(*(np.array([x], float) for x in (4096, 8, 64, 1, 8, 8, 8)))
    wide, near = model.estimate(gpt(), far), told
    assert wide.high_s[0] / wide.low_s[0] > np.max(near.high_s / near.low_s)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_a_time_that_is_none_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive number of seconds"):
        fit_machine(PRIOR, gpt(), plans().take(slice(0, 1)), np.array([bad]), 0.02)


def test_more_probes_than_plans_measure_every_plan_once() -> None:
    few = plans().take(slice(0, 3))
    _, chosen = probe(PRIOR, gpt(), few, 9, lambda i: float(times(0)[i]), 0.02)
    assert sorted(chosen) == [0, 1, 2]
