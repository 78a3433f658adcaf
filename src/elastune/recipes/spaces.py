"""Ready parts of a space: what is worth choosing about optimizer, schedule, network, batch and means.

Each part asks ``trial`` only for what applies (momentum of SGD alone, milestones of MultiStepLR alone) and returns a
value for every setting that ``recipes.build`` reads, None where it does not apply, so that no default of the program
slips in. A range is (low, high); a number in its place is fixed and not searched. All ranges are checked at every call,
those that do not apply too. Everything wrong raises ``UserError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from elastune.core.errors import UserError
from elastune.core.options import split
from elastune.core.run import Mode
from elastune.mechanisms.registry import MECHANISMS
from elastune.plan.scaling import LR_RULES
from elastune.recipes.settings import (
    ACTIVATIONS,
    FAMILIES,
    LR_FACTOR,
    OPTIMIZERS,
    SCHEDULERS,
    choice,
    number,
    optimizer_defaults,
    scheduler_defaults,
)

Bounds = float | tuple[float, float]
WholeBounds = int | tuple[int, int]
MODES: tuple[Mode, ...] = ("exact", "fast")


def suggest_optimizer(
    trial: Any,
    *,
    kinds: Sequence[str] = ("sgd", "adam", "adamw"),
    lr: Bounds | Mapping[str, Bounds] = (1e-4, 1e-1),
    momentum: Bounds = (0.0, 0.99),
    weight_decay: Bounds = (1e-6, 1e-2),
    beta1: Bounds = (0.8, 0.99),
    beta2: Bounds = (0.9, 0.9999),
    groups: Iterable[str] = (),
    lr_factor: Bounds = (0.1, 10.0),
) -> dict[str, Any]:
    """Optimizer, learning rate, weight decay, and its own settings. Rates are on a log scale where they end above 0.

    ``lr``: one range, or one for each of ``kinds``: {"sgd": (1e-3, 1), "adam": (1e-5, 1e-2)}; their parameters are then
    called "sgd_lr", "adam_lr". ``groups``: names of parameter groups, each with a factor on the learning rate.
    """
    _check(momentum=momentum, weight_decay=weight_decay, beta1=beta1, beta2=beta2, lr_factor=lr_factor)
    for bounds in lr.values() if isinstance(lr, Mapping) else (lr,):
        _check(lr=bounds)
    found: dict[str, Any] = dict(optimizer_defaults(groups))
    kind = found["optimizer"] = _choose(trial, "optimizer", kinds, OPTIMIZERS)
    if isinstance(lr, Mapping):
        if kind not in lr:
            raise UserError("each optimizer needs its range of learning rates", kind, f"add {kind!r}: (low, high)")
        found["lr"] = _float(trial, f"{kind}_lr", lr[kind], limit="lr", log=True)
    else:
        found["lr"] = _float(trial, "lr", lr, log=True)
    found["weight_decay"] = _float(trial, "weight_decay", weight_decay, log=True)
    if "momentum" in OPTIMIZERS[kind]:
        found["momentum"] = _float(trial, "momentum", momentum)
    if "betas" in OPTIMIZERS[kind]:
        found["betas"] = [_float(trial, "beta1", beta1), _float(trial, "beta2", beta2)]
    for name in found:
        if name.startswith(LR_FACTOR):
            found[name] = _float(trial, name, lr_factor, limit="lr_factor", log=True)
    return found


def suggest_scheduler(
    trial: Any,
    *,
    epochs: int,
    kinds: Sequence[str] = tuple(SCHEDULERS),
    families: Mapping[str, Sequence[str]] = MappingProxyType({}),
    gamma: Bounds = (0.1, 0.99),
    step_size: WholeBounds | None = None,
    milestones: int | None = None,
    decay: Bounds = (1e-3, 1.0),
    power: Bounds = (0.5, 3.0),
    plateau_factor: Bounds = (0.1, 0.9),
    plateau_patience: WholeBounds = (0, 10),
    final_factor: Bounds = (0.0, 0.1),
    warmup: WholeBounds = 0,
    warmup_start: Bounds = 0.1,
) -> dict[str, Any]:
    """A schedule of ``epochs`` steps of the scheduler: its kind, and what that kind has to be told.

    ``families``: of "lambda" and "multiplicative", all if not given. ``step_size``: from 1 to ``epochs`` if None.
    ``milestones``: at most this many (None: 3, or what ``epochs`` have room for), sorted, each once. ``warmup``: steps;
    milestones count from its end, so they stay below ``epochs`` less the longest warm-up.
    """
    number("step_size", epochs)
    sizes = (1, epochs) if step_size is None else step_size
    _check(gamma=gamma, step_size=sizes, decay=decay, power=power, plateau_factor=plateau_factor)
    _check(plateau_patience=plateau_patience, final_factor=final_factor, warmup=warmup, warmup_start=warmup_start)
    for name in families:
        choice("a scheduler with families", name, FAMILIES)
    found: dict[str, Any] = dict(scheduler_defaults())
    kind = found["scheduler"] = _choose(trial, "scheduler", kinds, SCHEDULERS)
    longest = 0
    if kind != "plateau":
        longest = _ends("warmup", warmup)[1]
        if longest >= epochs:
            raise UserError(f"a warm-up must be shorter than the {epochs} epochs", warmup, "shorten it")
        found["warmup"] = _int(trial, "warmup", warmup)
        if found["warmup"]:
            found["warmup_start"] = _float(trial, "warmup_start", warmup_start)
    wanted = set(SCHEDULERS[kind])
    if "lr_family" in wanted:
        family = _choose(trial, f"{kind}_family", families.get(kind, tuple(FAMILIES[kind])), FAMILIES[kind])
        found["lr_family"] = family
        wanted |= set(FAMILIES[kind][family])
    floats = {"gamma": gamma, "plateau_factor": plateau_factor, "final_factor": final_factor, "power": power}
    for name in sorted(wanted & set(floats)):
        found[name] = _float(trial, name, floats[name])
    if "decay" in wanted:
        found["decay"] = _float(trial, "decay", decay, log=True)
    if "plateau_patience" in wanted:
        found["plateau_patience"] = _int(trial, "plateau_patience", plateau_patience)
    if "step_size" in wanted:
        found["step_size"] = _int(trial, "step_size", sizes)
    if "milestones" in wanted:
        room = epochs - longest
        found["milestones"] = _milestones(trial, max(1, min(3, room - 1)) if milestones is None else milestones, room)
    return found


def suggest_network(
    trial: Any,
    *,
    layers: WholeBounds = (1, 3),
    width: WholeBounds = (16, 128),
    activations: Sequence[str] = ("relu", "gelu", "tanh"),
    dropout: Bounds = (0.0, 0.5),
) -> dict[str, Any]:
    """Hidden layers: how many, the width of each (log scale), what follows each. See ``make_network``."""
    _check(width=width, dropout=dropout)
    count = _int(trial, "layers", layers)
    return {
        "widths": [_int(trial, f"width_{i}", width, limit="width", log=True) for i in range(count)],
        "activation": _choose(trial, "activation", activations, ACTIVATIONS),
        "dropout": _float(trial, "dropout", dropout),
    }


def suggest_batch(
    trial: Any,
    *,
    sizes: Sequence[int] = (32, 64, 128, 256),
    base_batch: int | None = None,
    lr_rules: Sequence[str] = ("none",),
) -> dict[str, Any]:
    """The global batch, and by which rule the learning rate, given for ``base_batch`` samples, follows it."""
    for size in sizes:
        number("batch_size", size)
    found: dict[str, Any] = {"batch_size": _choose(trial, "batch_size", sizes)}
    rule = found["lr_rule"] = _choose(trial, "lr_rule", lr_rules, LR_RULES)
    found["base_batch"] = number("base_batch", base_batch) if rule != "none" else None
    return found


def suggest_means(
    trial: Any,
    *,
    workers: WholeBounds | None = None,
    modes: Sequence[str] = (),
    mechanisms: Sequence[str] = (),
    policies: Sequence[str] = (),
) -> dict[str, Any]:
    """How a trial is run: what is left out stays as the study has it.

    ``workers`` at its start (log scale); numeric ``modes`` ("exact", "fast"); ``policies`` as ``--policy`` writes them,
    "none" for none.
    """
    found: dict[str, Any] = {}
    if workers is not None:
        found["workers"] = _int(trial, "workers", workers, log=True)
    if modes:
        found["mode"] = _choose(trial, "mode", modes, MODES)
    if mechanisms:
        found["mechanism"] = _choose(trial, "mechanism", mechanisms, MECHANISMS)
    if policies:
        for policy in policies:
            split(policy, "a policy", "gns:max_batch=2048,lr=sqrt")
        found["policy"] = _choose(trial, "policy", policies)
    return found


def _milestones(trial: Any, most: int, epochs: int) -> list[int]:
    """Sorted; two that fall together are one."""
    if number("milestone", most) >= epochs:
        rule = f"a schedule of {epochs} epochs has room for {epochs - 1} milestones"
        raise UserError(rule, most, "ask for fewer, or leave multistep out of kinds")
    count = _int(trial, "n_milestones", (1, most), limit="milestone")
    return sorted({_int(trial, f"milestone_{i}", (1, epochs - 1), limit="milestone") for i in range(count)})


def _choose(trial: Any, name: str, options: Sequence[Any], known: Iterable[str] | None = None) -> Any:
    """One of ``options``; where there is only one, nothing is asked."""
    if isinstance(options, str) or not options or len(set(options)) != len(options):
        raise UserError(f"the choices of {name} must be a list without repetitions", repr(options), "name at least one")
    if known is not None:
        for option in options:
            choice(name, option, known)
    return options[0] if len(options) == 1 else trial.suggest_categorical(name, list(options))


def _check(**ranges: Any) -> None:
    for name, bounds in ranges.items():
        _ends(name, bounds)


def _ends(name: str, bounds: Any) -> tuple[Any, Any]:
    """The lowest and the highest value of ``bounds``, checked against what setting ``name`` may be."""
    ends = tuple(bounds) if isinstance(bounds, (list, tuple)) else (bounds, bounds)
    if len(ends) != 2:
        raise UserError(f"a range of {name} must be (low, high)", repr(bounds), "give both ends, or one fixed number")
    low, high = number(name, ends[0]), number(name, ends[1])
    if low > high:
        raise UserError(f"a range of {name} must not end below its beginning", bounds, f"({high}, {low})")
    return low, high


def _float(trial: Any, name: str, bounds: Bounds, *, limit: str = "", log: bool = False) -> float:
    low, high = _ends(limit or name, bounds)
    if low == high:
        return float(low)
    return float(trial.suggest_float(name, float(low), float(high), log=log and low > 0))


def _int(trial: Any, name: str, bounds: WholeBounds, *, limit: str = "", log: bool = False) -> int:
    low, high = _ends(limit or name, bounds)
    return int(low) if low == high else int(trial.suggest_int(name, low, high, log=log))
