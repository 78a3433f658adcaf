"""Whether a worker can hold a program, in words: by how much it does not, and what would. Modelled."""

from __future__ import annotations

import numpy as np

from elastune.core.text import byte_count, count
from elastune.plan.steps.memory import HeldAlone, peak_bytes
from elastune.plan.steps.splits import StepSplits
from elastune.plan.steps.work import StepWork


def fit_in_words(held: HeldAlone, work: StepWork, memory_bytes: float, micro: int, most_workers: int) -> str:
    """ "fits: 10 of 24 GiB a worker" or "does not fit: 31 of 24 GiB a worker; 'sharded' on 2 would".

    Args:
        held: By a worker that trains alone.
        work: How parameters lie in blocks.
        memory_bytes: That a worker has.
        micro: Samples of a pass.
        most_workers: That one training can have.
    """
    counts = np.arange(1, most_workers + 1, dtype=np.float64)
    ones = np.ones_like(counts)
    splits = StepSplits(micro * counts, ones * micro, ones, counts, ones, ones, counts)
    alone = peak_bytes(held, work, splits.take(slice(0, 1)))[0]
    of = f"{byte_count(round(alone))} of {byte_count(round(memory_bytes))} a worker"
    if alone <= memory_bytes:
        return f"fits: {of}"
    for name, sharded in (("zero", False), ("sharded", True)):
        enough = np.flatnonzero(peak_bytes(held, work, splits, sharded) <= memory_bytes)
        if len(enough):
            return f"does not fit: {of}; '{name}' on {int(counts[enough[0]])} would"
    return f"does not fit: {of}; nor does 'sharded' on {count(most_workers, 'worker')}: a pass alone is too large"
