"""How fast a trial runs on a number of workers: as measured, as other trials suggest, or as a plan predicts.

``ThroughputTable`` assumes that all trials gain alike by more workers. ``BatchTable`` assumes it only of trials with
similar batch sizes: it fits one slope for each octave of workers by least squares, with a Gaussian kernel over octaves
of the batch and a ridge towards the shape of all trials. Outliers count less (Huber, "Robust Estimation of a Location
Parameter", 1964), so one noisy measurement moves no trial.
A plan's prediction is recorded in the journal once, and a resumed study uses the record alone. It limits execution
settings only, never what a trial learns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.core.formatting import count, duration, number
from elastune.core.journal.files import read
from elastune.core.journal.records import Entry, PlanMade, ScalingPredicted
from elastune.core.plan.step_time import check_program, last_plan, predicted_step
from elastune.core.run import ExecutionSettings
from elastune.runtime.job.output import JOURNAL

# [throughput] How fast a trial goes on so many workers: by what was measured, or by what others measured.

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


# [scaling] How trials gain by more workers, by the size of their batches: fitted to what a study's own trials have shown. Pure.
#
# Along the logarithm of its workers the logarithm of a trial's speed rises by a slope of its own in each octave (from
# 2^j to 2^(j+1) workers; ln 2 is perfect scaling). Trials of like batches gain alike, small batches little: slopes are
# fitted by least squares to what every trial gained between two numbers of workers, trials of a like batch counting most
# (a Gaussian kernel over octaves of the batch), drawn towards the shape of all trials while few are known (a ridge, as
# for a prior of ``STRENGTH`` octaves). Steps far off the fit count less (Huber, "Robust Estimation of a Location
# Parameter", 1964): one noisy measurement moves nobody.

NEAR = 0.5  # octaves of the batch at which another trial counts exp(-1/2)
STRENGTH = 0.5  # octaves of workers, shown by trials of just this batch, that count as much as all trials' shape
WEAK = 0.05  # the same for one slope in all octaves, towards which the shape of all trials is drawn
OFF = 0.3  # of a logarithm of speed: what is further off the fit counts less
ROUNDS = 3


@dataclass(frozen=True)
class MeasuredScaling:
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


def gains(shown: Sequence[MeasuredScaling]) -> Gains:
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


def log_speedup(found: Floats, workers: float) -> float:
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
        self._gains = gains(
            [MeasuredScaling(self._batches.get(k, 1.0), row) for k, row in zip(self._shaping, rows, strict=True)]
        )
        counts = [workers for row in rows for workers, _ in row]
        self._seen_on = (min(counts), max(counts)) if counts else (1.0, 1.0)

    def _expected(self, trial: int) -> dict[int, float]:
        if not self._shaping:
            return {}
        found = slopes(self._gains, self._batches.get(trial))
        low, high = self._seen_on
        octaves = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
        asked = {*(2**octave for octave in octaves), *self._seen.get(trial, ())}
        return {workers: math.exp(log_speedup(found, self._counts(workers))) for workers in sorted(asked)}

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


# [predicted] What a cluster's plan says of a study's trials: from how many workers on a further one brings nothing, and how trials
# gain by more until they have shown it themselves.
#
# It is put into the study's journal once, as a record; the study rests on that alone, so one that resumes decides as
# before. It bounds means only: what is drawn and summed follows the bounds that were asked for.

BATCH = "batch_size"  # by this name a program has its batch in its config
MOST_BATCHES = 16
BRINGS = 0.02  # of the shortest step: what is no more is nothing


def plan_in(folder: Path) -> PlanMade:
    """What ``elastune plan --out`` has kept in ``folder``. Raises ``UserError`` where there is none."""
    made = last_plan(read(folder / JOURNAL))
    if made is None:
        raise UserError("--plan names the folder of a plan", folder, "give the --out of elastune plan")
    return made


def predicted_in(entries: Sequence[Entry]) -> ScalingPredicted | None:
    """What a study's journal tells of it, if anything."""
    return next((entry.record for entry in entries if isinstance(entry.record, ScalingPredicted)), None)


def plan_if_readable(told: ScalingPredicted, program: object) -> PlanMade | None:
    """The plan of ``program`` that ``told`` came of; None where its folder is gone, or has something else by now."""
    try:
        made = plan_in(Path(told.source))
        check_program(made, program)
    except (UserError, ValueError):  # no path has a NUL
        return None
    return made


def predict_scaling(
    made: PlanMade,
    source: Path,
    program: Path,
    execution: ExecutionSettings,
    batches: Sequence[int],
    bounds: tuple[int, int],
) -> ScalingPredicted:
    """What ``made`` says of trials within ``bounds`` (low, high) that may have any of ``batches``.

    Args:
        made: The plan, from ``source``.
        source: Its folder.
        program: Of which it must be.
        means: Of a trial, whatever its workers.
        batches: Samples of a step.
        bounds: Workers, in whole replicas.

    Raises:
        UserError: For a plan of another program, and for means that it does not speak of.
    """
    check_program(made, program)
    replica = 1 if execution.mesh is None else execution.first_mesh.replica
    counts = range(bounds[0], bounds[1] + 1, replica)
    some = sorted(set(batches))
    some = [some[round(at * (len(some) - 1) / (MOST_BATCHES - 1))] for at in range(MOST_BATCHES)]
    steps, enough = list[tuple[int, int, float]](), 0
    for batch in sorted(set(some)):
        told = {workers: predicted_step(made, execution.on(_counting(execution, workers)), batch) for workers in counts}
        seconds = {workers: step_s for workers, step_s in told.items() if step_s is not None}
        if not seconds:
            fix = "leave out --plan, or use a mechanism of elastune's own"
            raise UserError("a plan speaks of elastune's own mechanisms", execution.mechanism, fix)
        steps += [(batch, workers, step_s) for workers, step_s in seconds.items()]
        least_s = min(seconds.values())
        enough = max(enough, next(w for w in counts if seconds[w] <= least_s * (1 + BRINGS)))
    return ScalingPredicted(str(source), steps, enough, _why(steps, enough, bounds[1]))


def bounded(told: ScalingPredicted | None, bounds: tuple[int, int]) -> tuple[int, int]:
    """``bounds`` (low, high) without the workers that bring nothing. Of more than were looked at nothing is known."""
    if told is None or told.most >= max(workers for _, workers, _ in told.steps):
        return bounds
    low, high = bounds
    return low, max(low, min(high, told.most))


def scaling_prior(told: ScalingPredicted | None, replica: int = 1) -> Prior | None:
    """What trials are taken to gain, in replicas of so many workers; None where nothing was predicted."""
    if told is None:
        return None
    by_batch: dict[int, dict[int, float]] = {}
    for batch, workers, step_s in told.steps:
        by_batch.setdefault(batch, {})[workers // replica] = 1 / step_s

    def prior(batch: float | None) -> Mapping[int, float]:
        usual = sorted(by_batch)[len(by_batch) // 2]
        near = usual if batch is None else min(by_batch, key=lambda each: abs(math.log(each / batch)))
        return by_batch[near]

    return prior


def _counting(execution: ExecutionSettings, workers: int) -> int:
    """In ``exact`` mode the largest share of slots decides: 8 slots on 5 to 7 workers go as on 4."""
    if execution.mode != "exact" or execution.mesh is not None:
        return workers
    slots = max(execution.num_slots, workers)
    return -(-slots // -(-slots // workers))


def _why(steps: Sequence[tuple[int, int, float]], enough: int, high: int) -> str:
    batch = max(each for each, _, _ in steps)
    seconds = {workers: step_s for each, workers, step_s in steps if each == batch}
    of = f"a step of {count(batch, 'sample')} takes {duration(seconds[enough])} on {count(enough, 'worker')}"
    if enough == high:
        return f"each worker up to {high} brings something: {of} (modelled)"
    return f"{of}, and {number(seconds[high] / seconds[enough], 3)} times as long on {high} (modelled)"
