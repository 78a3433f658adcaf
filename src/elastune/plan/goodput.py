"""What a sample is worth in a larger batch: the efficiency of Pollux, which with samples a second makes its goodput.

Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021, section 3.1, in
the form that its implementation AdaptDL uses.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Noise:
    """Squared norm of the true gradient, and the variance of a gradient at the base batch size."""

    gradient_sqr: float
    variance: float


def efficiency(noise: Noise, batch: float, base_batch: float) -> float:
    """Progress per sample at ``batch`` over that at ``base_batch``."""
    scale = batch / base_batch
    remaining = noise.variance / scale + noise.gradient_sqr
    gain = (noise.variance + noise.gradient_sqr) / remaining if remaining > 0 else 1.0
    return gain / scale
