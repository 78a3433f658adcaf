"""How long a data-parallel step takes: one small model, fitted from a few measurements, for settings not measured.

Gradient: every worker runs its share of the global batch, ``base_s + per_sample_s * share``; the largest share decides.
Reduction: a ring all-reduce over the link (``plan.links``); on several hosts one among the workers of each, over the
link within, and one among hosts, over the link across: what the two levels of ``comm.levels`` take.
Where links were not measured, Pollux's form of it: what a reduction of two workers takes, and so much more for each
further worker (``StepTime.linear``).
Both together: (Tg^y + Tr^y)^(1/y), y = 1 for no overlap (Qiao et al., "Pollux", OSDI 2021, section 3.2).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.journal.records import LinkMeasured, TimesFitted
from elastune.plan.links import Hosts, RingLink, fit_links

Floats = NDArray[np.float64]
OVERLAPS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # that ``fit_steps`` chooses among


@dataclass(frozen=True)
class Observation:
    """A measured step of a global ``batch``; ``compute_s``: the seconds of it before the reduction, where known.

    ``hosts``: on how many of them its workers stood.
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
class Estimate:
    """Seconds of a step, and whether they were ``measured`` or are a model's."""

    step_s: float
    measured: bool


class StepTimeModel(Protocol):
    """What planners ask: how long a step of a global batch takes on so many workers."""

    def estimate(self, batch: int, workers: int) -> Estimate: ...


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of a global batch on W equal workers in data parallel. ``overlap`` is Pollux's exponent.

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
    ) -> StepTime:
        """Pollux's: a reduction of two workers takes ``pair_s``, and ``per_worker_s`` more for each further one."""
        return cls(base_s, per_sample_s, per_worker_s / 2, 0.0, 0, overlap, pair_s - per_worker_s)

    def gradient_s(self, batch: int, workers: int) -> float:
        """Seconds until the worker with the largest share has its gradient."""
        if batch < 1 or workers < 1:
            raise ValueError(f"a step needs batch >= 1 and workers >= 1, not {batch} and {workers}")
        return self.base_s + self.per_sample_s * -(-batch // workers)

    @property
    def link(self) -> RingLink:
        """The link within a host."""
        return RingLink(self.latency_s, self.seconds_per_byte)

    def hosts_for(self, workers: int) -> int:
        """On how many hosts so many workers stand: as few as it takes."""
        return 1 if self.hosts is None else self.hosts.needed(workers)

    def reduction_s(self, workers: int, hosts: int | None = None) -> float:
        """Seconds of one all-reduce of the gradients; 0 for a lone worker. ``hosts``: None for as few as it takes."""
        if workers == 1:
            return 0.0
        count = min(workers, self.hosts_for(workers) if hosts is None else hosts)
        if count == 1 or self.hosts is None:
            return self.fixed_s + self.link.ring_s(self.grad_bytes, workers)
        within_s = self.link.ring_s(self.grad_bytes, -(-workers // count))
        return self.fixed_s + within_s + self.hosts.link.ring_s(self.grad_bytes, count)

    def step_s(self, batch: int, workers: int, hosts: int | None = None) -> float:
        """Seconds of one whole step. ``hosts``: None for as few as it takes."""
        return overlapped(self.gradient_s(batch, workers), self.reduction_s(workers, hosts), self.overlap)

    def estimate(self, batch: int, workers: int) -> Estimate:
        """The same for planners."""
        return Estimate(self.step_s(batch, workers), measured=False)

    def epoch_s(self, samples: int, batch: int, workers: int) -> float:
        """Seconds of one pass over ``samples``, a smaller last batch included."""
        full, rest = divmod(samples, batch)
        last_s = self.step_s(rest, workers) if rest else 0.0
        return (full * self.step_s(batch, workers) if full else 0.0) + last_s

    @classmethod
    def from_record(cls, record: TimesFitted) -> StepTime:
        """The model that a journal holds."""
        return cls(
            base_s=record.base_s,
            per_sample_s=record.per_sample_s,
            latency_s=record.latency_s,
            seconds_per_byte=record.seconds_per_byte,
            grad_bytes=record.grad_bytes,
            hosts=None
            if record.across is None
            else Hosts(RingLink(record.across.latency_s, record.across.seconds_per_byte), record.workers_per_host),
        )


@dataclass(frozen=True)
class CalibratedTimes:
    """Measured seconds, by batch and workers, and a model for the rest: what the model flatters is tried once."""

    model: StepTime
    measured: Mapping[tuple[int, int], float]

    def estimate(self, batch: int, workers: int) -> Estimate:
        """Seconds of a step, measured where they were."""
        seconds = self.measured.get((batch, workers))
        return self.model.estimate(batch, workers) if seconds is None else Estimate(seconds, measured=True)


@dataclass(frozen=True)
class ReductionObserved:
    """A measured all-reduce."""

    bytes: int
    workers: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A fitted model, the worker counts it was fitted or checked on, and predicted over measured for held-out steps."""

    model: StepTime
    measured_workers: tuple[int, ...]
    errors: dict[str, float]

    def to_record(self) -> TimesFitted:
        """The serialised form. It has no field for overlap or a fixed part: models with them are refused."""
        if self.model.overlap != 1.0 or self.model.fixed_s:
            raise ValueError(f"the journal holds no overlap exponent and no fixed part, {self.model} has")
        return TimesFitted(
            base_s=self.model.base_s,
            per_sample_s=self.model.per_sample_s,
            latency_s=self.model.latency_s,
            seconds_per_byte=self.model.seconds_per_byte,
            grad_bytes=self.model.grad_bytes,
            measured_workers=list(self.measured_workers),
            errors=self.errors,
            across=None if self.model.hosts is None else self.model.hosts.link.to_record(),
            workers_per_host=0 if self.model.hosts is None else self.model.hosts.workers_each,
        )


def fit_gradient(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(base_s, per_sample_s) from (share, seconds) pairs; repeats of a share count once, by their median.

    Least relative squared error with both parameters >= 0. From a single share only the sum can be known: it is then
    laid on the samples (base 0), which predicts no gain from larger shares that nobody measured.
    """
    shares, seconds = _medians(((float(share),), time_s) for share, time_s in samples)
    if not seconds or min(share for (share,) in shares) < 1:
        raise UserError("the step-time model needs measured gradients", f"{len(seconds)} shares", "measure one step")
    if len(seconds) == 1:
        return 0.0, seconds[0] / shares[0][0]
    return _fit_relative([(1.0, share) for (share,) in shares], seconds)


def fit_reductions(reductions: Sequence[ReductionObserved]) -> RingLink | None:
    """The link of the ring model from all-reduces of gradients; None where none of several workers is among them."""
    points, seconds = _medians(((float(r.bytes), float(r.workers)), r.seconds) for r in reductions if r.workers > 1)
    if not seconds:
        return None
    rows = [(2 * (workers - 1), 2 * (workers - 1) / workers * size) for size, workers in points]
    return RingLink(*_fit_relative(rows, seconds))


def fit(
    gradients: Sequence[tuple[int, float]],
    grad_bytes: int,
    reductions: Sequence[ReductionObserved] = (),
    links: Sequence[LinkMeasured] = (),
    held_out: Sequence[Observation] = (),
    workers_per_host: int | None = None,
) -> Fit:
    """The model from steps of one worker, ``(share, seconds)``, and from all-reduces on one host or measured links.

    ``held_out`` steps take no part in the fit: ``errors`` tells predicted over measured for each, by its batch, worker
    count and hosts (repeats by their median). ``workers_per_host``: None where all workers are on one host.
    """
    base_s, per_sample_s = fit_gradient(gradients)
    within, hosts = fit_links(links, workers_per_host)
    within = fit_reductions(reductions) or within
    model = StepTime(base_s, per_sample_s, within.latency_s, within.seconds_per_byte, grad_bytes, hosts=hosts)
    measured = {1} | {r.workers for r in reductions} | {link.workers for link in links} | {s.workers for s in held_out}
    return Fit(model, tuple(sorted(measured)), prediction_errors(model, held_out))


def prediction_errors(model: StepTime, steps: Sequence[Observation]) -> dict[str, float]:
    """Predicted over measured seconds, by batch, workers and hosts: 1.0 is right, 1.2 is 20 % too slow."""
    points, seconds = _medians(((float(step.batch), step.workers, step.hosts), step.step_s) for step in steps)
    return {
        f"batch {batch:.0f} on {workers:.0f} workers" + (f" of {hosts:.0f} hosts" if hosts > 1 else ""): (
            model.step_s(int(batch), int(workers), int(hosts)) / measured
        )
        for (batch, workers, hosts), measured in zip(points, seconds, strict=True)
    }


def fit_steps(observed: Sequence[Observation]) -> StepTime:
    """The model from whole steps, at least one, each with its ``compute_s``; by relative errors of both times.

    Linear in all parameters but the overlap, of which the best of ``OVERLAPS`` is taken. Optimistic about what was not
    seen (Pollux, section 4.1): with one local batch only, further samples are taken to cost nothing; so are reductions
    before two workers were seen, and further workers before three were.
    """
    workers = np.array([o.workers for o in observed], dtype=float)
    share = np.array([o.share for o in observed], dtype=float)
    step_s = np.array([o.step_s for o in observed])
    compute_s = np.array([o.step_s if o.compute_s is None else o.compute_s for o in observed])
    base, by_sample = _line(share, compute_s, compute_s)
    several = workers > 1
    if not several.any():
        return StepTime.linear(base, by_sample, 0.0, 0.0)

    def candidate(overlap: float) -> StepTime:
        computing = np.minimum(compute_s / step_s, 1.0)[several]
        reduce_s = step_s[several] * (1 - computing**overlap) ** (1 / overlap)
        pair_s, by_worker = _line(workers[several] - 2, reduce_s, step_s[several])
        return StepTime.linear(base, by_sample, pair_s, by_worker, overlap)

    def error(model: StepTime) -> float:
        """As AdaptDL's: of logarithms, and a little against overlap."""
        predicted = np.array([model.step_s(o.batch, o.workers) for o in observed])
        return float(np.mean(np.log(predicted / step_s) ** 2)) + 1e-5 * (model.overlap - 1) ** 2

    return min(map(candidate, OVERLAPS), key=error)


def overlapped(compute_s: float, reduce_s: float, overlap: float) -> float:
    """(compute^y + reduce^y)^(1/y): the sum for y = 1, the larger of both as y grows."""
    longer, shorter = max(compute_s, reduce_s), max(min(compute_s, reduce_s), 0.0)
    if longer <= 0:
        return 0.0
    # Scaled by the longer, so that small times under a large exponent do not underflow.
    return longer * float((1.0 + (shorter / longer) ** overlap) ** (1.0 / overlap))


def _line(x: Floats, y: Floats, scale: Floats) -> tuple[float, float]:
    """Offset and slope, neither negative, of y over x, errors being relative to ``scale``; slope 0 for one x."""
    columns = [np.ones_like(x), x] if np.ptp(x) > 0 else [np.ones_like(x)]
    found = _nnls(np.stack(columns, axis=1) / scale[:, None], y / scale)
    return float(found[0]), float(found[1]) if len(found) > 1 else 0.0


def _nnls(columns: Floats, y: Floats) -> Floats:
    """The combination of ``columns``, none taken negatively, that is nearest to ``y``."""
    from scipy.optimize import nnls  # here: every worker's server imports this file, few fit anything

    found: Floats = nnls(columns, y)[0]
    return found


def _medians(observed: Iterable[tuple[tuple[float, ...], float]]) -> tuple[list[tuple[float, ...]], list[float]]:
    """Distinct points in ascending order, and the median seconds of each. Raises on times that are no times."""
    repeats: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for point, seconds in observed:
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"a measured time is positive and finite, not {seconds}")
        repeats[point].append(seconds)
    points = sorted(repeats)
    return points, [median(repeats[point]) for point in points]


def _fit_relative(rows: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """x, y >= 0 that minimise the sum of ((row . (x, y)) / seconds - 1)^2, columns scaled so that both count."""
    design = np.asarray(rows, dtype=float) / np.asarray(seconds, dtype=float)[:, None]
    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0] = 1.0
    solution = _nnls(design / scale, np.ones(len(seconds)))
    first, second = (solution / scale).tolist()
    return first, second
