"""How fast a trial runs on a number of workers: as measured, as other trials suggest, or as a plan predicts.

``ThroughputTable`` assumes that all trials gain alike by more workers. ``BatchTable`` assumes it only of trials with
similar batch sizes. It fits one slope for each octave of workers by least squares, weighted by a Gaussian kernel over
octaves of the batch. A ridge draws the slopes towards the shape of all trials. Outliers count less (Huber, "Robust
Estimation of a Location Parameter", 1964), so one noisy measurement moves no trial.
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

Floats = NDArray[np.float64]
Prior = Callable[[float | None], Mapping[int, float]]
"""Samples of a step (None: unknown) -> predicted steps a second by number of workers."""
MOST_SHAPED = 48  # trials whose gain by more workers counts
FEWEST = 2  # trials that a number of workers needs before its speed counts
POLISHES = 4  # rounds of the median polish
NEAR = 0.5  # octaves of the batch at which another trial counts exp(-1/2)
STRENGTH = 0.5  # the shape of all trials counts as much as so many octaves of workers by trials of this batch
WEAK = 0.05  # the same for one slope in all octaves, towards which the shape of all trials is drawn
OFF = 0.3  # of a logarithm of speed: a value further off the fit counts less
ROUNDS = 3  # of the fit
BATCH = "batch_size"  # the name of the batch in a program's config
MOST_BATCHES = 16  # batch sizes for which a prediction is made
BRINGS = 0.02  # of the shortest step: a smaller gain counts as none


@dataclass(frozen=True)
class MeasuredRates:
    """The speed of a trial on some numbers of workers.

    Between points the speed follows straight lines, from 0 on. Beyond the last point it follows the last line up to
    twice these workers (the optimistic prior of Pollux, section 4.1), and then stays. Without points see ``allocate``.

    Attributes:
        points: Pairs of workers and samples a second, in any order; none for a trial that has not run.
        slots: The equal parts into which ``exact`` mode divides work; None: any share is possible. The largest share
            decides: 8 slots on 5 to 7 workers are as fast as on 4.
    """

    points: tuple[tuple[int, float], ...] = ()
    slots: int | None = None

    def __post_init__(self) -> None:
        counts = [workers for workers, _ in self.points]
        if len(set(counts)) < len(counts) or any(w < 1 or not 0 < rate < math.inf for w, rate in self.points):
            raise ValueError(f"one rate above 0 for each number of workers is needed, not {self.points}")


@lru_cache(maxsize=4096)
def samples_per_s(throughput: MeasuredRates, most: int, low: int = 1, unknown: float = 1.0) -> Floats:
    """Return samples a second on 0, 1 ... ``most`` workers; ``unknown``: those of one worker without measurements."""
    counts = np.arange(most + 1, dtype=float)
    if throughput.slots is not None:
        counts[1:] = throughput.slots / np.ceil(throughput.slots / counts[1:])
    speeds: Floats = np.interp(counts, *_support_points(throughput, low, unknown))
    speeds.flags.writeable = False  # the cache returns the same array to all callers
    return speeds


def _support_points(throughput: MeasuredRates, low: int, unknown: float) -> tuple[list[float], list[float]]:
    """Numbers of workers, and rates on them: 0 and 0, the measured ones, and a guess beyond them."""
    rates: dict[float, list[float]] = {}
    for workers, rate in throughput.points or [(low, low * unknown)]:
        slots = throughput.slots
        counts_as = float(workers) if slots is None else slots / -(-slots // workers)
        rates.setdefault(counts_as, []).append(rate)
    points = [(0.0, 0.0), *((workers, fmean(measured)) for workers, measured in sorted(rates.items()))]
    (before, slow), (last, fast) = points[-2:]
    beyond = fast + max(fast - slow, 0.0) / (last - before) * last
    return [*(workers for workers, _ in points), 2 * last], [*(rate for _, rate in points), beyond]


class ThroughputTable:
    """The measured speeds of a study's trials, in steps a second, and their estimates on other numbers of workers.

    Trials differ in speed, but are assumed to gain alike by more workers. The logarithm of a rate is the sum of one
    number for the trial and one for its workers. These come from a median polish (Tukey, "Exploratory Data Analysis",
    1977, chapter 11) over the newest ``MOST_SHAPED`` trials that ran on several numbers of workers. A trial's own
    measurements count before estimates.

    Args:
        prior: Speeds that are assumed where no trial has shown any.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        self._prior = prior
        self._measured: dict[int, dict[int, tuple[float, float]]] = {}
        self._scaled_trials: dict[int, None] = {}
        self._shape: dict[int, float] = {}
        self._learnt = False
        self._per_worker: dict[int, float] = {}
        self._stale = 0  # rates that have come since the shape was learnt
        self._cached: dict[int, MeasuredRates] = {}  # results of ``of``, until new rates come

    def add(self, trial: int, workers: int, steps: int, seconds: float) -> None:
        """Record that ``trial`` took ``seconds`` for ``steps`` on ``workers``."""
        measured = self._measured.setdefault(trial, {})
        before, before_s = measured.get(workers, (0.0, 0.0))
        measured[workers] = before + steps, before_s + seconds
        fewest, rate = min(self._rates(trial).items())
        self._per_worker[trial] = rate / fewest
        if len(measured) > 1:
            self._scaled_trials.pop(trial, None)
            self._scaled_trials[trial] = None
            if len(self._scaled_trials) > MOST_SHAPED:
                del self._scaled_trials[next(iter(self._scaled_trials))]
            self._stale += 1
        self._cached.pop(trial, None)

    @property
    def known(self) -> bool:
        """Whether any trial has shown a speed."""
        return bool(self._per_worker)

    def of(self, trial: int, slots: int | None = None) -> MeasuredRates:
        """Return the trial's own rates, and estimates up to twice the workers that it ran on.

        A trial that never ran has all estimates. Beyond them ``MeasuredRates`` makes its own guess.
        """
        if not self._learnt or self._stale > len(self._scaled_trials) // 4:
            self._learn()
            self._learnt, self._stale = True, 0
            self._cached.clear()
        cached = self._cached.get(trial)
        if cached is not None and cached.slots == slots:
            return cached
        shape = self._with_prior(trial, self._relative_speeds(trial))
        fewest = min(shape, default=1)  # if no trial ran on one worker, the gain of two over one is unknown
        rates = self._rates(trial) if trial in self._measured else {fewest: fewest * self.per_worker(trial)}
        points = dict(rates)
        for workers, value in shape.items():
            if workers not in rates and (trial not in self._measured or self._is_estimated(workers, rates)):
                nearest = min(rates, key=lambda measured: (abs(math.log(measured / workers)), measured))
                base = shape.get(nearest)
                points[workers] = rates[nearest] * (value / base if base else workers / nearest)
        result = MeasuredRates(tuple(sorted(points.items())), slots)
        if trial in self._measured:
            self._cached[trial] = result
        return result

    def _with_prior(self, trial: int, shape: dict[int, float]) -> dict[int, float]:
        """``shape``, which trials have shown, and predictions for other numbers of workers."""
        predicted = {} if self._prior is None else self._prior(self._batch(trial))
        speeds = dict(shape)
        for workers, rate in predicted.items():
            if workers not in shape:
                nearest = min(shape, key=lambda known: (abs(math.log(known / workers)), known), default=None)
                base = None if nearest is None else predicted.get(nearest)
                speeds[workers] = (
                    rate if nearest is None else shape[nearest] * (rate / base if base else workers / nearest)
                )
        return speeds

    def per_worker(self, trial: int) -> float:
        """Return steps a second of each worker, on the fewest workers that the trial ran on.

        For a trial that never ran it is the median of the newest trials; 1 if no trial ever ran.
        """
        if trial in self._per_worker:
            return self._per_worker[trial]
        return median(list(self._per_worker.values())[-MOST_SHAPED:]) if self._per_worker else 1.0

    def measured(self, trial: int) -> bool:
        """Return whether the trial itself has shown a speed."""
        return trial in self._per_worker

    def has_batch(self, trial: int, samples: float) -> None:
        """Record that ``trial`` takes ``samples`` a step; this table ignores it, since all trials gain alike."""

    def _learn(self) -> None:
        """Learn the shape again from all measured rates."""
        self._shape = _polished([self._rates(trial) for trial in self._scaled_trials])

    def _relative_speeds(self, trial: int) -> dict[int, float]:
        """Workers -> expected speed of ``trial``, relative to one another."""
        return self._shape

    def _is_estimated(self, workers: int, measured: dict[int, float]) -> bool:
        """Whether the speed on ``workers`` is estimated for a trial that ran on those of ``measured``."""
        return self._prior is not None or workers <= 2 * max(measured)

    def _batch(self, trial: int) -> float | None:
        """Samples of a step of ``trial``; None: unknown."""
        return None

    def _rates(self, trial: int) -> dict[int, float]:
        return {workers: steps / seconds for workers, (steps, seconds) in self._measured[trial].items()}


def _polished(rows: list[dict[int, float]]) -> dict[int, float]:
    """Workers -> speed relative to one another, from rates of several trials."""
    logs = [{workers: math.log(rate) for workers, rate in row.items()} for row in rows]
    shape: dict[int, float] = defaultdict(float)
    residuals: dict[int, list[float]] = {}
    for _ in range(POLISHES):
        levels = [median(value - shape[workers] for workers, value in row.items()) for row in logs]
        residuals = defaultdict(list)
        for level, row in zip(levels, logs, strict=True):
            for workers, value in row.items():
                residuals[workers].append(value - level)
        shape = defaultdict(float, {workers: median(values) for workers, values in residuals.items()})
    return {workers: math.exp(value) for workers, value in shape.items() if len(residuals[workers]) >= FEWEST}


# --- scaling by batch size ---


@dataclass(frozen=True)
class MeasuredScaling:
    """A trial's ``rates`` (effective workers, steps a second), ascending, at ``batch`` samples a step."""

    batch: float
    rates: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Gains:
    """The gains of trials from one number of workers to the next.

    Attributes:
        octaves: The share of each octave of workers between both numbers, shape (n, octaves).
        rises: The rise of the logarithm of speed, shape (n).
        batches: The base-2 logarithm of the batch, shape (n).
    """

    octaves: Floats
    rises: Floats
    batches: Floats


def gains(shown: Sequence[MeasuredScaling]) -> Gains:
    """Return the gains of all trials, each from one of its numbers of workers to the next."""
    steps = [(*pair, each.batch) for each in shown for pair in zip(each.rates, each.rates[1:], strict=False)]
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
    """Return the rise of the logarithm of speed in each octave of workers for ``batch``; None: for all trials."""
    if not len(known.rises):
        return np.zeros(known.octaves.shape[1])
    usual = float(np.clip(known.rises.sum() / known.octaves.sum(), 0.0, math.log(2)))
    common = _fitted(known, np.ones(len(known.rises)), np.full(known.octaves.shape[1], usual), WEAK)
    if batch is None:
        return common
    weights = np.exp(-0.5 * ((known.batches - math.log2(batch)) / NEAR) ** 2)
    return _fitted(known, weights, common, STRENGTH)


def _fitted(known: Gains, weights: Floats, prior: Floats, strength: float) -> Floats:
    """Ridge regression towards ``prior``, repeated with less weight for outliers."""
    fitted, effective = prior, weights
    for _ in range(ROUNDS):
        weighted = known.octaves * effective[:, None]
        left = weighted.T @ known.octaves + strength * np.eye(len(prior))
        fitted = np.asarray(np.linalg.solve(left, weighted.T @ known.rises + strength * prior), dtype=float)
        off = np.abs(known.rises - known.octaves @ fitted)
        effective = weights * np.minimum(1.0, OFF / np.maximum(off, 1e-12))
    return fitted


def log_speedup(slopes: Floats, workers: float) -> float:
    """Return the logarithm of the speed-up on ``workers`` by ``slopes``; beyond the last octave as at its end."""
    inside = np.clip(math.log2(workers) - np.arange(len(slopes)), 0.0, 1.0)
    return float(inside @ slopes)


class BatchTable(ThroughputTable):
    """A ``ThroughputTable`` that assumes equal gains only of trials with similar batches.

    The logarithm of a trial's speed rises over the logarithm of its workers, by a slope of its own in each octave (from
    2^j to 2^(j+1) workers; ln 2 is perfect scaling). The slopes are fitted to the gains of all trials between two
    numbers of workers. Trials of similar batches count most. While these are few, the fit is drawn towards the shape of
    all trials, as by a prior of ``STRENGTH`` octaves. Beyond the measured numbers ``MeasuredRates`` makes its own
    guess.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        super().__init__(prior)
        self._batches: dict[int, float] = {}
        self._gains = gains([])
        self._measured_bounds: tuple[float, float] = (1.0, 1.0)
        self._slots: int | None = None

    def has_batch(self, trial: int, samples: float) -> None:
        """Record that ``trial`` takes ``samples`` a step."""
        self._batches[trial] = samples

    def of(self, trial: int, slots: int | None = None) -> MeasuredRates:
        """Return the trial's own rates, and estimates by trials of similar batches, up to the most measured workers."""
        self._slots = slots
        return super().of(trial, slots)

    def _learn(self) -> None:
        rows = [self._effective_rates(trial) for trial in self._scaled_trials]
        self._gains = gains(
            [MeasuredScaling(self._batches.get(k, 1.0), row) for k, row in zip(self._scaled_trials, rows, strict=True)]
        )
        counts = [workers for row in rows for workers, _ in row]
        self._measured_bounds = (min(counts), max(counts)) if counts else (1.0, 1.0)

    def _relative_speeds(self, trial: int) -> dict[int, float]:
        if not self._scaled_trials:
            return {}
        fitted = slopes(self._gains, self._batches.get(trial))
        low, high = self._measured_bounds
        octaves = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
        counts = {*(2**octave for octave in octaves), *self._measured.get(trial, ())}
        return {workers: math.exp(log_speedup(fitted, self._effective_workers(workers))) for workers in sorted(counts)}

    def _is_estimated(self, workers: int, measured: dict[int, float]) -> bool:
        return True

    def _batch(self, trial: int) -> float | None:
        return self._batches.get(trial)

    def _effective_rates(self, trial: int) -> tuple[tuple[float, float], ...]:
        """Its rates by effective workers."""
        rates_by_workers: dict[float, list[float]] = {}
        for workers, rate in sorted(self._rates(trial).items()):
            rates_by_workers.setdefault(self._effective_workers(workers), []).append(rate)
        return tuple((workers, fmean(rates)) for workers, rates in sorted(rates_by_workers.items()))

    def _effective_workers(self, workers: int) -> float:
        """Effective workers: with 8 slots, 5 to 7 workers are as fast as 4."""
        return float(workers) if self._slots is None else self._slots / -(-self._slots // workers)


# --- scaling predicted by a plan ---


def plan_in(folder: Path) -> PlanMade:
    """Return the plan that ``elastune plan --out`` wrote into ``folder``. Raises ``UserError`` if it has none."""
    made = last_plan(read(folder / JOURNAL))
    if made is None:
        raise UserError("--plan names the folder of a plan", folder, "give the --out of elastune plan")
    return made


def predicted_in(entries: Sequence[Entry]) -> ScalingPredicted | None:
    """Return the prediction in a study's journal, if any."""
    return next((entry.record for entry in entries if isinstance(entry.record, ScalingPredicted)), None)


def plan_if_readable(predicted: ScalingPredicted, program: object) -> PlanMade | None:
    """Return the plan of ``program`` behind a prediction; None if its folder is gone, or has another plan by now."""
    try:
        made = plan_in(Path(predicted.source))
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
    """Predict by a plan how trials gain by more workers, and from how many workers on a further one brings nothing.

    The study's journal records the prediction once, and a resumed study uses the record alone.

    Args:
        made: The plan.
        source: The folder of the plan.
        program: The program of the study, which must be that of the plan.
        execution: The execution settings of a trial, except for its workers.
        batches: The possible batch sizes of trials.
        bounds: The fewest and the most workers of a trial, in whole replicas.

    Raises:
        UserError: For a plan of another program, and for execution settings that a plan cannot predict.
    """
    check_program(made, program)
    replica = 1 if execution.mesh is None else execution.first_mesh.replica
    counts = range(bounds[0], bounds[1] + 1, replica)
    sizes = sorted(set(batches))
    sizes = [sizes[round(index * (len(sizes) - 1) / (MOST_BATCHES - 1))] for index in range(MOST_BATCHES)]
    steps, enough = list[tuple[int, int, float]](), 0
    for batch in sorted(set(sizes)):
        predictions = {
            workers: predicted_step(made, execution.on(_counting(execution, workers)), batch) for workers in counts
        }
        seconds = {workers: step_s for workers, step_s in predictions.items() if step_s is not None}
        if not seconds:
            fix = "leave out --plan, or use a mechanism of elastune's own"
            raise UserError("a plan speaks of elastune's own mechanisms", execution.mechanism, fix)
        steps += [(batch, workers, step_s) for workers, step_s in seconds.items()]
        least_s = min(seconds.values())
        enough = max(enough, next(w for w in counts if seconds[w] <= least_s * (1 + BRINGS)))
    return ScalingPredicted(str(source), steps, enough, _why(steps, enough, bounds[1]))


def bounded(predicted: ScalingPredicted | None, bounds: tuple[int, int]) -> tuple[int, int]:
    """Return ``bounds`` (low, high) without the workers that bring nothing by the prediction."""
    if predicted is None or predicted.most >= max(workers for _, workers, _ in predicted.steps):
        return bounds
    low, high = bounds
    return low, max(low, min(high, predicted.most))


def scaling_prior(predicted: ScalingPredicted | None, replica: int = 1) -> Prior | None:
    """Return the predicted speeds as a prior, in replicas of ``replica`` workers; None without a prediction."""
    if predicted is None:
        return None
    by_batch: dict[int, dict[int, float]] = {}
    for batch, workers, step_s in predicted.steps:
        by_batch.setdefault(batch, {})[workers // replica] = 1 / step_s

    def prior(batch: float | None) -> Mapping[int, float]:
        median_batch = sorted(by_batch)[len(by_batch) // 2]
        nearest = median_batch if batch is None else min(by_batch, key=lambda each: abs(math.log(each / batch)))
        return by_batch[nearest]

    return prior


def _counting(execution: ExecutionSettings, workers: int) -> int:
    """Effective workers: in ``exact`` mode the largest share decides (8 slots: 5 to 7 workers are as fast as 4)."""
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
