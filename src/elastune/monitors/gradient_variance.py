"""What the variance of the gradient says of larger batches: AdaScale's gain.

Source: Johnson et al. 2020, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training", section 3:
with sigma^2 the variance of a gradient over the base batch and mu^2 the squared norm of the true one, a step on a batch
``scale`` times as large is worth

    gain = (sigma^2 + mu^2) / (sigma^2 / scale + mu^2)

steps on the base batch. The signals ``gradient_variance`` (tr(Sigma), of one sample: divide by the base batch) and
``gradient_square`` (monitor ``noise_scale``) are its arguments.

Bias and variance: the gain of unbiased estimates is biased towards the middle of its range by the curvature of the
formula; being bounded, it never blows up as the noise scale does.
"""

from __future__ import annotations

from elastune.plan.goodput import Noise, efficiency


def adascale_gain(variance_at_base_batch: float, square: float, scale: float) -> float:
    """The gain in [1, scale]: 1 without variance, ``scale`` where there is nothing else. Below 1, ``scale`` < gain < 1.

    Pollux's efficiency is this gain over ``scale``. Raises ``ValueError`` for what is negative or not a number.
    """
    if not (variance_at_base_batch >= 0 and square >= 0 and scale > 0):
        raise ValueError(
            f"a gain needs variance >= 0, square >= 0 and scale > 0, not {variance_at_base_batch}, {square} and {scale}"
        )
    if variance_at_base_batch == 0:
        return 1.0
    gain = efficiency(Noise(square, variance_at_base_batch), scale, 1) * scale
    return min(max(gain, min(1.0, scale)), max(1.0, scale))  # by rounding only
