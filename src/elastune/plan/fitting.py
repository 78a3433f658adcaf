"""Whether a worker can hold a program, in words: by how much it does not, and what would. Modelled."""

from __future__ import annotations

import numpy as np

from elastune.core.text import byte_count, count
from elastune.plan.steps.memory import HeldAlone, peak_bytes
from elastune.plan.steps.splits import StepSplits
from elastune.plan.steps.work import StepWork


def fit_in_words(
    held: HeldAlone, work: StepWork, memory_bytes: float, micro: int, most_workers: int, of: str = "a worker"
) -> str:
    """ "fits: 10 GiB of 24 GiB a worker" or "does not fit: 31 GiB of 24 GiB a worker; 'sharded' on 2 would".

    Args:
        held: By a worker that trains alone.
        work: How parameters lie in blocks.
        memory_bytes: That a worker has.
        micro: Samples of a pass.
        most_workers: That one training can have; 1: what others would do is left out.
        of: Whose memory it is.
    """
    counts = np.arange(1, most_workers + 1, dtype=np.float64)
    ones = np.ones_like(counts)
    splits = StepSplits(micro * counts, ones * micro, ones, counts, ones, ones, counts)
    alone = peak_bytes(held, work, splits.take(slice(0, 1)))[0]
    told = f"{byte_count(round(alone))} of {byte_count(round(memory_bytes))} {of}"
    if alone <= memory_bytes:
        return f"fits: {told}"
    if most_workers == 1:
        return f"does not fit: {told}"
    for name, sharded in (("zero", False), ("sharded", True)):
        enough = np.flatnonzero(peak_bytes(held, work, splits, sharded) <= memory_bytes)
        if len(enough):
            return f"does not fit: {told}; '{name}' on {int(counts[enough[0]])} would"
    return f"does not fit: {told}; nor does 'sharded' on {count(most_workers, 'worker')}: a pass alone is too large"
