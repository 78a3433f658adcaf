"""The settings that ``recipes.build`` reads: names, ranges, and default values for the ``config`` of a program.

All are plain values. None means "not set": the chosen optimizer or scheduler does not use the setting, or keeps its
default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from elastune.core.errors import UserError
from elastune.core.options import Option, Range
from elastune.core.run import Config
from elastune.core.sync_plan import REAL, WHOLE

LR_FACTOR = "lr_factor_"  # and the name of a group of parameters
_POSITIVE, _NOT_NEGATIVE = Option(float, Range(0, open_low=True)), Option(float, Range(0))
_RATIO, _SHARE = Option(float, Range(0, 1, open_low=True)), Option(float, Range(0, 1, open_high=True))
COUNT, _COUNT_OR_0 = Option(int, Range(1)), Option(int, Range(0))
RANGES: Mapping[str, Option] = MappingProxyType(
    {
        "lr": _POSITIVE,
        "lr_factor": _NOT_NEGATIVE,
        "momentum": _SHARE,
        "beta1": _SHARE,
        "beta2": _SHARE,
        "weight_decay": _NOT_NEGATIVE,
        "batch_size": COUNT,
        "base_batch": COUNT,
        "gamma": _RATIO,
        "step_size": COUNT,
        "milestone": COUNT,
        "decay": _NOT_NEGATIVE,
        "power": _POSITIVE,
        "plateau_factor": Option(float, Range(0, 1, open_low=True, open_high=True)),
        "plateau_patience": _COUNT_OR_0,
        "final_factor": Option(float, Range(0, 1)),
        "warmup": _COUNT_OR_0,
        "warmup_start": _RATIO,
        "layers": _COUNT_OR_0,
        "width": COUNT,
        "dropout": _SHARE,
        "workers": COUNT,
        **{name: Option(int, Range(low, high)) for name, (low, high) in WHOLE.items()},
        **{name: Option(float, Range(low, high)) for name, (low, high) in REAL.items()},
    }
)
OPTIMIZERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"sgd": ("momentum",), "adam": ("betas",), "adamw": ("betas",)}
)
"""Optimizer -> the settings that it has beside learning rate and weight decay."""
LAMBDA_FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"inverse_time": ("decay",), "polynomial": ("power",), "step_decay": ("gamma", "step_size")}
)
MULTIPLICATIVE_FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"geometric": ("gamma",), "inverse_time": ("decay",), "step_decay": ("gamma", "step_size")}
)
FAMILIES = MappingProxyType({"lambda": LAMBDA_FAMILIES, "multiplicative": MULTIPLICATIVE_FAMILIES})
SCHEDULERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "constant": (),
        "lambda": ("lr_family",),
        "multiplicative": ("lr_family",),
        "step": ("gamma", "step_size"),
        "multistep": ("gamma", "milestones"),
        "exponential": ("gamma",),
        "plateau": ("plateau_factor", "plateau_patience"),
        "cosine": ("final_factor",),
    }
)
"""Scheduler -> its settings; those of a family come on top. All but plateau take a warm-up too."""
USUAL = {"power": 1.0, "gamma": 0.1, "final_factor": 0.0, "plateau_factor": 0.1, "plateau_patience": 10}
USUAL_START = 0.1  # of a warm-up, as a part of the learning rate
ACTIVATIONS = ("relu", "gelu", "tanh", "silu", "elu", "leaky_relu")


def optimizer_defaults(groups: Iterable[str] = ()) -> Config:
    """Return the settings that ``make_optimizer`` reads, with default values, for a program's ``config``.

    Args:
        groups: Names of parameter groups; each has a factor on the learning rate.

    Returns:
        The default values. None leaves a value to torch, and a group's learning rate as it is.

    Example:
        >>> config = {**elastune.optimizer_defaults(), **elastune.batch_defaults(), "epochs": 10}
    """
    plain: Config = {"optimizer": "sgd", "lr": 0.1, "momentum": None, "betas": None, "weight_decay": None}
    return plain | {f"{LR_FACTOR}{group}": None for group in groups}


def scheduler_defaults() -> Config:
    """Return the settings that ``make_scheduler`` reads, with default values, for a program's ``config``.

    Returns:
        The default values: a constant rate, without warm-up.

    Example:
        >>> config = {**elastune.optimizer_defaults(), **elastune.scheduler_defaults()}
    """
    names = ("lr_family", "gamma", "step_size", "milestones", "decay", "power", "plateau_factor", "plateau_patience")
    return {"scheduler": "constant", **dict.fromkeys((*names, "final_factor", "warmup", "warmup_start"))}


def network_defaults() -> Config:
    """Return the settings that ``make_network`` reads, with default values, for a program's ``config``.

    Returns:
        The default values: one hidden layer of 64.

    Example:
        >>> config = {**elastune.network_defaults(), **elastune.optimizer_defaults()}
    """
    return {"widths": [64], "activation": "relu", "dropout": 0.0}


def batch_defaults() -> Config:
    """Return the settings of the global batch size and of how the learning rate follows it, for a ``config``.

    ``make_optimizer`` reads them.

    Returns:
        The default values: 64 samples, no rule.

    Example:
        >>> config = {**elastune.batch_defaults(), "lr": 0.1}
    """
    return {"batch_size": 64, "base_batch": None, "lr_rule": "none"}


def number(name: str, value: Any) -> float | int:
    """Return ``value`` if the setting ``name`` may have it. Raises ``UserError``."""
    allowed = RANGES[name]
    if value not in allowed:
        raise UserError(f"{name} must be {allowed}", repr(value), "give another")
    result: float | int = value
    return result


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``allowed``. Raises ``UserError``."""
    names = tuple(allowed)
    if not isinstance(value, str) or value not in names:
        raise UserError(f"{name} must be known", repr(value), f"use one of {', '.join(names)}")
    return value
