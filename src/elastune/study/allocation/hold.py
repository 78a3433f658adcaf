"""Which trials wait, because they would take longest: pure.

Of trials of equal worth the short ones should come first (weight over length: Smith, "Various optimizers for
single-stage production", Naval Research Logistics Quarterly 1956): a study's early results are those of its short
trials, and what the longest hold until their first rung the others could have had. After its first epoch a trial's
length is known well enough; one among the longest ``share`` gives its workers back until some are idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

FEWEST = 5  # trials must be known, or nobody can say which is long
LONG = 1.5  # times the median: where all take about as long, nobody gains by another's waiting
SHORT_S = 20.0  # of training: who waits starts its processes again, which takes a second or so


@dataclass(frozen=True)
class Length:
    """Worker-seconds of a trial's whole training, on few workers; ``at_least``: they are not known, but no less."""

    trial: int
    seconds: float
    at_least: bool = False


def is_held(trial: int, lengths: Sequence[Length], share: float) -> bool:
    """Whether ``trial`` is among the longest ``share`` of the trials whose place is known.

    A trial whose length is only known to be at least so long counts where that is longer than ``trial``, since trials
    that began together come to their first epoch's end in the order of their lengths, the longest last.

    Args:
        trial: the one that is asked about; its own length must be known, or the answer is no.
        lengths: of all trials of the study, ended ones included.
        share: from 0 (nobody waits) to 1.

    Returns:
        True where fewer than ``share`` of those trials are longer, it is longer than most by ``LONG``, and it takes
        ``SHORT_S`` at least.
    """
    own = next((one.seconds for one in lengths if one.trial == trial and not one.at_least), None)
    if own is None or own < SHORT_S:
        return False
    longer = sum(one.seconds > own for one in lengths if one.trial != trial)
    placed = [one.seconds for one in lengths if not one.at_least or one.seconds > own]
    is_long = len(placed) >= FEWEST and own >= LONG * median(placed)
    return is_long and longer < int(share * len(placed) + 1e-9)
