"""What a larger global batch is worth, how many workers it supports, and which learning rate belongs to it.

With batch b and noise scale B a training needs 1 + b / B times the samples of the smallest batches, and 1 + B / b times
the steps of the largest (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, section 2.3). Below B a
larger batch saves nearly as many steps as it is larger. Far beyond B it saves none. A worker with a share of b samples
spends base_s + per_sample_s x b on a step, and only the second part is divided among workers.

``efficiency`` is that of Pollux: progress per sample, which with samples a second makes goodput (Qiao et al., "Pollux",
OSDI 2021, section 3.1, in the form of its implementation AdaptDL).

Learning-rate rules by the ratio of batch sizes: ``none`` keeps the rate. ``sqrt`` keeps the variance of an update equal
(Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014). ``linear`` keeps the mean
progress per sample equal (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1). No rule is right
everywhere: that is what tuning is for.

While training runs, two more rules change the learning rate with the batch:

adascale: by the gain of Johnson et al., "AdaScale SGD" (2020): with tr(Sigma) the variance of one sample's gradient and
    |G|^2 the square of the true one, a step on b samples is worth 1 / (tr(Sigma) / b + |G|^2). Linear while the batch
    is far below the noise scale, constant far above it. Before anything is measured: as none.
legw: You et al., "Large-Batch Training for LSTM and Beyond" (2019): the square root of the ratio, with a warm-up whose
    epochs grow linearly with the batch, so that its number of steps stays.

All rules compose: old to middle to new is old to new (adascale: while its signals stay).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from elastune.core.decisions import Snapshot
from elastune.core.errors import UserError
from elastune.core.formatting import number

# The noise scale in words.

NOISE_SCALE_SOURCE = "McCandlish et al. 2018"


def batch_against_noise(
    batch: int,
    scale: float | None,
    error: float | None,
    *,
    whose: str,
    when: str = "at the end of training",
    supports: str = "",
    outweighed: str = "",
) -> str:
    """Return one sentence, without a capital and a full stop, that compares ``batch`` with the noise scale of a
    training.

    Args:
        batch: The global batch, in samples.
        scale: The noise scale, in samples; None where it was not measured.
        error: Its standard error; None, or not finite, where it is not known.
        whose: The owner of the batch: "the pick's", "the run's".
        when: When the scale was measured; it grows as a training goes on.
        supports: What else follows from the scale for batches up to it.
        outweighed: What counts for more where the batch is beyond it.

    Returns:
        The sentence; "" where the noise scale is not known.
    """
    if scale is None or not 0 < scale < math.inf:
        return ""
    spread, within = "", scale
    if error is not None and math.isfinite(error):
        spread, within = f" ± {samples_text(error)}", scale + error
    first = (
        f"gradient noise scale {samples_text(scale)}{spread} {when}: batches up to about that use "
        f"their samples well ({NOISE_SCALE_SOURCE}){supports}; {whose} batch of {batch}"
    )
    if batch <= within:
        return f"{first} is within it"
    times = f"by that model {number(1 + batch / scale, 2)} times those of small batches"
    return f"{first} is beyond it, so it buys time with samples: {times}{outweighed}"


def samples_text(value: float) -> str:
    """Return a number of samples, which need not be whole, as "412" or "1.1"."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


# The workers that a noise scale supports. At B a step makes half of the progress of an infinite batch's step.

EFFICIENT_SHARE = 0.5  # the part of a worker's step that must go into samples


def smallest_share(base_s: float, per_sample_s: float, efficiency: float = EFFICIENT_SHARE) -> float:
    """Return the samples per worker at which ``efficiency`` of its step goes into samples; at least 1, infinite for
    none.

    With ``efficiency`` one half that is base_s / per_sample_s. Raises ``ValueError`` for impossible times and an
    efficiency outside [0, 1).
    """
    if not (0 <= base_s < math.inf and 0 <= per_sample_s < math.inf and 0 <= efficiency < 1):
        raise ValueError(f"no times or no efficiency: {base_s}, {per_sample_s}, {efficiency}")
    if base_s == 0:
        return 1.0
    if per_sample_s == 0:
        return math.inf
    return max(1.0, base_s / per_sample_s * efficiency / (1 - efficiency))


def supported_workers(noise_scale: float, share: float) -> int:
    """Return the largest W with noise_scale / W >= ``share``, the least samples of a worker; 0 where there is none."""
    if not (noise_scale >= 0 and noise_scale < math.inf and share >= 1):
        raise ValueError(f"a noise scale is finite and a share at least 1, not {noise_scale} and {share}")
    return math.floor(noise_scale / share)


# Pollux's efficiency.


@dataclass(frozen=True)
class Noise:
    """The squared norm of the true gradient, and the variance of a gradient at the base batch size."""

    gradient_sqr: float
    variance: float


def efficiency(noise: Noise, batch: float, base_batch: float) -> float:
    """Return the progress per sample at ``batch`` over that at ``base_batch``."""
    scale = batch / base_batch
    remaining = noise.variance / scale + noise.gradient_sqr
    gain = (noise.variance + noise.gradient_sqr) / remaining if remaining > 0 else 1.0
    return gain / scale


# Learning-rate rules by the ratio of batch sizes.

LR_RULES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "none": lambda ratio: 1.0,
        "sqrt": math.sqrt,
        "linear": lambda ratio: ratio,
    }
)
"""Rule -> factor on the learning rate, given batch / base batch."""


def scaled_lr(lr: float, batch: int, base_batch: int, rule: str) -> float:
    """Return the learning rate for ``batch`` where ``lr`` belongs to ``base_batch``.

    Raises ``UserError`` for an unknown rule and for batch sizes below one.

    Example:
        >>> scaled_lr(0.1, 256, 64, "sqrt")
        0.2
    """
    factor = LR_RULES.get(rule)
    if factor is None:
        raise UserError("unknown learning-rate rule", rule, f"use one of {', '.join(LR_RULES)}")
    if batch < 1 or base_batch < 1:
        raise UserError("a batch holds at least one sample", f"{batch} and {base_batch}", "give batch sizes >= 1")
    return lr * factor(batch / base_batch)


# Learning-rate rules for a change of the batch size while training runs.

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

    A lower learning rate applies at once, because a small batch does not tolerate the rate of a large one.

    Args:
        rule: "none", "linear", "sqrt", "adascale" or "legw".
        old, new: Global batch sizes, in samples.
        snapshot: The state of the run.
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
    """Return ``rule``. Raises ``UserError`` for an unknown one."""
    if rule not in RULES:
        raise UserError("unknown learning-rate rule", rule, f"use one of {', '.join(RULES)}")
    return rule


def rule_monitors(rule: str) -> tuple[str, ...]:
    """Return the monitors that ``rule`` needs."""
    return ("noise_scale",) if check_rule(rule) == "adascale" else ()


def _value(snapshot: Snapshot, name: str) -> float:
    signal = snapshot.signals.get(name)
    return math.nan if signal is None else signal.value
