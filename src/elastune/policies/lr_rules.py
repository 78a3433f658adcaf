"""How the learning rate follows a change of the batch size while training runs.

The rules that need the ratio of batch sizes only are ``plan.scaling``'s: none, linear, sqrt. Two need more:

adascale: by the gain of Johnson et al., "AdaScale SGD" (2020): with tr(Sigma) the variance of one sample's gradient and
    |G|^2 the square of the true one, a step on b samples is worth 1 / (tr(Sigma) / b + |G|^2). Linear while the batch
    is far below the noise scale, constant far above it. Before anything is measured: as none.
legw: You et al., "Large-Batch Training for LSTM and Beyond" (2019): the square root of the ratio, with a warm-up whose
    epochs grow linearly with the batch, so that its number of steps stays.

No rule is right everywhere. All compose: old to middle to new is old to new (adascale: while its signals stay).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastune.core.errors import UserError
from elastune.core.signals import Snapshot
from elastune.plan.goodput import Noise, efficiency
from elastune.plan.scaling import LR_RULES, scaled_lr

RULES = (*LR_RULES, "adascale", "legw")
WARMUP_EPOCHS = 0.2  # legw's, at the batch size that the run began with


@dataclass(frozen=True)
class LrChange:
    """Multiply the learning rate by ``factor``, over ``ramp_steps`` steps (0: at once)."""

    factor: float = 1.0
    ramp_steps: int = 0


def lr_change(
    rule: str,
    old: int,
    new: int,
    snapshot: Snapshot,
    *,
    epoch_samples: int | None = None,
    warmup_epochs: float = WARMUP_EPOCHS,
) -> LrChange:
    """Return the change of the learning rate when the global batch goes from ``old`` to ``new`` samples.

    A learning rate that falls, falls at once: a small batch does not bear the rate of a large one.

    Args:
        rule: "none", "linear", "sqrt", "adascale" or "legw".
        old, new: Global batch sizes, in samples.
        snapshot: Where the run stands.
        epoch_samples: Samples of an epoch, for legw. Without it, legw takes the samples of the epochs so far, and has
            no warm-up in the first epoch.
        warmup_epochs: The length of the warm-up at the first batch size, for legw.

    Raises:
        UserError: For an unknown rule, and for batch sizes below one.
    """
    check_rule(rule)
    if rule == "adascale":
        scaled_lr(1.0, new, old, "none")  # checks the batch sizes
        variance, square = (_value(snapshot, name) for name in ("gradient_variance", "gradient_square"))
        return LrChange(gain(variance, square, old, new))
    if rule != "legw":
        return LrChange(scaled_lr(1.0, new, old, rule))
    factor = scaled_lr(1.0, new, old, "sqrt")
    samples = epoch_samples or (snapshot.samples // snapshot.epoch if snapshot.epoch else 0)
    # warmup_epochs * (new / start) epochs, of samples / new steps each
    steps = round(warmup_epochs * samples / (snapshot.batch_at_start or old))
    return LrChange(factor, steps if factor > 1.0 else 0)


def gain(variance: float, square: float, base: int, batch: int) -> float:
    """Return AdaScale's gain of ``batch`` over ``base`` samples a step: between 1 and their ratio.

    Args:
        variance: tr(Sigma) of one sample's gradient.
        square: |G|^2.
        base, batch: Batch sizes, in samples.

    Returns:
        The ratio where ``square`` is 0; 1 where ``variance`` is 0, and where either is not known (NaN, infinite or
        negative).
    """
    if not (0.0 <= variance < math.inf and 0.0 <= square < math.inf):
        return 1.0
    # In units of their sum, so that neither overflows; what is left of the variance at the base batch
    largest = max(variance / base, square)
    if largest <= 0.0:
        return 1.0
    noise = Noise(gradient_sqr=square / largest, variance=variance / base / largest)
    return efficiency(noise, batch, base) * batch / base


def check_rule(rule: str) -> str:
    """Return ``rule``. Raises ``UserError`` where it is none."""
    if rule not in RULES:
        raise UserError("unknown learning-rate rule", rule, f"use one of {', '.join(RULES)}")
    return rule


def rule_monitors(rule: str) -> tuple[str, ...]:
    """Return the monitors that ``rule`` needs."""
    return ("noise_scale",) if check_rule(rule) == "adascale" else ()


def _value(snapshot: Snapshot, name: str) -> float:
    signal = snapshot.signals.get(name)
    return math.nan if signal is None else signal.value
