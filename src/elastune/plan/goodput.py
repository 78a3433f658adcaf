"""Goodput: samples a second, discounted by how much a larger batch wastes of each (Pollux, OSDI 2021).

Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", section 3, in the form
that its implementation AdaptDL uses. Pure formulas; seconds and samples throughout.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Performance:
    """Pollux's parameters of a step's time, in seconds.

    A pass over b local samples takes ``alpha_compute + beta_compute * b``. A reduction among K replicas takes
    ``alpha + beta * (K - 2)``, with the ``nodes`` pair where replicas span nodes and the ``local`` pair within one.
    ``overlap`` (gamma >= 1): 1 adds both times, large values hide the shorter behind the longer.
    """

    alpha_compute: float
    beta_compute: float
    alpha_nodes: float
    beta_nodes: float
    alpha_local: float
    beta_local: float
    overlap: float


@dataclass(frozen=True)
class Noise:
    """Squared norm of the true gradient, and the variance of a gradient at the base batch size."""

    gradient_sqr: float
    variance: float


def throughput(perf: Performance, nodes: int, replicas: int, local_batch: int, accumulation: int = 0) -> float:
    """Samples a second: every replica makes ``accumulation`` passes without and one with a reduction a step."""
    if not 1 <= nodes <= replicas or local_batch < 1 or accumulation < 0:
        raise ValueError(
            f"throughput needs 1 <= nodes <= replicas, local_batch >= 1 and accumulation >= 0, "
            f"not {nodes}, {replicas}, {local_batch} and {accumulation}"
        )
    compute_s = perf.alpha_compute + perf.beta_compute * local_batch
    if replicas == 1:
        reduce_s = 0.0
    elif nodes == 1:
        reduce_s = perf.alpha_local + perf.beta_local * (replicas - 2)
    else:
        reduce_s = perf.alpha_nodes + perf.beta_nodes * (replicas - 2)
    last_s = overlapped(compute_s, reduce_s, perf.overlap)
    return replicas * local_batch * (accumulation + 1) / (accumulation * compute_s + last_s)


def efficiency(noise: Noise, batch: float, base_batch: float) -> float:
    """Progress per sample at ``batch`` over that at ``base_batch`` (Pollux, section 3.1)."""
    scale = batch / base_batch
    remaining = noise.variance / scale + noise.gradient_sqr
    gain = (noise.variance + noise.gradient_sqr) / remaining if remaining > 0 else 1.0
    return gain / scale


def goodput(
    perf: Performance,
    noise: Noise,
    base_batch: int,
    nodes: int,
    replicas: int,
    local_batch: int,
    accumulation: int = 0,
) -> float:
    """Useful samples a second: throughput x efficiency at the global batch."""
    batch = replicas * local_batch * (accumulation + 1)
    rate = throughput(perf, nodes, replicas, local_batch, accumulation)
    return rate * efficiency(noise, batch, base_batch)


def overlapped(compute_s: float, reduce_s: float, overlap: float) -> float:
    """(compute^gamma + reduce^gamma)^(1/gamma): the sum for gamma = 1, the larger of both as gamma grows."""
    longer, shorter = max(compute_s, reduce_s), min(compute_s, reduce_s)
    if longer <= 0:
        return 0.0
    # Scaled by the longer, so that small times under a large exponent do not underflow.
    return longer * float((1.0 + (shorter / longer) ** overlap) ** (1.0 / overlap))
