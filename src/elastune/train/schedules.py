"""Learning rates and their schedulers: scaled or set while training runs, and stepped once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # a group's learning rate, and rates that schedulers keep there
_SCHEDULER_RATES = ("base_lrs", "max_lrs", "min_lrs", "_last_lr")

# --- schedulers inside a loop that passes several times through a step ---


def gate(scheduler: Any, between_steps: Callable[[], bool], mean: Callable[[Any], float]) -> None:
    """Let ``scheduler.step`` act at step boundaries only; give ``ReduceLROnPlateau`` the mean metric over workers.

    The object gets a subclass of its own class. So ``isinstance`` still holds, and its ``state_dict`` (all of its
    attributes) stays plain data.

    Args:
        scheduler: Changed in place.
        between_steps: Whether the program's current batch ends a step.
        mean: The mean of a metric over workers.
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


# --- learning rates that change while training runs ---


@dataclass(frozen=True)
class Ramp:
    """A learning-rate factor applied linearly over ``steps`` steps, of which ``done`` are over."""

    factor: float
    steps: int
    done: int = 0
    correct_momentum: bool = False

    def next(self) -> tuple[float, Ramp | None]:
        """The factor of the next step on the present learning rate, and the rest of the ramp; None: it is over."""
        before = 1 + (self.factor - 1) * self.done / self.steps
        after = 1 + (self.factor - 1) * (self.done + 1) / self.steps
        rest = None if self.done + 1 == self.steps else replace(self, done=self.done + 1)
        return after / before, rest


def set_rates(optimizer: torch.optim.Optimizer, schedulers: Iterable[Any], lr: float) -> None:
    """Set every group's learning rate to ``lr``; schedulers go on from there in the proportion they had."""
    factors = [lr / float(group["lr"]) if float(group["lr"]) > 0 else 1.0 for group in optimizer.param_groups]
    scale_rates(optimizer, schedulers, factors)
    for group in optimizer.param_groups:
        _put(group, "lr", lr)


def scale_rates(
    optimizer: torch.optim.Optimizer,
    schedulers: Iterable[Any],
    factors: list[float],
    *,
    correct_momentum: bool = False,
) -> None:
    """Multiply the learning rate of each parameter group, and the rates its schedulers start from, by its factor.

    Args:
        factors: One for each parameter group.
        correct_momentum: Divide momentum buffers by the factor. In torch's form of SGD (velocity v <- m v + g, then
            p <- p - lr v) a larger rate at once multiplies the push of past gradients too, which were meant for the
            smaller rate (Lin et al. 2019, "Dynamic Mini-batch SGD for Elastic Distributed Training").
    """
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        for name in _GROUP_RATES:
            if name in group:
                _put(group, name, float(group[name]) * factor)
        if correct_momentum and factor > 0:
            for p in group["params"]:
                buffer = optimizer.state.get(p, {}).get("momentum_buffer")
                if buffer is not None:
                    buffer.div_(factor)
    for scheduler in _all(schedulers):
        for name in _SCHEDULER_RATES:
            rates = getattr(scheduler, name, None)
            if isinstance(rates, list) and len(rates) == len(factors):
                setattr(scheduler, name, [rate * factor for rate, factor in zip(rates, factors, strict=True)])


def _put(group: dict[str, Any], name: str, value: float) -> None:
    if isinstance(group[name], torch.Tensor):  # a capturable optimizer keeps its rate on the device
        group[name].fill_(value)
    else:
        group[name] = value


def _all(schedulers: Iterable[Any]) -> Iterable[Any]:
    """``schedulers``, and the schedulers that they are made of."""
    for scheduler in schedulers:
        yield scheduler
        yield from _all(getattr(scheduler, "_schedulers", ()))
