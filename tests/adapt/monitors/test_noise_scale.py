"""The noise scale against its exact value, from per-sample gradients; its standard error against its real spread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from elastune.adapt.monitors.base import GradientNorms, Monitor, Reading, State
from elastune.adapt.monitors.curvature import Curvature
from elastune.adapt.monitors.noise_scale import NoiseScale, PreconditionedNoiseScale
from elastune.core.decisions import Signal

STEPS = 200
Cut = Callable[[int], list[int]]  # step -> samples of each part of the global batch


@cache
def sample_gradients(features: int, hidden: int, classes: int) -> Tensor:
    """One row for each of 4,096 samples: the gradient of its cross-entropy by all parameters of a small net."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, features, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(features, classes, generator=generator, dtype=torch.float64)).argmax(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes)).double()

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, params, (x[None],)), y[None])

    params = {name: p.detach() for name, p in net.named_parameters()}
    rows = vmap(grad(loss), (None, 0, 0))(params, x, y)
    return torch.cat([row.reshape(len(x), -1) for row in rows.values()], 1)


def exact(gradients: Tensor) -> tuple[float, float]:
    """tr(Sigma) and |G|^2 of one sample drawn from the rows."""
    mean = gradients.mean(0)
    return (gradients - mean).square().sum(1).mean().item(), mean.square().sum().item()


def norms(rows: Tensor, parts: list[int]) -> GradientNorms:
    """As a step of training takes them: one squared norm a part, one of the mean over the global batch."""
    weighted = sum(len(part) / len(rows) * part.mean(0).square().sum().item() for part in rows.split(parts))
    return GradientNorms(len(rows), len(parts), weighted, rows.mean(0).square().sum().item())


def readings(gradients: Tensor, cut: Cut, seed: int, steps: int = STEPS) -> Iterator[Reading]:
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        parts = cut(step)
        index = torch.randint(len(gradients), (sum(parts),), generator=generator)
        yield Reading(step + 1, sum(parts), 1, 1.0, norms=norms(gradients[index], parts))


def told(monitor: Monitor, readings: Iterator[Reading]) -> dict[str, Signal]:
    state: State = monitor.init()
    for reading in readings:
        state = monitor.update(state, reading)
    return monitor.signals(state)


CUTS: dict[str, Cut] = {
    "2 parts": lambda step: [16, 16],
    "4 parts": lambda step: [8] * 4,
    "8 parts": lambda step: [4] * 8,
    "unequal parts": lambda step: [3, 9, 4, 16],
    "batch 32 then 128": lambda step: [4] * 8 if step < STEPS // 2 else [16] * 8,
    "batch 128 then 32": lambda step: [16] * 8 if step < STEPS // 2 else [4] * 8,
    "2 workers then 8": lambda step: [16, 16] if step < STEPS // 2 else [4] * 8,
    "4 workers, then 3, unequal": lambda step: [8] * 4 if step < STEPS // 2 else [11, 11, 10],
    "a short last batch": lambda step: [4] * 8 if step % 10 else [2, 1, 1],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_within_a_tenth_of_the_exact_value_after_200_steps(cut: Cut) -> None:
    """All of 10 seeds. The toy's noise scale is 11 samples: what 200 batches of 32 can tell to 3-5 %."""
    gradients = sample_gradients(3, 64, 20)
    trace, square = exact(gradients)
    for seed in range(10):
        signals = told(NoiseScale(), readings(gradients, cut, seed))
        assert signals["noise_scale"].value == pytest.approx(trace / square, rel=0.1), seed


def test_within_a_tenth_where_the_scale_is_larger() -> None:
    """Noise scale 39, batches of 128 in eight slots."""
    gradients = sample_gradients(8, 32, 8)
    trace, square = exact(gradients)
    for seed in range(10):
        signals = told(NoiseScale(), readings(gradients, lambda step: [16] * 8, seed))
        assert signals["noise_scale"].value == pytest.approx(trace / square, rel=0.1), seed


@pytest.mark.parametrize("cut", [CUTS["2 parts"], CUTS["unequal parts"], CUTS["batch 32 then 128"]])
def test_the_error_is_honest_on_a_net(cut: Cut) -> None:
    """Within two errors in at least 85 % of 40 seeds; each of the three signals."""
    gradients = sample_gradients(8, 32, 8)
    trace, square = exact(gradients)
    truth = {"noise_scale": trace / square, "gradient_variance": trace, "gradient_square": square}
    hits = dict.fromkeys(truth, 0)
    for seed in range(40):
        signals = told(NoiseScale(), readings(gradients, cut, seed))
        for name, value in truth.items():
            error = signals[name].error
            assert error is not None
            hits[name] += abs(signals[name].value - value) <= 2 * error
    assert all(count >= 34 for count in hits.values()), hits


@pytest.mark.parametrize("parts", [[16, 16], [4] * 8, [1, 2, 3, 26], [1] * 32])
def test_the_error_is_neither_too_small_nor_too_large_on_normal_noise(parts: list[int]) -> None:
    """Drawn from what norms of normal gradients follow: 200 seeds, and the spread over them against the error told."""
    dimension, spread, length = 40, 0.5, 2.0  # tr(Sigma) 10, |G|^2 4
    scales, batch = [], sum(parts)
    sizes = torch.tensor(parts, dtype=torch.float64)
    for seed in range(200):
        noise = torch.randn(STEPS, len(parts), dimension, generator=torch.Generator().manual_seed(seed)).double()
        part = noise * spread / sizes.sqrt()[None, :, None]
        part[..., 0] += length
        whole = (part * (sizes / batch)[None, :, None]).sum(1)
        weighted = (part.square().sum(2) * sizes / batch).sum(1)
        squares = whole.square().sum(1)
        steps = [GradientNorms(batch, len(parts), float(w), float(s)) for w, s in zip(weighted, squares, strict=True)]
        scales.append(
            told(NoiseScale(), (Reading(i, batch, 1, 1.0, norms=n) for i, n in enumerate(steps, 1)))["noise_scale"]
        )
    values = torch.tensor([s.value for s in scales])
    errors = torch.tensor([s.error or 0.0 for s in scales])
    assert values.mean().item() == pytest.approx(2.5, rel=0.01)
    assert errors.mean().item() == pytest.approx(values.std().item(), rel=0.15)
    assert ((values - 2.5).abs() <= 2 * errors).double().mean() >= 0.9


@pytest.mark.parametrize("parts", [[2, 2], [1, 2, 5], [1, 1, 1, 13]])
def test_both_estimates_are_unbiased_whatever_the_parts(parts: list[int]) -> None:
    gradients = sample_gradients(8, 32, 8)
    trace, square = exact(gradients)
    signals = told(NoiseScale(memory=1e9), readings(gradients, lambda step: parts, seed=0, steps=4000))
    for name, truth in (("gradient_variance", trace), ("gradient_square", square)):
        error = signals[name].error
        assert error is not None
        assert error < 0.1 * truth
        assert signals[name].value == pytest.approx(truth, abs=3 * error)


def test_every_way_of_cutting_a_batch_gives_the_exact_variance_on_average() -> None:
    """Over all orders of one batch: no sampling error left, so the estimate is that of the batch's own samples."""
    rows = sample_gradients(3, 64, 20)[:5]
    estimates = []
    for order in itertools.permutations(range(5)):
        monitor = NoiseScale()
        state = monitor.update(monitor.init(), Reading(1, 5, 1, 1.0, norms=norms(rows[list(order)], [1, 1, 3])))
        estimates.append(monitor.signals(state)["gradient_variance"].value)
    unbiased = (rows - rows.mean(0)).square().sum().item() / 4
    assert sum(estimates) / len(estimates) == pytest.approx(unbiased, rel=1e-9)


def test_a_change_of_batch_moves_nothing_but_the_error() -> None:
    gradients = sample_gradients(3, 64, 20)
    trace, square = exact(gradients)
    monitor = NoiseScale()
    state = monitor.init()
    for reading in readings(gradients, CUTS["8 parts"], seed=1):
        state = monitor.update(state, reading)
    before = monitor.signals(state)["noise_scale"]
    for step, reading in enumerate(readings(gradients, lambda step: [64] * 8, seed=2, steps=100)):
        state = monitor.update(state, reading)
        now = monitor.signals(state)["noise_scale"]
        assert now.error is not None
        assert abs(now.value - trace / square) <= max(3.5 * now.error, 0.1 * trace / square), step
    assert before.error is not None
    assert now.error < 0.6 * before.error


def test_pure_noise_is_bounded_and_says_so() -> None:
    """Without a true gradient the scale is infinite: what is told is finite, large and as uncertain as it is large."""
    monitor = NoiseScale()
    state, below_zero = monitor.init(), 0
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 400):
        rows = torch.randn(32, 50, generator=generator, dtype=torch.float64)
        state = monitor.update(state, Reading(step, 32, 1, 1.0, norms=norms(rows, [4] * 8)))
        signals = monitor.signals(state)
        assert signals["gradient_square"].value >= 0
        below_zero += signals["gradient_square"].value == 0
        if step >= 50:
            scale = signals["noise_scale"]
            assert scale.error is not None
            assert scale.value > 100
            assert scale.error > 0.25 * scale.value
    assert below_zero > 50


def test_no_noise_is_a_scale_of_zero_and_no_gradient_is_none() -> None:
    still = [Reading(step, 32, 1, 1.0, norms=GradientNorms(32, 8, 4.0, 4.0)) for step in range(1, 9)]
    assert told(NoiseScale(), iter(still))["noise_scale"].value == 0
    nothing = [Reading(step, 32, 1, 1.0, norms=GradientNorms(32, 8, 0.0, 0.0)) for step in range(1, 9)]
    assert "noise_scale" not in told(NoiseScale(), iter(nothing))


@pytest.mark.parametrize(("batch", "parts"), [(32, 1), (0, 0), (4, 8), (-32, 4)])
def test_norms_that_say_nothing_are_left_out(batch: int, parts: int) -> None:
    monitor = NoiseScale()
    reading = Reading(1, batch, 1, 1.0, norms=GradientNorms(batch, parts, 2.0, 1.0))
    assert monitor.update(monitor.init(), reading) == monitor.init()


def test_rounding_never_makes_a_variance_negative() -> None:
    readings_ = (Reading(step, 32, 1, 1.0, norms=GradientNorms(32, 8, 1.0 - 1e-7, 1.0)) for step in range(1, 9))
    assert told(NoiseScale(), readings_)["gradient_variance"].value == 0


def test_adams_noise_scale_is_that_of_preconditioned_gradients() -> None:
    gradients = sample_gradients(3, 64, 20)
    moment = gradients.square().mean(0)
    scaled = gradients / (moment.sqrt() + 1e-8)
    trace, square = exact(scaled)
    for seed in range(5):
        plain = readings(scaled, CUTS["8 parts"], seed)
        both = (Reading(r.step, r.batch, 1, 1.0, preconditioned=r.norms) for r in plain)
        signals = told(PreconditionedNoiseScale(), both)
        assert set(signals) == {"noise_scale_adam", "gradient_variance_adam", "gradient_square_adam"}
        assert signals["noise_scale_adam"].value == pytest.approx(trace / square, rel=0.2)


def test_the_fishers_trace_is_the_mean_squared_gradient() -> None:
    gradients = sample_gradients(3, 64, 20)
    signals = told(Curvature(memory=1e9), readings(gradients, CUTS["unequal parts"], seed=0))
    assert signals["fisher_trace"].value == pytest.approx(gradients.square().sum(1).mean().item(), rel=0.05)
