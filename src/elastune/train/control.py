"""The control vector: the few numbers that workers add to a step's reduction beside gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastune.train.adapt.adapter import StepContribution
from elastune.train.step_facts import NO_MARKS

COUNTED = 1 << 12  # of samples, modulo this: sums of up to 4096 workers are exact, however long a round is


@dataclass(frozen=True)
class ControlVector(StepContribution):
    """What each worker adds to a step's reduction beside gradients; read back as sums over workers.

    Attributes:
        stop: 1 where this worker was asked to stop.
        heard: 1 where this worker has heard of the next membership view.
        samples: How many samples this worker used in the step, modulo ``COUNTED``.
        checksum: Their ``checksum``.
        sent: Bytes that this worker's collectives have sent since they were told last.
        marks: What tells whether all take the step alike (``train.step_facts``); zeros where there is one worker.
    """

    stop: float = 0.0
    heard: float = 0.0
    samples: float = 0.0
    checksum: float = 0.0
    sent: float = 0.0
    marks: Sequence[float] = NO_MARKS

    def to_list(self) -> list[float]:
        """In the order of the fields."""
        single = [
            self.stop,
            self.heard,
            self.samples,
            self.checksum,
            self.waiting,
            self.seconds,
            self.sent,
            self.unsure,
        ]
        return [*single, *self.marks, *self.votes, *self.times]

    @staticmethod
    def of(sums: Sequence[float], votes: int) -> ControlVector:
        """The sum of all workers' ``to_list``; ``votes`` numbers of it are votes."""
        stop, heard, samples, checksum, waiting, seconds, sent, unsure, *rest = sums
        ends = len(NO_MARKS), len(NO_MARKS) + votes
        marks, voted, times = rest[: ends[0]], rest[ends[0] : ends[1]], rest[ends[1] :]
        adapted = waiting, seconds, unsure, voted, times
        return ControlVector(*adapted, stop, heard, samples, checksum, sent, marks)
