"""How long a step takes in data parallelism, of a program that was timed and not looked into.

``terms`` says what a step takes on any mesh, from what a rehearsal has counted of the program. Frontiers, and policies
in a run, count nothing. They have timed the program, and ask for other batches and other numbers of workers. To them
all terms of a pass are one line, ``base_s + per_sample_s * share``, where the largest share decides; gradients are
summed by the formula of ``terms`` (``plan.links.summed_s``). Both say the same of the same step
(``tests/plan/steps/test_data_parallel.py``). ``timed_steps`` has the fits.

Where links were not measured, a sum has Pollux's form: so much on two workers, and so much more for each further one
(``DataParallelStep.linear``). Pass and sum together take (Tg^y + Tr^y)^(1/y), y = 1 for no overlap (Qiao et al.,
"Pollux", OSDI 2021, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from elastune.journal.records import TimesFitted
from elastune.plan.links import Hosts, RingLink, summed_s


@dataclass(frozen=True)
class DataParallelStep:
    """Seconds of one step of a global batch on W equal workers. ``overlap`` is Pollux's exponent.

    ``fixed_s`` is of every reduction, however many workers take part. ``latency_s`` and ``seconds_per_byte`` are of the
    link within a host; ``hosts``: where there are several, what connects them.
    """

    base_s: float
    per_sample_s: float
    latency_s: float
    seconds_per_byte: float
    grad_bytes: int
    overlap: float = 1.0
    fixed_s: float = 0.0
    hosts: Hosts | None = None

    @classmethod
    def linear(
        cls, base_s: float, per_sample_s: float, pair_s: float, per_worker_s: float, overlap: float = 1.0
    ) -> DataParallelStep:
        """Pollux's: a reduction of two workers takes ``pair_s``, and ``per_worker_s`` more for each further one."""
        return cls(base_s, per_sample_s, per_worker_s / 2, 0.0, 0, overlap, pair_s - per_worker_s)

    @classmethod
    def from_record(cls, record: TimesFitted) -> DataParallelStep:
        """The model that a journal holds."""
        across = record.across
        return cls(
            base_s=record.base_s,
            per_sample_s=record.per_sample_s,
            latency_s=record.latency_s,
            seconds_per_byte=record.seconds_per_byte,
            grad_bytes=record.grad_bytes,
            hosts=None
            if across is None
            else Hosts(RingLink(across.latency_s, across.seconds_per_byte), record.workers_per_host),
        )

    @property
    def link(self) -> RingLink:
        """The link within a host."""
        return RingLink(self.latency_s, self.seconds_per_byte)

    def hosts_for(self, workers: int) -> int:
        """On how many hosts so many workers stand: as few as it takes."""
        return 1 if self.hosts is None else self.hosts.needed(workers)

    def gradient_s(self, batch: int, workers: int, passes: int = 1) -> float:
        """Seconds until the worker with the largest share has its gradient, in so many ``passes``."""
        if batch < 1 or workers < 1:
            raise ValueError(f"a step needs batch >= 1 and workers >= 1, not {batch} and {workers}")
        return passes * self.base_s + self.per_sample_s * -(-batch // workers)

    def reduction_s(self, workers: int, hosts: int | None = None) -> float:
        """Seconds of one all-reduce of the gradients; 0 for a lone worker. ``hosts``: None for as few as it takes."""
        if workers == 1:
            return 0.0
        count = 1 if self.hosts is None else min(workers, hosts or self.hosts.needed(workers))
        across = self.link if self.hosts is None else self.hosts.link
        return self.fixed_s + float(summed_s(self.link, across, self.grad_bytes, workers, count))

    def step_s(self, batch: int, workers: int, hosts: int | None = None, *, passes: int = 1, every: int = 1) -> float:
        """Seconds of one whole step.

        Args:
            batch: Samples of all workers.
            workers: How many.
            hosts: On how many of them these stand; None for as few as it takes.
            passes: In how many the largest share is run.
            every: Steps from one reduction to the next; each has its part of it.
        """
        reduction_s = self.reduction_s(workers, hosts) / every
        return overlapped(self.gradient_s(batch, workers, passes), reduction_s, self.overlap)


def overlapped(compute_s: float, reduce_s: float, overlap: float) -> float:
    """(compute^y + reduce^y)^(1/y): the sum for y = 1, the larger of both as y grows."""
    longer, shorter = max(compute_s, reduce_s), max(min(compute_s, reduce_s), 0.0)
    if longer <= 0:
        return 0.0
    # Scaled by the longer, so that small times under a large exponent do not underflow.
    return longer * float((1.0 + (shorter / longer) ** overlap) ** (1.0 / overlap))
