"""How fast a trial goes on so many workers: by what was measured, or by what others measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Prior = Callable[[float | None], Mapping[int, float]]
"""Samples of a step, None where they are not known -> steps a second by numbers of workers, as they were predicted."""
MOST_SHAPED = 48  # trials whose gain by more workers is looked at
FEWEST = 2  # trials must have run on so many workers, or nothing is said of them
POLISHES = 4


@dataclass(frozen=True)
class MeasuredRates:
    """MeasuredRates (workers, samples a second), in any order; none at all for a trial that nobody has seen run.

    Between points: straight lines, from 0 on. Beyond the last: on along its last line up to twice those workers, the
    optimistic prior of Pollux (section 4.1), and nothing more. Without points: see ``allocate``. With ``slots``
    (``exact`` mode: work is dealt out in so many equal parts) the largest share decides: 8 slots on 5 to 7 workers go
    as on 4.
    """

    points: tuple[tuple[int, float], ...] = ()
    slots: int | None = None

    def __post_init__(self) -> None:
        counts = [workers for workers, _ in self.points]
        if len(set(counts)) < len(counts) or any(w < 1 or not 0 < rate < math.inf for w, rate in self.points):
            raise ValueError(f"one rate above 0 for each number of workers is needed, not {self.points}")


@lru_cache(maxsize=4096)
def samples_per_s(throughput: MeasuredRates, most: int, low: int = 1, unknown: float = 1.0) -> Floats:
    """Samples a second on 0, 1 ... ``most`` workers; ``unknown``: of one worker where nothing was measured."""
    counts = np.arange(most + 1, dtype=float)
    if throughput.slots is not None:
        counts[1:] = throughput.slots / np.ceil(throughput.slots / counts[1:])
    found: Floats = np.interp(counts, *_known(throughput, low, unknown))
    found.flags.writeable = False  # others have the same array
    return found


def _known(throughput: MeasuredRates, low: int, unknown: float) -> tuple[list[float], list[float]]:
    """Workers that count, and rates on them: 0 and 0, the measured ones, and how it may go on beyond."""
    rates: dict[float, list[float]] = {}
    for workers, rate in throughput.points or [(low, low * unknown)]:
        slots = throughput.slots
        counting = float(workers) if slots is None else slots / -(-slots // workers)
        rates.setdefault(counting, []).append(rate)
    points = [(0.0, 0.0), *((workers, fmean(found)) for workers, found in sorted(rates.items()))]
    (before, slow), (last, fast) = points[-2:]
    beyond = fast + max(fast - slow, 0.0) / (last - before) * last
    return [*(workers for workers, _ in points), 2 * last], [*(rate for _, rate in points), beyond]


class ThroughputTable:
    """What a study's trials have shown of their speed, in steps a second, and what that tells of others.

    Trials differ in speed, but gain alike by more workers: the logarithm of a rate is taken for the sum of one number
    for the trial and one for its workers, found by median polish (Tukey, "Exploratory Data Analysis", 1977, chapter
    11) over the newest ``MOST_SHAPED`` trials that ran on several numbers of workers. What a trial measured itself
    counts more than what others say of it. ``prior``: what is taken where no trial has shown it.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        self._prior = prior
        self._seen: dict[int, dict[int, tuple[float, float]]] = {}
        self._shaping: dict[int, None] = {}
        self._shape: dict[int, float] = {}
        self._learnt = False
        self._usual: dict[int, float] = {}
        self._stale = 0  # rates that have come since the shape was found
        self._found: dict[int, MeasuredRates] = {}  # what ``of`` has answered, while nothing else is known

    def add(self, trial: int, workers: int, steps: int, seconds: float) -> None:
        """``trial`` took ``seconds`` for so many ``steps``."""
        seen = self._seen.setdefault(trial, {})
        before, before_s = seen.get(workers, (0.0, 0.0))
        seen[workers] = before + steps, before_s + seconds
        fewest, rate = min(self._rates(trial).items())
        self._usual[trial] = rate / fewest
        if len(seen) > 1:
            self._shaping.pop(trial, None)
            self._shaping[trial] = None
            if len(self._shaping) > MOST_SHAPED:
                del self._shaping[next(iter(self._shaping))]
            self._stale += 1
        self._found.pop(trial, None)

    @property
    def known(self) -> bool:
        """Whether anybody has shown any speed."""
        return bool(self._usual)

    def of(self, trial: int, slots: int | None = None) -> MeasuredRates:
        """The trial's own rates, and what others' let expect up to twice the workers that it ran on.

        Of a trial that never ran all that others' let expect. What lies beyond is ``MeasuredRates``'s own guess.
        """
        if not self._learnt or self._stale > len(self._shaping) // 4:
            self._learn()
            self._learnt, self._stale = True, 0
            self._found.clear()
        known = self._found.get(trial)
        if known is not None and known.slots == slots:
            return known
        shape = self._foreseen(trial, self._expected(trial))
        fewest = min(shape, default=1)  # where nobody ran on one, nobody knows what two are over one
        own = self._rates(trial) if trial in self._seen else {fewest: fewest * self.per_worker(trial)}
        points = dict(own)
        for workers, value in shape.items():
            if workers not in own and (trial not in self._seen or self._reaches(workers, own)):
                near = min(own, key=lambda seen: (abs(math.log(seen / workers)), seen))
                base = shape.get(near)
                points[workers] = own[near] * (value / base if base else workers / near)
        found = MeasuredRates(tuple(sorted(points.items())), slots)
        if trial in self._seen:
            self._found[trial] = found
        return found

    def _foreseen(self, trial: int, shape: dict[int, float]) -> dict[int, float]:
        """``shape``, which trials have shown, and what was predicted of other numbers of workers."""
        told = {} if self._prior is None else self._prior(self._batch(trial))
        found = dict(shape)
        for workers, rate in told.items():
            if workers not in shape:
                near = min(shape, key=lambda seen: (abs(math.log(seen / workers)), seen), default=None)
                base = None if near is None else told.get(near)
                found[workers] = rate if near is None else shape[near] * (rate / base if base else workers / near)
        return found

    def per_worker(self, trial: int) -> float:
        """Steps a second of a worker on the fewest that the trial ran on; the newest trials' median, if it never ran.

        1 where nobody ever ran.
        """
        if trial in self._usual:
            return self._usual[trial]
        return median(list(self._usual.values())[-MOST_SHAPED:]) if self._usual else 1.0

    def measured(self, trial: int) -> bool:
        """Whether the trial itself has shown any speed."""
        return trial in self._usual

    def has_batch(self, trial: int, samples: float) -> None:
        """``trial`` takes so many samples a step: nothing to this table, to whom all trials gain alike."""

    def _learn(self) -> None:
        """Look again at all that trials have shown."""
        self._shape = _polished([self._rates(trial) for trial in self._shaping])

    def _expected(self, trial: int) -> dict[int, float]:
        """Workers -> speed relative to one another, as ``trial`` may be expected to have it."""
        return self._shape

    def _reaches(self, workers: int, own: dict[int, float]) -> bool:
        """Whether that is believed of so many workers, of a trial that ran on those of ``own``."""
        return self._prior is not None or workers <= 2 * max(own)

    def _batch(self, trial: int) -> float | None:
        """Samples of its step, where that is known."""
        return None

    def _rates(self, trial: int) -> dict[int, float]:
        return {workers: steps / seconds for workers, (steps, seconds) in self._seen[trial].items()}


def _polished(rows: list[dict[int, float]]) -> dict[int, float]:
    """Workers -> speed relative to one another, from rates of several trials."""
    logs = [{workers: math.log(rate) for workers, rate in row.items()} for row in rows]
    shape: dict[int, float] = defaultdict(float)
    found: dict[int, list[float]] = {}
    for _ in range(POLISHES):
        levels = [median(value - shape[workers] for workers, value in row.items()) for row in logs]
        found = defaultdict(list)
        for level, row in zip(levels, logs, strict=True):
            for workers, value in row.items():
                found[workers].append(value - level)
        shape = defaultdict(float, {workers: median(values) for workers, values in found.items()})
    return {workers: math.exp(value) for workers, value in shape.items() if len(found[workers]) >= FEWEST}
