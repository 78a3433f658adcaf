"""The step time of data parallelism for a program that was timed but not analysed, and its least-squares fit.

``step_time`` gives the time of a step on any mesh from counts of a program's work. Frontiers, and policies in a run,
count nothing: they have timed the program, and ask for other batches and other numbers of workers. To them all terms
of a pass are one line, ``base_s + per_sample_s * share``, where the largest share decides. Gradients are summed by the
formula of ``links.allreduce_s``. Both forms agree on the same step (a test holds that).

Where links were not measured, a sum has Pollux's form: a time for two workers, and an addition for each further one
(``DataParallelStep.linear``). Pass and sum together take (Tg^y + Tr^y)^(1/y), y = 1 for no overlap (Qiao et al.,
"Pollux", OSDI 2021, section 3.2).

``fit_parts`` is for a frontier, which measures on purpose: steps of one worker, and the link by itself. ``fit_steps``
is for a policy in a run, which sees whole steps on any number of workers. Neither has a prior or an interval: steps
that were held out show the error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from elastune.core.errors import UserError
from elastune.core.journal.records import LinkMeasured, TimesFitted
from elastune.core.plan.links import Hosts, RingLink, allreduce_s, fit_links
from elastune.core.plan.step_time import Floats

# The form of a step's time.


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
        """Return Pollux's form: a reduction of two workers takes ``pair_s``, and ``per_worker_s`` more for each further
        worker.
        """
        return cls(base_s, per_sample_s, per_worker_s / 2, 0.0, 0, overlap, pair_s - per_worker_s)

    @classmethod
    def from_record(cls, record: TimesFitted) -> DataParallelStep:
        """Return the model that a journal holds."""
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
        """Return the least number of hosts that have room for so many workers."""
        return 1 if self.hosts is None else self.hosts.needed(workers)

    def gradient_s(self, batch: int, workers: int, passes: int = 1) -> float:
        """Return the seconds until the worker with the largest share has its gradient, in so many ``passes``."""
        if batch < 1 or workers < 1:
            raise ValueError(f"a step needs batch >= 1 and workers >= 1, not {batch} and {workers}")
        return passes * self.base_s + self.per_sample_s * -(-batch // workers)

    def reduction_s(self, workers: int, hosts: int | None = None) -> float:
        """Return the seconds of one all-reduce of the gradients; 0 for a lone worker.

        ``hosts``: the number of hosts; None for the least possible.
        """
        if workers == 1:
            return 0.0
        count = 1 if self.hosts is None else min(workers, hosts or self.hosts.needed(workers))
        across = self.link if self.hosts is None else self.hosts.link
        return self.fixed_s + float(allreduce_s(self.link, across, self.grad_bytes, workers, count))

    def step_s(self, batch: int, workers: int, hosts: int | None = None, *, passes: int = 1, every: int = 1) -> float:
        """Return the seconds of one whole step.

        Args:
            batch: Samples of all workers.
            workers: The number of workers.
            hosts: The number of their hosts; None for the least possible.
            passes: The passes in which the largest share is run.
            every: Steps from one reduction to the next; each step carries its part of it.
        """
        reduction_s = self.reduction_s(workers, hosts) / every
        return overlapped(self.gradient_s(batch, workers, passes), reduction_s, self.overlap)


def overlapped(compute_s: float, reduce_s: float, overlap: float) -> float:
    """Return (compute^y + reduce^y)^(1/y): the sum for y = 1, the larger of both as y grows."""
    longer, shorter = max(compute_s, reduce_s), max(min(compute_s, reduce_s), 0.0)
    if longer <= 0:
        return 0.0
    # Scaled by the longer, so that small times under a large exponent do not underflow.
    return longer * float((1.0 + (shorter / longer) ** overlap) ** (1.0 / overlap))


# Least-squares fits to measured steps.

OVERLAPS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # that ``fit_steps`` chooses among


@dataclass(frozen=True)
class Observation:
    """A measured step of a global ``batch``.

    ``compute_s``: the seconds before the reduction, where known; ``hosts``: the number of hosts of its workers.
    """

    workers: int
    batch: int
    step_s: float
    compute_s: float | None = None
    hosts: int = 1

    @property
    def share(self) -> int:
        """Samples of the worker with the largest share."""
        return -(-self.batch // self.workers)


@dataclass(frozen=True)
class Fit:
    """A fitted model, with the numbers of workers that it was fitted or checked on.

    ``errors``: predicted over measured seconds of held-out steps.
    """

    model: DataParallelStep
    measured_workers: tuple[int, ...]
    errors: dict[str, float]

    def to_record(self) -> TimesFitted:
        """Return the serialised form. It has no field for overlap or a fixed part: models with them are refused."""
        model, hosts = self.model, self.model.hosts
        if model.overlap != 1.0 or model.fixed_s:
            raise ValueError(f"the journal holds no overlap exponent and no fixed part, {model} has")
        return TimesFitted(
            base_s=model.base_s,
            per_sample_s=model.per_sample_s,
            latency_s=model.latency_s,
            seconds_per_byte=model.seconds_per_byte,
            grad_bytes=model.grad_bytes,
            measured_workers=list(self.measured_workers),
            errors=self.errors,
            across=None if hosts is None else hosts.link.to_record(),
            workers_per_host=0 if hosts is None else hosts.workers_each,
        )


def fit_parts(
    gradients: Sequence[tuple[int, float]],
    grad_bytes: int,
    links: Sequence[LinkMeasured] = (),
    held_out: Sequence[Observation] = (),
    workers_per_host: int | None = None,
) -> Fit:
    """Return the model from steps of one worker, ``(share, seconds)``, and from measured links.

    ``held_out`` steps take no part in the fit: ``errors`` has predicted over measured seconds for each, by its batch,
    workers and hosts (repeats by their median). ``workers_per_host``: None where all workers are on one host.
    """
    base_s, per_sample_s = fit_gradient(gradients)
    within, hosts = fit_links(links, workers_per_host)
    model = DataParallelStep(base_s, per_sample_s, within.latency_s, within.seconds_per_byte, grad_bytes, hosts=hosts)
    timed = _medians(((step.batch, step.workers, step.hosts), step.step_s) for step in held_out)
    errors = {
        f"batch {batch} on {workers} workers" + (f" of {hosts} hosts" if hosts > 1 else ""): (
            model.step_s(batch, workers, hosts) / seconds
        )
        for (batch, workers, hosts), seconds in timed.items()
    }
    measured = {1} | {link.workers for link in links} | {step.workers for step in held_out}
    return Fit(model, tuple(sorted(measured)), errors)


def fit_gradient(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return (base_s, per_sample_s) from (share, seconds) pairs; repeats of a share count once, by their median.

    The fit has the least squared relative error with both parameters >= 0. A single share determines only the sum. It
    is then attributed to the samples (base 0), which predicts no gain from larger shares that nobody measured.
    """
    timed = _medians(((share,), time_s) for share, time_s in samples)
    if not timed or min(timed) < (1,):
        raise UserError("the step-time model needs measured gradients", f"{len(timed)} shares", "measure one step")
    shares, seconds = np.array([float(share) for (share,) in timed]), np.array(list(timed.values()))
    if len(timed) == 1:
        return 0.0, float(seconds[0] / shares[0])
    return _line(shares, seconds, seconds)


def fit_steps(observed: Sequence[Observation]) -> DataParallelStep:
    """Return the model from whole steps, at least one, each with its ``compute_s``, by relative errors of
    both times.

    The model is linear in all parameters but the overlap, of which the best of ``OVERLAPS`` is taken. It is optimistic
    about unseen settings (Pollux, section 4.1). With one local batch, further samples cost nothing. Reductions cost
    nothing before two workers were seen, and further workers before three were.
    """
    workers = np.array([o.workers for o in observed], dtype=float)
    share = np.array([o.share for o in observed], dtype=float)
    step_s = np.array([o.step_s for o in observed])
    compute_s = np.array([o.step_s if o.compute_s is None else o.compute_s for o in observed])
    base, by_sample = _line(share, compute_s, compute_s)
    several = workers > 1
    if not several.any():
        return DataParallelStep.linear(base, by_sample, 0.0, 0.0)

    def candidate(overlap: float) -> DataParallelStep:
        computing = np.minimum(compute_s / step_s, 1.0)[several]
        reduce_s = step_s[several] * (1 - computing**overlap) ** (1 / overlap)
        pair_s, by_worker = _line(workers[several] - 2, reduce_s, step_s[several])
        return DataParallelStep.linear(base, by_sample, pair_s, by_worker, overlap)

    def error(model: DataParallelStep) -> float:
        """As AdaptDL's: of logarithms, and a little against overlap."""
        predicted = np.array([model.step_s(o.batch, o.workers) for o in observed])
        return float(np.mean(np.log(predicted / step_s) ** 2)) + 1e-5 * (model.overlap - 1) ** 2

    return min(map(candidate, OVERLAPS), key=error)


def _line(x: Floats, y: Floats, scale: Floats) -> tuple[float, float]:
    """Offset and slope, neither negative, of y over x, errors being relative to ``scale``; slope 0 for one x."""
    from scipy.optimize import nnls  # here: every worker's server imports this file, few fit anything

    columns = [np.ones_like(x), x] if np.ptp(x) > 0 else [np.ones_like(x)]
    design = np.stack(columns, axis=1) / scale[:, None]
    sizes = design.max(axis=0)  # by which columns are divided, so that both count
    offset, *slope = (nnls(design / sizes, y / scale)[0] / sizes).tolist()
    return offset, slope[0] if slope else 0.0


def _medians(timed: Iterable[tuple[tuple[int, ...], float]]) -> dict[tuple[int, ...], float]:
    """Distinct points in ascending order, and the median seconds of each. Raises on times that are no times."""
    repeats: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for point, seconds in timed:
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"a measured time is positive and finite, not {seconds}")
        repeats[point].append(seconds)
    return {point: median(repeats[point]) for point in sorted(repeats)}
