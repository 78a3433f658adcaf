"""How trials gain by more workers, by the size of their batches: fitted to what a study's own trials have shown. Pure.

Along the logarithm of its workers the logarithm of a trial's speed rises by a slope of its own in each octave (from
2^j to 2^(j+1) workers; ln 2 is perfect scaling). Trials of like batches gain alike, small batches little: slopes are
fitted by least squares to what every trial gained between two numbers of workers, trials of a like batch counting most
(a Gaussian kernel over octaves of the batch), drawn towards the shape of all trials while few are known (a ridge, as
for a prior of ``STRENGTH`` octaves). Steps far off the fit count less (Huber, "Robust Estimation of a Location
Parameter", 1964): one noisy measurement moves nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from elastune.study.allocation.throughput import Floats, MeasuredRates, Prior, ThroughputTable

NEAR = 0.5  # octaves of the batch at which another trial counts exp(-1/2)
STRENGTH = 0.5  # octaves of workers, shown by trials of just this batch, that count as much as all trials' shape
WEAK = 0.05  # the same for one slope in all octaves, towards which the shape of all trials is drawn
OFF = 0.3  # of a logarithm of speed: what is further off the fit counts less
ROUNDS = 3


@dataclass(frozen=True)
class Shown:
    """A trial's ``rates`` (workers that count, steps a second), ascending, at so many samples a step."""

    batch: float
    rates: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Gains:
    """What trials gained from one number of workers to the next: ``rises`` of the logarithm of speed, shape (n).

    ``octaves``: how much of each octave of workers lies between, shape (n, octaves). ``batches``: log2, shape (n).
    """

    octaves: Floats
    rises: Floats
    batches: Floats


def gains(shown: Sequence[Shown]) -> Gains:
    """Every step of every trial from one number of workers to the next."""
    steps = [(*pair, one.batch) for one in shown for pair in zip(one.rates, one.rates[1:], strict=False)]
    most = max((after[0] for _, after, _ in steps), default=1.0)
    count = max(1, math.ceil(math.log2(most) - 1e-9))
    ends = np.array([[math.log2(before[0]), math.log2(after[0])] for before, after, _ in steps]).reshape(-1, 2)
    begins = np.arange(count)
    inside = np.minimum(ends[:, 1:], begins + 1) - np.maximum(ends[:, :1], begins)
    return Gains(
        np.maximum(inside, 0.0),
        np.array([math.log(after[1] / before[1]) for before, after, _ in steps]),
        np.array([math.log2(batch) for _, _, batch in steps]),
    )


def slopes(known: Gains, batch: float | None = None) -> Floats:
    """Rise of the logarithm of speed in each octave of workers, of trials of ``batch``; None: of all alike."""
    if not len(known.rises):
        return np.zeros(known.octaves.shape[1])
    usual = float(np.clip(known.rises.sum() / known.octaves.sum(), 0.0, math.log(2)))
    common = _fitted(known, np.ones(len(known.rises)), np.full(known.octaves.shape[1], usual), WEAK)
    if batch is None:
        return common
    weights = np.exp(-0.5 * ((known.batches - math.log2(batch)) / NEAR) ** 2)
    return _fitted(known, weights, common, STRENGTH)


def _fitted(known: Gains, weights: Floats, prior: Floats, strength: float) -> Floats:
    """Ridge regression towards ``prior``, repeated with less weight for what is far off."""
    found, counting = prior, weights
    for _ in range(ROUNDS):
        weighted = known.octaves * counting[:, None]
        left = weighted.T @ known.octaves + strength * np.eye(len(prior))
        found = np.asarray(np.linalg.solve(left, weighted.T @ known.rises + strength * prior), dtype=float)
        off = np.abs(known.rises - known.octaves @ found)
        counting = weights * np.minimum(1.0, OFF / np.maximum(off, 1e-12))
    return found


def risen(found: Floats, workers: float) -> float:
    """The logarithm of the speed on ``workers`` over that on one; beyond the last octave as at its end."""
    inside = np.clip(math.log2(workers) - np.arange(len(found)), 0.0, 1.0)
    return float(inside @ found)


class BatchTable(ThroughputTable):
    """As ``ThroughputTable``, but trials gain alike by more workers only where their batches are alike.

    What lies beyond what any trial ran on is ``MeasuredRates``'s own guess, as there.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        super().__init__(prior)
        self._batches: dict[int, float] = {}
        self._gains = gains([])
        self._seen_on: tuple[float, float] = (1.0, 1.0)
        self._slots: int | None = None

    def has_batch(self, trial: int, samples: float) -> None:
        """``trial`` takes so many samples a step."""
        self._batches[trial] = samples

    def of(self, trial: int, slots: int | None = None) -> MeasuredRates:
        """The trial's own rates, and what others of a like batch let expect, up to the most that any ran on."""
        self._slots = slots
        return super().of(trial, slots)

    def _learn(self) -> None:
        rows = [self._counting(trial) for trial in self._shaping]
        self._gains = gains([Shown(self._batches.get(k, 1.0), row) for k, row in zip(self._shaping, rows, strict=True)])
        counts = [workers for row in rows for workers, _ in row]
        self._seen_on = (min(counts), max(counts)) if counts else (1.0, 1.0)

    def _expected(self, trial: int) -> dict[int, float]:
        if not self._shaping:
            return {}
        found = slopes(self._gains, self._batches.get(trial))
        low, high = self._seen_on
        octaves = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
        asked = {*(2**octave for octave in octaves), *self._seen.get(trial, ())}
        return {workers: math.exp(risen(found, self._counts(workers))) for workers in sorted(asked)}

    def _reaches(self, workers: int, own: dict[int, float]) -> bool:
        return True

    def _batch(self, trial: int) -> float | None:
        return self._batches.get(trial)

    def _counting(self, trial: int) -> tuple[tuple[float, float], ...]:
        """Its rates by workers that count."""
        found: dict[float, list[float]] = {}
        for workers, rate in sorted(self._rates(trial).items()):
            found.setdefault(self._counts(workers), []).append(rate)
        return tuple((workers, fmean(rates)) for workers, rates in sorted(found.items()))

    def _counts(self, workers: int) -> float:
        """With slots, 5 to 7 workers are as good as 4 where there are 8."""
        return float(workers) if self._slots is None else self._slots / -(-self._slots // workers)
