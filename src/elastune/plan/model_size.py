"""Whether one training can use all workers of a cluster: what each computes in a step against what it waits for.

Modelled, from the same physical form as plans.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from elastune.core.text import count, duration, number
from elastune.plan.cluster_plan import ProgramForecast, step_parts
from elastune.plan.divisions import Nodes
from elastune.plan.steps.splits import StepSplits

LEAST_LOSS = 1.05  # by what factor a step on all workers must be longer than on fewer, to be told


def unused_text(forecast: ProgramForecast, nodes: Nodes, batch: int, parameters: float) -> str:
    """Return why one training cannot use all workers of a cluster, in one sentence; "" where it can.

    Args:
        forecast: What is known of the program and the machine.
        nodes: The cluster.
        batch: The program's own global batch, in samples.
        parameters: How many the model has.

    Returns:
        The sentence, with what each worker would compute in a step and how long it would wait for gradients.

    Example:
        >>> unused_text(forecast, Nodes(8, 8), 64, 27_700)
        'too small for 64 workers: ...'
    """
    most = min(nodes.workers, batch)
    widths = np.array([*(2.0**power for power in range(most.bit_length()) if 2**power < most), float(most)])
    ones = np.ones_like(widths)
    micro = np.ceil(batch / widths)
    splits = StepSplits(ones * batch, micro, widths, ones, ones, ones, ones * nodes.workers_each)
    none = np.zeros(len(widths), bool)  # of them are sharded
    step_s, parts = step_parts(forecast, splits, none)
    best = int(step_s.argmin())
    if step_s[-1] < LEAST_LOSS * step_s[best]:
        return ""
    nothing = np.array(0.0)
    light = replace(forecast.work, block_bytes=nothing, whole_bytes=nothing, edge_bytes=nothing)
    latency_s = float(step_parts(replace(forecast, work=light), splits, none)[1]["gradients"][-1])
    cause = "too small" if latency_s > parts["gradients"][-1] / 2 else "the links are too slow"
    computing, launching, waiting = (duration(float(parts[name][-1])) for name in ("compute", "launch", "gradients"))
    fastest, factor = int(widths[best]), float(step_s[0] / step_s[best])
    gain = "no more than 1 worker is of use" if fastest == 1 else f"{fastest} are the most that help"
    gain += "" if fastest == 1 else f" ({number(factor, 3)} x as fast as 1)"
    return (
        f"{cause} for one training on {count(nodes.workers, 'worker')} (modelled): {number(parameters, 3)} "
        f"parameters, batch {batch:,}. In each step on {most:,} a worker would compute for {computing}, launch kernels "
        f"for {launching} and wait {waiting} for the sum of gradients ({duration(latency_s)} of it latency); {gain}"
    )
