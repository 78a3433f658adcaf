"""How workers are shared out, as on a command line: "steepest", "short_first", "short_first:held=0.2"."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from elastune.core.errors import UserError
from elastune.core.options import Range, options_of, read, split
from elastune.study.allocation.courses import Courses
from elastune.study.allocation.scaling import BatchTable
from elastune.study.allocation.throughput import Prior, ThroughputTable

LOOKS = 2  # at a trial whose workers have changed: each is recorded, so they are few


@dataclass(frozen=True)
class AllocationChoice:
    """How a study's workers are shared out among its trials.

    Attributes:
        held: The part of the trials, the longest ones, that waits after its first epoch; see ``hold``.
        least_gain: What a further worker must bring, as a part of what a first one brings; less would waste workers.
        by_batch: Whether the gain of trials by more workers is learnt by the size of their batches, see ``scaling``;
            else all trials are taken to gain alike.
    """

    held: Annotated[float, Range(0.0, 0.9)] = 0.0
    least_gain: Annotated[float, Range(0.0, 1.0)] = 0.5
    by_batch: bool = False

    @property
    def from_journal(self) -> bool:
        """Whether what is known of trials comes from the journal alone, which then records looks at them, too."""
        return self.held > 0 or self.by_batch

    def courses(self, replica: int = 1, prior: Prior | None = None) -> Courses:
        """What is known of the trials of a study whose replicas take so many workers: nothing but ``prior`` yet."""
        return Courses(BatchTable(prior) if self.by_batch else ThroughputTable(prior), replica=replica, looks=LOOKS)


ALLOCATIONS = {
    "steepest": AllocationChoice(),
    "short_first": AllocationChoice(held=0.3, least_gain=0.2),
}


def parse_allocation(text: str) -> AllocationChoice:
    """Return the choice that ``text`` names, one of ``ALLOCATIONS`` with other options. Raises ``UserError``."""
    name, options = split(text, "the allocation", "short_first:held=0.3,least_gain=0.2")
    if name not in ALLOCATIONS:
        raise UserError("an allocation must be one that is known", repr(text), f"one of {', '.join(ALLOCATIONS)}")
    usual = vars(ALLOCATIONS[name])
    known = {option: replace(one, default=usual[option]) for option, one in options_of(AllocationChoice).items()}
    return AllocationChoice(**{**usual, **read(name, options, known)})
