"""Learning-rate schedulers inside a loop that passes several times through a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau


def gate(scheduler: Any, between_steps: Callable[[], bool], mean: Callable[[Any], float]) -> None:
    """Let ``scheduler.step`` act at step boundaries only; give ``ReduceLROnPlateau`` the mean metric over workers.

    The object gets a subclass of its own class: it stays what it was, and its ``state_dict`` (all of its attributes)
    stays plain data.
    """
    kind = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if not between_steps():
            return
        if isinstance(self, ReduceLROnPlateau):
            metric, *rest = args if args else (kwargs.pop("metrics"),)
            kind.step(self, mean(metric), *rest, **kwargs)
        else:
            kind.step(self, *args, **kwargs)

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step})


def learning_rates(optimizer: torch.optim.Optimizer | None) -> list[float]:
    """The learning rate of each parameter group."""
    return [] if optimizer is None else [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
