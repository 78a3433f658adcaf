"""Why a change of the batch under momentum is ramped, or the momentum corrected (Lin et al., "Dynamic Mini-batch SGD
for Elastic Distributed Training", 2019).

The buffer of SGD's momentum holds the noise of small batches. A learning rate that is raised with the batch multiplies
that noise at once, while the large batches that would bear it come one by one. Plain PyTorch, on a noisy quadratic.
"""

from functools import cache

import pytest
import torch

SEEDS = range(8)
DIM, MOMENTUM, LR = 400, 0.9, 0.02
SMALL, LARGE = 8, 64
BEFORE, AFTER = 400, 100


@cache
def train(how, seed):
    """Losses of SGD on 0.5 x'Hx whose batch grows eightfold after ``BEFORE`` steps, the learning rate linearly with it.

    A gradient on b samples has noise of covariance H / b, as near the minimum of a likelihood. Under the linear rule
    the loss that the noise sustains is about the same before and after.
    """
    noise = torch.Generator().manual_seed(seed)
    curvature = torch.logspace(-2, 0, DIM, dtype=torch.float64)
    x = torch.nn.Parameter(torch.zeros(DIM, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=LR, momentum=MOMENTUM)
    ratio, ramp_steps, losses = LARGE / SMALL, 30, []
    for step in range(BEFORE + AFTER):
        if step == BEFORE and how != "ramped":
            optimizer.param_groups[0]["lr"] = LR * ratio
        if step == BEFORE and how == "corrected":
            optimizer.state[x]["momentum_buffer"] /= ratio
        if step >= BEFORE and how == "ramped":
            part = min(1.0, (step - BEFORE + 1) / ramp_steps)
            optimizer.param_groups[0]["lr"] = LR * (1 + (ratio - 1) * part)
        batch = SMALL if step < BEFORE else LARGE
        draw = torch.randn(DIM, generator=noise, dtype=torch.float64)
        x.grad = curvature * x.detach() + draw * (curvature / batch).sqrt()
        optimizer.step()
        losses.append(float((curvature * x.detach() ** 2).sum() / 2))
    return torch.tensor(losses)


def spike(losses):
    """The highest loss after the change over the mean before."""
    return float(losses[BEFORE:].max() / losses[BEFORE - 100 : BEFORE].mean())


def test_at_once_the_loss_spikes():
    assert min(spike(train("at once", seed)) for seed in SEEDS) > 2.5


@pytest.mark.parametrize("how", ["corrected", "ramped"])
def test_corrected_or_ramped_it_does_not(how):
    assert max(spike(train(how, seed)) for seed in SEEDS) < 1.8


@pytest.mark.parametrize("how", ["corrected", "ramped"])
def test_neither_loses_what_the_change_is_for(how):
    """Once the buffer has forgotten, all train alike."""
    for seed in SEEDS:
        there, at_once = train(how, seed), train("at once", seed)
        assert there[-30:].mean() < 1.1 * at_once[-30:].mean()
