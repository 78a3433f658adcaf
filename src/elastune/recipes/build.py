"""Make the optimizer, scheduler and network that a plain configuration names.

Every value is used or refused: a value that the chosen optimizer or scheduler does not use must be None, so that no
setting is tuned in vain. The objects keep plain data only, so they can be saved and continue exactly. Schedulers count
calls of their ``step``: in a program that calls it once an epoch they count epochs.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from elastune.core.errors import UserError
from elastune.core.plan.batch_size import scaled_lr
from elastune.recipes.settings import (
    ACTIVATIONS,
    COUNT,
    FAMILIES,
    LR_FACTOR,
    OPTIMIZERS,
    SCHEDULERS,
    USUAL,
    USUAL_START,
    choice,
    number,
    scheduler_defaults,
)

# --- learning rates as functions of time ---
# LambdaLR multiplies the first rate by the value, MultiplicativeLR the last rate. The functions are objects, because
# torch saves the numbers of an object.


@dataclass(frozen=True)
class InverseTime:
    """1 / (1 + decay t)."""

    decay: float

    def __call__(self, t: int) -> float:
        return 1 / (1 + self.decay * t)


@dataclass(frozen=True)
class InverseTimeRatio:
    """The factor from ``InverseTime`` at t - 1 to that at t."""

    decay: float

    def __call__(self, t: int) -> float:
        return (1 + self.decay * (t - 1)) / (1 + self.decay * t)


@dataclass(frozen=True)
class Polynomial:
    """(1 - t / total)^power, and 0 from there on."""

    power: float
    total: int

    def __call__(self, t: int) -> float:
        return float(max(0.0, 1 - t / self.total) ** self.power)


@dataclass(frozen=True)
class StepDecay:
    """gamma^floor(t / step_size)."""

    gamma: float
    step_size: int

    def __call__(self, t: int) -> float:
        return float(self.gamma ** (t // self.step_size))


@dataclass(frozen=True)
class StepDrop:
    """gamma at each step_size-th t, else 1: the factor from ``StepDecay`` at t - 1 to that at t."""

    gamma: float
    step_size: int

    def __call__(self, t: int) -> float:
        return self.gamma if t % self.step_size == 0 else 1.0


@dataclass(frozen=True)
class Geometric:
    """gamma at each t."""

    gamma: float

    def __call__(self, t: int) -> float:
        return self.gamma


@dataclass(frozen=True)
class Cosine:
    """From 1 to final_factor along half a cosine over ``total``, then flat (Loshchilov & Hutter 2017, equation 5).

    A factor, unlike torch's ``eta_min``: every group falls in proportion, also when rates are scaled while training.
    """

    final_factor: float
    total: int

    def __call__(self, t: int) -> float:
        fallen = (1 + math.cos(math.pi * min(t, self.total) / self.total)) / 2
        return self.final_factor + (1 - self.final_factor) * fallen


# --- optimizers ---

_ACTIVATIONS: Mapping[str, type[nn.Module]] = MappingProxyType(
    {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "silu": nn.SiLU, "elu": nn.ELU, "leaky_relu": nn.LeakyReLU}
)


def make_optimizer(
    config: Mapping[str, Any], model: nn.Module, groups: Mapping[str, str] = MappingProxyType({})
) -> torch.optim.Optimizer:
    """Build the optimizer that ``config`` describes.

    Where ``lr_rule`` is "linear" or "sqrt", ``lr`` is the learning rate for a global batch of ``base_batch`` samples,
    and follows ``batch_size``.

    Args:
        config: The program's settings; ``optimizer_defaults`` names those that are read here.
        model: Its trainable parameters are optimized.
        groups: Name -> regular expression over the names of ``model``'s parameters (``re.search``; the first that fits
            counts). The learning rate of such a group is ``lr`` times the setting ``lr_factor_<name>``.

    Returns:
        ``torch.optim.SGD``, ``Adam`` or ``AdamW``, with one parameter group for each of ``groups`` and one for the
        rest.

    Raises:
        UserError: For values that are out of range or without effect, and for a group without parameters.

    Example:
        >>> optimizer = elastune.make_optimizer(session.config, model, groups={"head": "^head"})
    """
    kind = choice("optimizer", config.get("optimizer"), OPTIMIZERS)
    used = OPTIMIZERS[kind]
    _refuse_idle(config, kind, {"momentum", "betas"} - set(used))
    options: dict[str, Any] = {"lr": _rate(config)}
    if config.get("weight_decay") is not None:
        options["weight_decay"] = number("weight_decay", config["weight_decay"])
    if "momentum" in used and config.get("momentum") is not None:
        options["momentum"] = number("momentum", config["momentum"])
    if "betas" in used and config.get("betas") is not None:
        options["betas"] = _betas(config["betas"])
    parts = _groups(config, model, groups, options["lr"])
    made: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    optimizer: torch.optim.Optimizer = made[kind](parts, **options)
    return optimizer


def _rate(config: Mapping[str, Any]) -> float:
    """The learning rate at this batch."""
    lr = float(number("lr", config.get("lr")))
    rule = config.get("lr_rule") or "none"
    if rule == "none":
        _refuse_idle(config, "the learning-rate rule none", {"base_batch"})
        return lr
    batch, base = (int(number(name, config.get(name))) for name in ("batch_size", "base_batch"))
    return scaled_lr(lr, batch, base, rule)


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise UserError("betas must be a pair of numbers", repr(value), "such as [0.9, 0.999]")
    return float(number("beta1", value[0])), float(number("beta2", value[1]))


def _groups(config: Mapping[str, Any], model: nn.Module, groups: Mapping[str, str], lr: float) -> list[dict[str, Any]]:
    """Parameter groups by name; parameters that no pattern matches come first."""
    factor_names = {f"{LR_FACTOR}{name}" for name in groups}
    stray = {name for name in config if name.startswith(LR_FACTOR)} - factor_names
    if stray:
        fix = "give make_optimizer groups={'head': 'a pattern of names'}"
        raise UserError("a group's learning-rate factor needs its group", ", ".join(sorted(stray)), fix)
    members: dict[str, list[nn.Parameter]] = {"": [], **{name: [] for name in groups}}
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            fitting = (name for name, pattern in groups.items() if _fits(pattern, path))
            members[next(fitting, "")].append(parameter)
    for name in groups:
        if not members[name]:
            fix = f"its names: {', '.join(path for path, _ in model.named_parameters())}"
            raise UserError("a group must name parameters of the model", f"{name}={groups[name]}", fix)
    param_groups = []
    for name, parameters in members.items():
        factor = config.get(f"{LR_FACTOR}{name}") if name else None
        rate = lr if factor is None else lr * number("lr_factor", factor)
        if parameters:
            param_groups.append({"params": parameters, "lr": rate, "name": name})
    return param_groups


def _fits(pattern: str, path: str) -> bool:
    try:
        return re.search(pattern, path) is not None
    except re.error as error:
        raise UserError("a group must be a regular expression", f"{pattern}: {error}", "such as ^head") from None


# --- schedulers ---


class _Multiplicative(lr_scheduler.MultiplicativeLR):
    """At its beginning the rate is the group's own: torch's would multiply what a warm-up before it had left."""

    def get_lr(self) -> Any:
        return list(self.base_lrs) if self.last_epoch == 0 else super().get_lr()


def make_scheduler(
    config: Mapping[str, Any], optimizer: torch.optim.Optimizer, *, epochs: int, mode: str = "min"
) -> Any:
    """Build the learning-rate scheduler that ``config`` describes, after a linear warm-up if it asks for one.

    Args:
        config: The program's settings; ``scheduler_defaults`` names those that are read here.
        optimizer: The optimizer to schedule.
        epochs: How many times ``step`` will be called.
        mode: "min" or "max": the better direction of the metric that ``step_scheduler`` gives a plateau scheduler.

    Returns:
        A scheduler of ``torch.optim.lr_scheduler``; its counts begin after the warm-up.

    Raises:
        UserError: For values that are out of range or without effect.

    Example:
        >>> scheduler = elastune.make_scheduler(session.config, optimizer, epochs=10)
    """
    if epochs not in COUNT:
        raise UserError("a schedule lasts a whole number of epochs, at least 1", epochs, "make_scheduler(epochs=10)")
    kind = choice("scheduler", config.get("scheduler"), SCHEDULERS)
    settings = _settings(config, kind)
    warmup = int(number("warmup", config.get("warmup") or 0))
    start = number("warmup_start", _or(config.get("warmup_start"), USUAL_START))
    if not warmup:
        _refuse_idle(config, "no warm-up", {"warmup_start"})
    elif kind == "plateau":
        raise UserError("plateau takes no warm-up", warmup, "leave warmup out, use --policy warmup:epochs=1")
    if warmup >= epochs:
        raise UserError(f"a warm-up must be shorter than the {epochs} epochs", warmup, "shorten it")
    if not warmup:
        return _scheduler(kind, settings, optimizer, epochs, mode)
    ramp = lr_scheduler.LinearLR(optimizer, float(start), total_iters=warmup)
    main = _scheduler(kind, settings, optimizer, epochs - warmup, mode)
    return lr_scheduler.SequentialLR(optimizer, [ramp, main], [warmup])


def step_scheduler(scheduler: Any, metric: float | torch.Tensor) -> None:
    """Step a scheduler of any kind.

    Args:
        scheduler: A scheduler from ``make_scheduler``, or any of torch's.
        metric: Passed to ``ReduceLROnPlateau``; the others need none.

    Example:
        >>> elastune.step_scheduler(scheduler, session.metrics["loss"])
    """
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(metric)
    else:
        scheduler.step()


def _settings(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The checked settings of scheduler ``kind``; all others must be None."""
    names = set(SCHEDULERS[kind])
    settings: dict[str, Any] = {}
    if "lr_family" in names:
        settings["lr_family"] = choice(f"lr_family of {kind}", config.get("lr_family"), FAMILIES[kind])
        names |= set(FAMILIES[kind][settings["lr_family"]])
    of_all = set(scheduler_defaults()) - {"scheduler", "warmup", "warmup_start"}
    what = " ".join([kind, *settings.values()])
    _refuse_idle(config, what, of_all - names)
    for name in sorted(names - {"lr_family"}):
        value = _or(config.get(name), USUAL.get(name))
        if value is None:
            raise UserError(f"{what} needs {name}", "nothing", f"set {name}")
        settings[name] = value if name == "milestones" else number(name, value)
    return settings


def _scheduler(kind: str, s: Mapping[str, Any], optimizer: torch.optim.Optimizer, epochs: int, mode: str) -> Any:
    match kind, s.get("lr_family"):
        case "constant", _:
            return lr_scheduler.ConstantLR(optimizer, 1.0, 0)
        case "lambda", "inverse_time":
            return lr_scheduler.LambdaLR(optimizer, InverseTime(s["decay"]))
        case "lambda", "polynomial":
            return lr_scheduler.LambdaLR(optimizer, Polynomial(s["power"], epochs))
        case "lambda", "step_decay":
            return lr_scheduler.LambdaLR(optimizer, StepDecay(s["gamma"], s["step_size"]))
        case "multiplicative", "geometric":
            return _Multiplicative(optimizer, Geometric(s["gamma"]))
        case "multiplicative", "inverse_time":
            return _Multiplicative(optimizer, InverseTimeRatio(s["decay"]))
        case "multiplicative", "step_decay":
            return _Multiplicative(optimizer, StepDrop(s["gamma"], s["step_size"]))
        case "step", _:
            return lr_scheduler.StepLR(optimizer, s["step_size"], s["gamma"])
        case "multistep", _:
            return lr_scheduler.MultiStepLR(optimizer, _milestones(s["milestones"], epochs), s["gamma"])
        case "exponential", _:
            return lr_scheduler.ExponentialLR(optimizer, s["gamma"])
        case "cosine", _:
            return lr_scheduler.LambdaLR(optimizer, Cosine(s["final_factor"], epochs))
    direction: Any = choice("mode of plateau", mode, ("min", "max"))
    return lr_scheduler.ReduceLROnPlateau(
        optimizer, direction, factor=s["plateau_factor"], patience=s["plateau_patience"]
    )


def _milestones(value: Any, epochs: int) -> list[int]:
    if not isinstance(value, (list, tuple)) or not value:
        raise UserError("milestones must be a list of epochs", repr(value), "such as [3, 6]")
    milestones = [int(number("milestone", at)) for at in value]
    if milestones != sorted(set(milestones)):
        raise UserError("milestones must ascend", value, "sort them, each once")
    if milestones[-1] >= epochs:
        raise UserError(f"milestones must be below the {epochs} epochs of the schedule", value, "leave it out")
    return milestones


# --- networks ---


def make_network(config: Mapping[str, Any], inputs: int, outputs: int) -> nn.Sequential:
    """Build fully connected layers of ``widths``, each followed by ``activation`` and ``dropout``.

    Args:
        config: The program's settings; ``network_defaults`` names those that are read here.
        inputs: Numbers in one sample, of any shape.
        outputs: Numbers that the network returns for one sample.

    Returns:
        A network from (n, ...) to (n, outputs). Its layers are called ``hidden_0`` ... and ``head``; the patterns of
        parameter groups can use these names.

    Raises:
        UserError: For values that are out of range.

    Example:
        >>> model = elastune.make_network({"widths": [64], "activation": "relu", "dropout": 0.1}, inputs=64, outputs=10)
    """
    widths = config.get("widths")
    if not isinstance(widths, (list, tuple)):
        raise UserError("widths must be a list of whole numbers", repr(widths), "such as [64, 32]")
    activation = _ACTIVATIONS[choice("activation", config.get("activation"), ACTIVATIONS)]
    dropout = number("dropout", _or(config.get("dropout"), 0.0))
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    for i, width in enumerate(widths):
        layers[f"hidden_{i}"] = nn.Linear(inputs, int(number("width", width)))
        layers[f"activation_{i}"] = activation()
        if dropout:
            layers[f"dropout_{i}"] = nn.Dropout(dropout)
        inputs = width
    layers["head"] = nn.Linear(inputs, outputs)
    return nn.Sequential(OrderedDict(layers))


def _refuse_idle(config: Mapping[str, Any], what: str, names: Iterable[str]) -> None:
    idle = sorted(name for name in names if config.get(name) is not None)
    if idle:
        raise UserError(f"{what} has no use for {idle[0]}", config[idle[0]], f"set {idle[0]} to None")


def _or(value: Any, usual: Any) -> Any:
    return usual if value is None else value
