"""Learning rates change for optimizer and schedulers alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from elastune.train.schedules import Ramp, scale_rates, set_rates

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: schedules.StepLR(o, 3, 0.5),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.95),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 12),
    "linear": lambda o: schedules.LinearLR(o, 0.1, total_iters=6),
    "one cycle": lambda o: schedules.OneCycleLR(o, [0.4, 0.2], total_steps=12),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=4), schedules.CosineAnnealingLR(o, 8)], [4]
    ),
}


def made() -> torch.optim.SGD:
    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    return torch.optim.SGD([{"params": [a], "lr": 0.4}, {"params": [b], "lr": 0.1}], momentum=0.9)


def rates(kind: str, factor: float | None, at: int) -> list[list[float]]:
    optimizer = made()
    scheduler = SCHEDULES[kind](optimizer)
    seen = []
    for step in range(11):
        if factor is not None and step == at:
            scale_rates(optimizer, [scheduler], [factor, factor])
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_a_schedule_goes_on_in_proportion(kind: str) -> None:
    plain, scaled = rates(kind, None, 0), rates(kind, 2.0, 5)
    assert scaled[:5] == plain[:5]
    for before, after in zip(plain[5:], scaled[5:], strict=True):
        assert after == pytest.approx([2 * rate for rate in before])


def test_a_rate_is_set_for_every_group() -> None:
    optimizer = made()
    scheduler = schedules.StepLR(optimizer, 1, 0.5)
    set_rates(optimizer, [scheduler], 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2]
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.1])
    set_rates(optimizer, [scheduler], 0.0)
    set_rates(optimizer, [scheduler], 0.3)  # from nothing there is no proportion
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.3]


def test_momentum_corrected_the_next_move_is_as_far_as_it_would_have_been() -> None:
    moves = []
    for factor in (1.0, 4.0):
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        p.grad = torch.ones(2)
        optimizer.step()
        scale_rates(optimizer, [], [factor], correct_momentum=True)
        p.grad = torch.zeros(2)
        before = p.detach().clone()
        optimizer.step()
        moves.append(p.detach() - before)
    torch.testing.assert_close(moves[0], moves[1])


@pytest.mark.parametrize("factor", [8.0, 0.25])
def test_a_ramp_ends_where_one_jump_would(factor: float) -> None:
    ramp: Ramp | None = Ramp(factor, 7)
    total, parts = 1.0, []
    while ramp is not None:
        part, ramp = ramp.next()
        total *= part
        parts.append(total)
    assert len(parts) == 7
    assert parts[-1] == pytest.approx(factor)
    assert parts == sorted(parts, reverse=factor < 1)
    steps = [b - a for a, b in zip([1.0, *parts], parts, strict=False)]
    assert steps == pytest.approx([steps[0]] * 7)
