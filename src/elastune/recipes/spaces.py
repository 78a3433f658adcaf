"""Ready parts of a search space: optimizer, schedule, network, batch size and sync strategy.

Each part asks ``trial`` only for what applies (momentum for SGD alone, milestones for MultiStepLR alone). It returns a
value for every setting that ``recipes.build`` reads, None where it does not apply, so that no default of the program
remains. A range is (low, high). A single number is fixed and not searched. All ranges are checked at every call, also
those that do not apply. Every mistake raises ``UserError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args

from elastune.core.errors import UserError
from elastune.core.plan.batch_size import LR_RULES
from elastune.core.sync_plan import SETTING_NAMES, SETTINGS, Moments, Send
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
BATCH_SIZES = (32, 64, 128, 256)  # where a program names none


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
    """Choose an optimizer, its learning rate, weight decay and its own settings.

    A range is (low, high), or one number that is not searched. Learning rates and weight decay are drawn on a log scale
    where their range begins above 0.

    Args:
        trial: The argument of ``space(trial)``.
        kinds: Any of "sgd", "adam", "adamw".
        lr: One range, or one for each of ``kinds``: ``{"sgd": (1e-3, 1), "adam": (1e-5, 1e-2)}``; the parameters are
            then called "sgd_lr" and "adam_lr".
        momentum: For SGD alone.
        weight_decay: For all kinds.
        beta1, beta2: For Adam and AdamW alone.
        groups: Names of parameter groups; each gets a factor on the learning rate (see ``make_optimizer``).
        lr_factor: The range of these factors.

    Returns:
        A value for every setting that ``make_optimizer`` reads; None where the chosen kind has no use for it.

    Raises:
        UserError: For an unknown kind, or a range that the setting may not have.

    Example:
        >>> def space(trial):
        ...     return {**elastune.suggest_optimizer(trial, kinds=("sgd", "adam"), lr=(1e-3, 1.0)), "epochs": 10}
    """
    check_ranges(momentum=momentum, weight_decay=weight_decay, beta1=beta1, beta2=beta2, lr_factor=lr_factor)
    for bounds in lr.values() if isinstance(lr, Mapping) else (lr,):
        check_ranges(lr=bounds)
    settings: dict[str, Any] = dict(optimizer_defaults(groups))
    kind = settings["optimizer"] = choose_from(trial, "optimizer", kinds, OPTIMIZERS)
    if isinstance(lr, Mapping):
        if kind not in lr:
            raise UserError("each optimizer needs its range of learning rates", kind, f"add {kind!r}: (low, high)")
        settings["lr"] = draw_float(trial, f"{kind}_lr", lr[kind], limit="lr", log=True)
    else:
        settings["lr"] = draw_float(trial, "lr", lr, log=True)
    settings["weight_decay"] = draw_float(trial, "weight_decay", weight_decay, log=True)
    if "momentum" in OPTIMIZERS[kind]:
        settings["momentum"] = draw_float(trial, "momentum", momentum)
    if "betas" in OPTIMIZERS[kind]:
        settings["betas"] = [draw_float(trial, "beta1", beta1), draw_float(trial, "beta2", beta2)]
    for name in settings:
        if name.startswith(LR_FACTOR):
            settings[name] = draw_float(trial, name, lr_factor, limit="lr_factor", log=True)
    return settings


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
    """Choose a learning-rate schedule and the settings of its kind.

    Args:
        trial: The argument of ``space(trial)``.
        epochs: How many times the scheduler will be stepped.
        kinds: Any of "constant", "lambda", "multiplicative", "step", "multistep", "exponential", "plateau", "cosine".
        families: For "lambda" and "multiplicative", the formulas to choose from; all if not given.
        gamma: The factor of step, multistep, exponential and some families.
        step_size: Steps between two drops; None: from 1 to ``epochs``.
        milestones: The most milestones, sorted and different; None: 3, or as many as ``epochs`` have room for. They
            count from the end of the warm-up, so they stay below ``epochs`` less the longest warm-up.
        decay: For the family inverse_time.
        power: For the family polynomial.
        plateau_factor: The factor by which a plateau multiplies the rate.
        plateau_patience: How many bad epochs a plateau waits.
        final_factor: The end of cosine, as a part of the learning rate.
        warmup: Steps of a linear warm-up before the schedule; 0 for none.
        warmup_start: The beginning of the warm-up, as a part of the learning rate.

    Returns:
        A value for every setting that ``make_scheduler`` reads; None where the chosen kind has no use for it.

    Raises:
        UserError: For an unknown kind or family, a range that the setting may not have, or too long a warm-up.

    Example:
        >>> elastune.suggest_scheduler(trial, epochs=10, kinds=("constant", "cosine"), warmup=(0, 2))
    """
    number("step_size", epochs)
    sizes = (1, epochs) if step_size is None else step_size
    check_ranges(gamma=gamma, step_size=sizes, decay=decay, power=power, plateau_factor=plateau_factor)
    check_ranges(plateau_patience=plateau_patience, final_factor=final_factor, warmup=warmup, warmup_start=warmup_start)
    for name in families:
        choice("a scheduler with families", name, FAMILIES)
    settings: dict[str, Any] = dict(scheduler_defaults())
    kind = settings["scheduler"] = choose_from(trial, "scheduler", kinds, SCHEDULERS)
    longest = 0
    if kind != "plateau":
        longest = _ends("warmup", warmup)[1]
        if longest >= epochs:
            raise UserError(f"a warm-up must be shorter than the {epochs} epochs", warmup, "shorten it")
        settings["warmup"] = draw_int(trial, "warmup", warmup)
        if settings["warmup"]:
            settings["warmup_start"] = draw_float(trial, "warmup_start", warmup_start)
    wanted = set(SCHEDULERS[kind])
    if "lr_family" in wanted:
        family = choose_from(trial, f"{kind}_family", families.get(kind, tuple(FAMILIES[kind])), FAMILIES[kind])
        settings["lr_family"] = family
        wanted |= set(FAMILIES[kind][family])
    floats = {"gamma": gamma, "plateau_factor": plateau_factor, "final_factor": final_factor, "power": power}
    for name in sorted(wanted & set(floats)):
        settings[name] = draw_float(trial, name, floats[name])
    if "decay" in wanted:
        settings["decay"] = draw_float(trial, "decay", decay, log=True)
    if "plateau_patience" in wanted:
        settings["plateau_patience"] = draw_int(trial, "plateau_patience", plateau_patience)
    if "step_size" in wanted:
        settings["step_size"] = draw_int(trial, "step_size", sizes)
    if "milestones" in wanted:
        room = epochs - longest
        settings["milestones"] = _milestones(
            trial, max(1, min(3, room - 1)) if milestones is None else milestones, room
        )
    return settings


def suggest_network(
    trial: Any,
    *,
    layers: WholeBounds = (1, 3),
    width: WholeBounds = (16, 128),
    activations: Sequence[str] = ("relu", "gelu", "tanh"),
    dropout: Bounds = (0.0, 0.5),
) -> dict[str, Any]:
    """Choose the hidden layers of a fully connected network.

    Args:
        trial: The argument of ``space(trial)``.
        layers: Number of hidden layers.
        width: Width of each layer, drawn on a log scale.
        activations: Any of "relu", "gelu", "tanh", "silu", "elu", "leaky_relu".
        dropout: Dropout after each hidden layer.

    Returns:
        The settings that ``make_network`` reads: widths, activation, dropout.

    Raises:
        UserError: For an unknown activation, or a range that the setting may not have.

    Example:
        >>> elastune.suggest_network(trial, layers=(1, 2), width=(32, 256))
    """
    check_ranges(width=width, dropout=dropout)
    count = draw_int(trial, "layers", layers)
    return {
        "widths": [draw_int(trial, f"width_{i}", width, limit="width", log=True) for i in range(count)],
        "activation": choose_from(trial, "activation", activations, ACTIVATIONS),
        "dropout": draw_float(trial, "dropout", dropout),
    }


def suggest_batch(
    trial: Any,
    *,
    sizes: Sequence[int] | None = None,
    per_worker: Sequence[int] = (),
    workers: int | None = None,
    base_batch: int | None = None,
    lr_rules: Sequence[str] = ("none",),
) -> dict[str, Any]:
    """Choose the batch size, global or of each worker, and the rule by which the learning rate follows it.

    Args:
        trial: The argument of ``space(trial)``.
        sizes: Global batch sizes, in samples; 32, 64, 128 and 256 if neither ``sizes`` nor ``per_worker`` are given.
        per_worker: Batch sizes of one worker, in samples, instead of ``sizes``; the parameter is then called
            "batch_per_worker". The global batch is ``workers`` times the chosen size, and stays so when the trial's
            workers change.
        workers: The number of workers that the trial begins with, from ``suggest_execution``; ``per_worker`` needs it.
        base_batch: The batch size that the learning rate is for; every rule but "none" needs it.
        lr_rules: Any of "none", "linear", "sqrt".

    Returns:
        The settings batch_size, lr_rule and base_batch.

    Raises:
        UserError: For a size below 1, both kinds of sizes, one of ``per_worker`` and ``workers`` without the other,
            an unknown rule, or a rule without ``base_batch``.

    Example:
        >>> elastune.suggest_batch(trial, sizes=(64, 256, 1024), base_batch=64, lr_rules=("linear", "sqrt"))
        >>> execution = elastune.suggest_execution(trial, workers=(1, 8))
        >>> {**execution, **elastune.suggest_batch(trial, per_worker=(16, 32), workers=execution["workers"])}
    """
    for size in (*(sizes or ()), *per_worker):
        number("batch_size", size)
    settings: dict[str, Any] = {}
    if per_worker:
        if sizes is not None:
            raise UserError("a batch is chosen as a whole or for each worker", sizes, "give sizes or per_worker")
        if workers is None:
            rule = "a batch for each worker needs to know how many there are"
            raise UserError(rule, "no workers", "workers=suggest_execution(trial, workers=...)['workers']")
        settings["batch_size"] = choose_from(trial, "batch_per_worker", per_worker) * int(number("workers", workers))
    elif workers is not None:
        raise UserError(
            "a global batch does not hang on workers", f"workers={workers}", "give per_worker, or no workers"
        )
    else:
        settings["batch_size"] = choose_from(trial, "batch_size", BATCH_SIZES if sizes is None else sizes)
    rule = settings["lr_rule"] = choose_from(trial, "lr_rule", lr_rules, LR_RULES)
    settings["base_batch"] = number("base_batch", base_batch) if rule != "none" else None
    return settings


def _milestones(trial: Any, most: int, epochs: int) -> list[int]:
    """Sorted; two that fall together are one."""
    if number("milestone", most) >= epochs:
        rule = f"a schedule of {epochs} epochs has room for {epochs - 1} milestones"
        raise UserError(rule, most, "ask for fewer, or leave multistep out of kinds")
    count = draw_int(trial, "n_milestones", (1, most), limit="milestone")
    return sorted({draw_int(trial, f"milestone_{i}", (1, epochs - 1), limit="milestone") for i in range(count)})


def choose_from(trial: Any, name: str, options: Sequence[Any], allowed: Iterable[str] | None = None) -> Any:
    """Return one of ``options``; where there is only one, nothing is asked."""
    if isinstance(options, str) or not options or len(set(options)) != len(options):
        raise UserError(f"the choices of {name} must be a list without repetitions", repr(options), "name at least one")
    if allowed is not None:
        for option in options:
            choice(name, option, allowed)
    return options[0] if len(options) == 1 else trial.suggest_categorical(name, list(options))


def check_ranges(**ranges: Any) -> None:
    """Raise ``UserError`` for ranges that the settings may not have."""
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


def draw_float(trial: Any, name: str, bounds: Bounds, *, limit: str = "", log: bool = False) -> float:
    """Return a number within ``bounds``; a single number is not asked for."""
    low, high = _ends(limit or name, bounds)
    if low == high:
        return float(low)
    return float(trial.suggest_float(name, float(low), float(high), log=log and low > 0))


def draw_int(trial: Any, name: str, bounds: WholeBounds, *, limit: str = "", log: bool = False) -> int:
    """Return a whole number within ``bounds``; a single number is not asked for."""
    low, high = _ends(limit or name, bounds)
    return int(low) if low == high else int(trial.suggest_int(name, low, high, log=log))


def suggest_sync(
    trial: Any,
    *,
    strategies: Sequence[str] = ("allreduce", "local"),
    learners: Sequence[int] = (8,),
    every: WholeBounds = (2, 64),
    moments: Sequence[str] = ("mean",),
    send: Sequence[str] = ("whole",),
    mix: WholeBounds = 1,
    pull: Bounds = 0.1,
    outer_lr: Bounds = 0.7,
    outer_momentum: Bounds = 0.9,
    staleness: WholeBounds = 1,
    fragments: WholeBounds = 1,
    cycles: WholeBounds = 1,
) -> dict[str, Any]:
    """Choose a sync strategy (docs/sync.md) and its settings.

    A range is (low, high), or one number that is not searched. A trial with more workers than learners is infeasible.

    Args:
        trial: The argument of ``space(trial)``.
        strategies: Any of "allreduce", "local", "diloco", "averaging", "gossip", "pair_averaging" and
            "parameter_server".
        learners: Numbers of learners that a global batch may be divided into.
        every: Global batches of a round, drawn on a log scale.
        moments: "mean", "fresh" or both: what becomes of the optimizer's state where a round ends.
        send: Any of "whole", "bf16", "int8" and "int4": what ``local`` and ``diloco`` round numbers to that they
            exchange. A trial that rounds and has more than one of ``fragments`` or ``cycles`` is infeasible.
        mix: Global batches between two mixes of ``averaging``, ``gossip`` and ``pair_averaging``, on a log scale. A
            trial with as many as ``every``, or more, is infeasible.
        pull: For ``averaging``.
        outer_lr, outer_momentum: For ``diloco``.
        staleness: For ``parameter_server``, in global batches, from 1 on; a trial with more than ``every`` - 2 is
            infeasible.
        fragments, cycles: For ``diloco``; a trial of fewer than three global batches for each exchange is infeasible.

    Returns:
        The strategy as ``sync``, and a value for every setting of a strategy; None where the chosen one has no use for
        it.

    Raises:
        UserError: For an unknown strategy, and for settings that no strategy can have.

    Example:
        >>> elastune.suggest_sync(trial, strategies=("allreduce", "local"), learners=(4, 8), every=(4, 64))
    """
    check_ranges(every=every, mix=mix, pull=pull, outer_lr=outer_lr, outer_momentum=outer_momentum, staleness=staleness)
    check_ranges(fragments=fragments, cycles=cycles)
    for count in learners:
        check_ranges(learners=count)
    chosen = choose_from(trial, "sync", strategies, SETTINGS)
    used = SETTINGS[chosen]
    settings: dict[str, Any] = {"sync": chosen, **dict.fromkeys(SETTING_NAMES)}
    named = (("learners", learners, None), ("moments", moments, get_args(Moments)), ("send", send, get_args(Send)))
    for name, choices, allowed in named:
        if name in used:
            settings[name] = choose_from(trial, name, choices, allowed)
    counts = {"every": every, "mix": mix, "staleness": staleness, "fragments": fragments, "cycles": cycles}
    for name, whole in counts.items():
        if name in used:
            settings[name] = draw_int(trial, name, whole, log=name in ("every", "mix"))
    for name, bounds in (("pull", pull), ("outer_lr", outer_lr), ("outer_momentum", outer_momentum)):
        if name in used:
            settings[name] = draw_float(trial, name, bounds)
    return settings
