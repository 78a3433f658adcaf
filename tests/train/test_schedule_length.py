"""What is said of schedules that go on beyond what they were built for is what torch's schedulers do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers

from elastune.train.schedules import FREE, KEEPS, RISES, ScheduleEnd, ended_by, ends_of

S = torch_schedulers
MADE: dict[str, tuple[Callable[[Any], Any], list[ScheduleEnd]]] = {
    "OneCycleLR": (lambda o: S.OneCycleLR(o, 0.1, total_steps=8), [ScheduleEnd("OneCycleLR", 8, "")]),
    "CosineAnnealingLR": (lambda o: S.CosineAnnealingLR(o, 8), [ScheduleEnd("CosineAnnealingLR", 8, RISES)]),
    "PolynomialLR": (lambda o: S.PolynomialLR(o, 8, 2.0), [ScheduleEnd("PolynomialLR", 8, KEEPS)]),
    "LinearLR": (lambda o: S.LinearLR(o, 1.0, 0.1, 8), [ScheduleEnd("LinearLR", 8, KEEPS)]),
    "SequentialLR": (
        lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=2), S.CosineAnnealingLR(o, 6)], [2]),
        [ScheduleEnd("CosineAnnealingLR", 8, RISES)],
    ),
    "ChainedScheduler": (
        lambda o: S.ChainedScheduler([S.ExponentialLR(o, 1.0), S.CosineAnnealingLR(o, 8)], optimizer=o),
        [ScheduleEnd("CosineAnnealingLR", 8, RISES)],
    ),
    "LambdaLR": (lambda o: S.LambdaLR(o, lambda step: 1 - step / 8), [ScheduleEnd("LambdaLR", None, FREE)]),
    "StepLR": (lambda o: S.StepLR(o, 2), []),
    "CosineAnnealingWarmRestarts": (lambda o: S.CosineAnnealingWarmRestarts(o, 3), []),
    "ReduceLROnPlateau": (lambda o: S.ReduceLROnPlateau(o), []),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("ignore")
def test_what_is_said_is_what_torch_does(name: str) -> None:
    make, expected = MADE[name]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert ends_of(scheduler.state_dict()) == expected
    if not expected:
        return
    rates = [optimizer.param_groups[0]["lr"]]
    with warnings.catch_warnings():
        for _ in range(5):
            scheduler.step()
        end = optimizer.param_groups[0]["lr"]
        for _ in range(4 if expected[0].beyond else 0):
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    match expected[0].beyond:
        case "":
            with pytest.raises(ValueError, match="total number of steps is 8|total steps is 8|Tried to step 9 times"):
                scheduler.step()
        case beyond if beyond == RISES:
            assert end < rates[1] < rates[-1]
        case beyond if beyond == KEEPS:
            assert set(rates[1:]) == {end}
        case _:
            assert rates[-1] < 0, "as this function says"


@pytest.mark.parametrize(("calls", "epoch"), [(8, 2.0), (2, 2.0)], ids=["each step", "each epoch"])
def test_a_schedule_is_passed_by_a_longer_training_alone(calls: int, epoch: float) -> None:
    ends = [ScheduleEnd("CosineAnnealingLR", calls, RISES)]
    assert ended_by(ends, calls, epoch, before=2, after=2) == []
    assert ended_by(ends, calls, epoch, before=2, after=3) == ends
    assert ended_by(ends, calls, epoch, before=None, after=3) == ends
    assert ended_by(ends, 0, 0.0, before=2, after=3) == [], "nobody knows how often it steps"


def test_a_warm_up_that_ended_long_ago_is_no_news() -> None:
    ends = [ScheduleEnd("LinearLR", 5, KEEPS)]
    assert ended_by(ends, 100, 2.0, before=2, after=4) == []


def test_a_schedule_that_is_long_enough_goes_on() -> None:
    assert ended_by([ScheduleEnd("OneCycleLR", 16, "")], 8, 2.0, before=2, after=4) == []
    assert ended_by([ScheduleEnd("OneCycleLR", 16, "")], 8, 2.0, before=2, after=5) != []


def test_a_state_of_something_else_has_no_end() -> None:
    assert ends_of({"T_max": 8}) == ends_of({"_schedulers": "text"}) == ends_of({}) == []
