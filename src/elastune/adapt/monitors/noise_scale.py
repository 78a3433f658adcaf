"""The gradient noise scale, plain and as Adam sees it: how large a batch may grow before its samples add little.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", section 2.2 (B_simple = tr(Sigma) /
|G|^2) and appendix A.1 (its estimate from two batch sizes; smooth numerator and denominator apart). Here the small
batch is a part of the global one (slot, worker, micro-batch), of any size:

    tr(Sigma)^ = (part_square - square) * batch / (parts - 1)        never negative
    |G|^2^     = square - tr(Sigma) / batch

Bias. Both estimates are unbiased for any sizes of the parts, for samples drawn independently. For samples drawn
without replacement from N samples, tr(Sigma) belongs to this finite set, and |G|^2 is too large by about tr(Sigma) /
N. The ratio is biased upwards by about its squared relative error (of |G|^2), and lags behind training by ``memory``
readings.

Variance. With normal noise, one reading of tr(Sigma) has variance 2 tr(Sigma^2) / (parts - 1), whatever the batch:
its weight is parts - 1. ``square`` has variance 4 G'Sigma G / batch + 2 tr(Sigma^2) / batch^2: its weight is the
batch. That weight is right for large batches; for small ones it keeps more of the past than would be best. |G|^2 is
corrected by the smoothed tr(Sigma), which is far more precise than that of one step. So a change of batch or workers
resets nothing: new readings count by their own precision. For large models a reading covers a quarter of the values,
and four readings cover all (``BucketNorms``). Readings then vary with the quarters, and so does the reported error.

Where |G|^2 is not distinguishable from zero (its estimate is below its own standard error, or negative), that error
takes its place. The scale is then bounded, with an error as large as itself: "about this, or more".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from elastune.adapt.monitors import base
from elastune.adapt.monitors.base import GradientNorms, Monitor, Reading, State
from elastune.core.decisions import Signal
from elastune.core.options import Range, check

# The terms: u, u tr^, v, v square, v / batch, with weights u = parts - 1 and v = batch.
_TERMS = 5
_TRACE, _SQUARE = 0, 2  # where the weights are


def with_norms(state: State, norms: GradientNorms | None, memory: float) -> State:
    """Return ``state`` with one more step's norms; missing or unusable norms leave it as it is."""
    if norms is None or not 2 <= norms.parts <= norms.batch or min(norms.square, norms.part_square) < 0:
        return state
    freedom = norms.parts - 1
    scatter = max(norms.part_square - norms.square, 0.0) * norms.batch  # below zero by rounding only; NaN stays NaN
    terms = (float(freedom), scatter, float(norms.batch), norms.batch * norms.square, 1.0)
    return base.updated(state, terms, memory)


def estimate(state: State) -> Mapping[str, Signal]:
    """Return the signals, as far as they are known.

    They are ``gradient_variance`` (tr(Sigma), of one sample), ``gradient_square`` (|G|^2, at least 0) and, from the
    second reading on, ``noise_scale`` (in samples).
    """
    weight_t, scatter, weight_g, square, samples = state["sums"]
    if weight_t <= 0:
        return {}
    count = min(base.effective_sample_size(state, _TRACE), base.effective_sample_size(state, _SQUARE))
    trace = scatter / weight_t
    per_batch = samples / weight_g  # the mean of 1 / batch, as the squares are weighted
    gradient = square / weight_g - trace * per_batch
    by_trace = (-trace / weight_t, 1 / weight_t, 0.0, 0.0, 0.0)
    by_square = (0.0, 0.0, -gradient / weight_g, 1 / weight_g, -trace / weight_g)
    slope_gradient = [s - per_batch * t for s, t in zip(by_square, by_trace, strict=True)]
    error = base.error(state, slope_gradient, count)
    signals = {
        "gradient_variance": Signal(trace, base.error(state, by_trace, count)),
        "gradient_square": Signal(max(gradient, 0.0), error),
    }
    floor = max(gradient, error) if error is not None else 0.0
    if floor > 0 and math.isfinite(scale := trace / floor):
        slope = [(t - scale * g) / floor for t, g in zip(by_trace, slope_gradient, strict=True)]
        signals["noise_scale"] = Signal(scale, base.error(state, slope, count))
    return signals


@dataclass(frozen=True)
class NoiseScale(Monitor):
    """Measures the noise scale of the plain gradient, as SGD follows it.

    Gives the signals ``noise_scale`` (in samples), ``gradient_variance`` and ``gradient_square``.

    Args:
        every: Steps from one reading to the next.
        memory: The length of the averages, in readings; at least 2.
    """

    every: Annotated[int, Range(1)] = 1
    memory: Annotated[float, Range(2)] = 100.0

    name = "noise_scale"
    gives = frozenset({"noise_scale", "gradient_variance", "gradient_square"})
    needs = frozenset({"norms"})

    def __post_init__(self) -> None:
        check(self.name, self)

    def init(self) -> State:
        return base.empty(_TERMS)

    def update(self, state: State, reading: Reading) -> State:
        return with_norms(state, reading.norms, self.memory)

    def signals(self, state: State) -> dict[str, Signal]:
        return dict(estimate(state))


# The gradient noise scale as Adam sees it: of gradients divided by sqrt(v) + eps, with Adam's second moment v.
#
# Source: Qiao et al. 2021, "Pollux", section 3.1 and its implementation AdaptDL (``gradient_noise_scale.py``, class
# ``AdamGradientNoiseScale``), which preconditions gradients before it takes their norms. Adam takes large steps along
# small gradients, so noise there counts for as much as noise elsewhere. The plain noise scale is ruled by the few
# parameters with the largest gradients.
#
# Bias and variance are those of ``noise_scale``, given v. v is that of before the step, hence independent of the
# step's samples. It moves with the run, and with it the unit of both variance and square. Their ratio, the scale, has
# no unit.


@dataclass(frozen=True)
class PreconditionedNoiseScale(NoiseScale):
    """As ``NoiseScale``, of the gradient as Adam sees it.

    Gives the signals ``noise_scale_adam``, ``gradient_variance_adam`` and ``gradient_square_adam``.
    """

    name = "noise_scale_adam"
    gives = frozenset({"noise_scale_adam", "gradient_variance_adam", "gradient_square_adam"})
    needs = frozenset({"preconditioned"})

    def update(self, state: State, reading: Reading) -> State:
        return with_norms(state, reading.preconditioned, self.memory)

    def signals(self, state: State) -> dict[str, Signal]:
        return {f"{name}_adam": signal for name, signal in estimate(state).items()}
