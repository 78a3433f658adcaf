"""Goodput: batch and workers together, by samples a second times what a sample is worth at that batch.

Source: Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021, for one
job: the efficiency of section 3.1 from the measured gradient noise, the step times of section 3.2 fitted while the job
runs, and section 4.1's exploring with optimistic priors: what was not seen yet is taken to cost nothing, and at most
twice the workers and twice the batch seen so far are tried at once. Beyond Pollux: where a setting was measured, its
measured step time counts, not the fitted one, so that a setting which the model flatters is tried once and left.

What it cannot do: weigh workers against their price (all that pay at all are taken; bound them with ``max_workers``);
know nodes (all reductions are of one kind) or micro-batches (the passes of a step are one compute time); tell a slow
host from a slow setting; see that a larger batch with a poor learning rate trains worse than the noise scale promises.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from elastune.core.errors import UserError
from elastune.core.signals import Snapshot
from elastune.plan.goodput import Noise, Performance, efficiency, overlapped
from elastune.policies.base import Hook, Policy
from elastune.policies.lr_rules import check_rule

if TYPE_CHECKING:
    from elastune.policies.run import Run

MOST_OBSERVED = 64  # settings whose newest times are kept
LEAST_EVERY = 5  # steps; the monitor needs some to tell the new setting's times
RETRY_LOOKS = 10  # how many looks later workers are asked for again that have not come
OVERLAPS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)


@dataclass(frozen=True)
class Observed:
    """Measured at ``workers`` and a global ``batch``: seconds of a step, ``compute_s`` of them before the reduction."""

    workers: int
    batch: int
    step_s: float
    compute_s: float

    @property
    def local(self) -> int:
        """Samples of the worker with the largest share."""
        return -(-self.batch // self.workers)


@dataclass(frozen=True)
class Room:
    """Bounds, both ends included: workers from ``low`` to ``high``, batches from ``smallest`` to ``largest``."""

    low: int
    high: int
    smallest: int
    largest: int

    def settings(self) -> Iterator[tuple[int, int]]:
        """(workers, batch), fewest and smallest first; batches are ``smallest`` x 1, 1.5, 2, 3 ... and ``largest``."""
        doublings = range(max(self.largest // self.smallest, 1).bit_length())
        batches = {round(self.smallest * part * (1 << k)) for k in doublings for part in (1.0, 1.5)}
        batches = {batch for batch in batches if batch <= self.largest} | {self.largest}
        for workers in range(self.low, self.high + 1):
            yield from ((workers, batch) for batch in sorted(batches) if batch >= workers)


def fit(observed: Sequence[Observed]) -> Performance:
    """Pollux's parameters from at least one observation, by least squares on relative errors of compute and step times.

    Linear in all parameters but the overlap, of which the best of ``OVERLAPS`` is taken. Optimistic about what was not
    seen: with one local batch only, further samples are taken to cost nothing; so are reductions before two workers
    were seen, and further workers before three were.
    """
    workers = np.array([o.workers for o in observed], dtype=float)
    local = np.array([o.local for o in observed], dtype=float)
    compute_s = np.array([o.compute_s for o in observed])
    step_s = np.array([o.step_s for o in observed])
    base, by_sample = _line(local, compute_s, compute_s)
    several = workers > 1
    if not several.any():
        return Performance(base, by_sample, 0.0, 0.0, 0.0, 0.0, 1.0)

    def candidate(overlap: float) -> Performance:
        share = np.minimum(compute_s / step_s, 1.0)[several]
        reduce_s = step_s[several] * (1 - share**overlap) ** (1 / overlap)
        fixed, by_worker = _line(workers[several] - 2, reduce_s, step_s[several])
        return Performance(base, by_sample, fixed, by_worker, fixed, by_worker, overlap)

    def error(perf: Performance) -> float:
        """As AdaptDL's: of logarithms, and a little against overlap."""
        predicted = np.array([predicted_s(perf, o.workers, o.batch) for o in observed])
        return float(np.mean(np.log(predicted / step_s) ** 2)) + 1e-5 * (perf.overlap - 1) ** 2

    return min(map(candidate, OVERLAPS), key=error)


def _line(x: NDArray[np.float64], y: NDArray[np.float64], scale: NDArray[np.float64]) -> tuple[float, float]:
    """Offset and slope, neither negative, of y over x, errors being relative to ``scale``; slope 0 for one x."""
    columns = [np.ones_like(x), x] if np.ptp(x) > 0 else [np.ones_like(x)]
    found, _ = nnls(np.stack(columns, axis=1) / scale[:, None], y / scale)
    return float(found[0]), float(found[1]) if len(found) > 1 else 0.0


def predicted_s(perf: Performance, workers: int, batch: int) -> float:
    """Seconds of a step of ``batch`` samples, of which the largest share decides."""
    compute_s = perf.alpha_compute + perf.beta_compute * -(-batch // workers)
    reduce_s = perf.alpha_local + perf.beta_local * (workers - 2) if workers > 1 else 0.0
    return overlapped(compute_s, reduce_s, perf.overlap)


def better(
    now: tuple[int, int],
    observed: Sequence[Observed],
    perf: Performance,
    noise: Noise,
    base_batch: int,
    room: Room,
    gain: float,
) -> tuple[int, int]:
    """The (workers, batch) to go to from ``now``, one of ``observed``; ``now`` itself where no goodput in ``room``
    exceeds its own by the part ``gain``. ``perf``: their ``fit``; ``noise.variance``: at ``base_batch``.
    """
    measured_s = {(o.workers, o.batch): o.step_s for o in observed}

    def goodput(setting: tuple[int, int]) -> float:
        workers, batch = setting
        step_s = measured_s.get(setting) or predicted_s(perf, workers, batch)
        return batch / step_s * efficiency(noise, batch, base_batch)

    if max(map(goodput, room.settings())) <= (1 + gain) * goodput(now):
        return now
    # One stride towards it, which need not bring the whole gain.
    most_workers, largest = max(o.workers for o in observed), max(o.batch for o in observed)
    near = replace(
        room,
        high=max(min(room.high, 2 * most_workers), room.low),
        largest=max(min(room.largest, 2 * largest), room.smallest),
    )
    return max((now, *near.settings()), key=goodput)


@dataclass(frozen=True)
class Outlook:
    """What it has measured, newest last, and asked for.

    Attributes:
        setting: The present workers and batch.
        steps: Steps made with this setting since the last look.
        observed: The newest measurement of each setting.
        asked: Workers that were asked for last, and at which step.
    """

    setting: tuple[int, int] = (0, 0)
    steps: int = 0
    observed: tuple[Observed, ...] = ()
    asked: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Goodput(Policy):
    """Look after ``every`` steps with one setting, and change what promises more than ``gain`` (0.05: 5 %).

    Batches lie between the program's own and ``max_batch`` samples, workers within the run's limits; ``fixed_workers``
    leaves these alone. Workers take time to come: meanwhile the batch is the best one for those that are there.
    ``lr``: the rule by which the learning rate follows the batch; Pollux uses AdaScale.
    """

    monitors: ClassVar[tuple[str, ...]] = ("noise_scale", "performance")
    hooks: ClassVar[tuple[Hook, ...]] = ("after_step",)

    max_batch: int = 4096
    every: int = 50
    gain: float = 0.05
    lr: str = "adascale"
    fixed_workers: bool = False

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise UserError("the largest batch holds at least one sample", self.max_batch, "give max_batch=4096, say")
        if self.every < LEAST_EVERY:
            raise UserError(f"goodput looks after {LEAST_EVERY} steps or more", self.every, "give every=50, say")
        if not 0 < self.gain < math.inf:
            raise UserError("a gain in goodput is a positive part of it", self.gain, "give gain=0.05, say, for 5 %")
        check_rule(self.lr)

    def init(self) -> Outlook:
        return Outlook()

    def decide(self, hook: Hook, state: Outlook, run: Run) -> Outlook:
        """After ``every`` steps with one setting, look around."""
        setting = (run.size(), run.batch_size())
        steps = state.steps + 1 if setting == state.setting else 0
        state = replace(state, setting=setting, steps=steps % self.every)
        if steps < self.every:
            return state
        seen, noise = observe(run.snapshot), gradient_noise(run.snapshot)
        if seen is None:
            return state
        others = (o for o in state.observed if (o.workers, o.batch) != setting)
        state = replace(state, observed=(*others, seen)[-MOST_OBSERVED:])
        return state if noise is None else self._move(state, noise, run)

    def _move(self, state: Outlook, noise: Noise, run: Run) -> Outlook:
        smallest = run.snapshot.batch_at_start or run.batch_size()
        longest = run.limits.longest_batch or self.max_batch
        low, high, size = run.limits.low, run.limits.high, run.size()
        room = Room(low, high, smallest, max(min(self.max_batch, longest), smallest))
        here, now = replace(room, low=size, high=size), (size, run.batch_size())
        perf = fit(state.observed)
        _, batch = better(now, state.observed, perf, noise, smallest, here, self.gain)
        if batch != run.batch_size():
            run.set_batch_size(batch, lr=self.lr)
        if self.fixed_workers:
            return state
        workers, _ = better(now, state.observed, perf, noise, smallest, room, self.gain)
        pending = workers == state.asked[0] and run.step - state.asked[1] < RETRY_LOOKS * self.every
        if workers == size or pending:
            return state
        run.resize(workers)
        return replace(state, asked=(workers, run.step))


def observe(now: Snapshot) -> Observed | None:
    """What the performance monitor says of the present setting; None where it has not told yet."""
    parts = [now.signals.get(name) for name in ("step_s", "data_s", "compute_s")]
    step_s, data_s, compute_s = (math.nan if part is None else part.value for part in parts)
    busy_s = min(data_s + compute_s, step_s)
    if not (busy_s > 0 and step_s < math.inf):
        return None
    return Observed(now.workers, now.batch_size, step_s, busy_s)


def gradient_noise(now: Snapshot) -> Noise | None:
    """The gradient's noise at the batch that the run began with; None until it is measured."""
    parts = [now.signals.get(name) for name in ("gradient_variance", "gradient_square")]
    variance, square = (math.nan if part is None else part.value for part in parts)
    if not (0 <= variance < math.inf and math.isfinite(square)):
        return None
    return Noise(gradient_sqr=max(square, 0.0), variance=variance / (now.batch_at_start or now.batch_size))
