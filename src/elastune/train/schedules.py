"""Learning-rate schedulers inside a loop that passes several times through a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau


def gate(scheduler: Any, between_steps: Callable[[], bool], mean: Callable[[Any], float]) -> None:
    """Let ``scheduler.step`` act at step boundaries only; give ``ReduceLROnPlateau`` the mean metric over workers.

    The method is replaced on this one object, as torch's schedulers do with their optimizer's ``step``.
    """
    step = scheduler.step

    def gated(*args: Any, **kwargs: Any) -> None:
        if not between_steps():
            return
        if isinstance(scheduler, ReduceLROnPlateau):
            metric, *rest = args if args else (kwargs.pop("metrics"),)
            step(mean(metric), *rest, **kwargs)
        else:
            step(*args, **kwargs)

    scheduler.step = gated


def learning_rates(optimizer: torch.optim.Optimizer | None) -> list[float]:
    """The learning rate of each parameter group."""
    return [] if optimizer is None else [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
