"""The rows of a frontier and how they are judged: by time, and by quality against a target or a margin. Pure.

``FrontierCriteria`` gives time, cost and margin of a training. ``judge`` decides whether quality holds, from seeds that
were actually trained. ``row`` puts both into one row, and ``mark_front`` marks the rows that no other row beats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev
from typing import Literal

import numpy as np

from elastune.core.cost import UNKNOWN, Cost, Paid, Prices
from elastune.core.journal.records import FrontierRow, LinkFitted, RunFinished, ScalingPoint
from elastune.core.plan.confidence_intervals import Comparison, bounded_ci, non_inferiority
from elastune.core.plan.data_parallel import DataParallelStep
from elastune.core.run import Config, ExecutionSettings, number
from elastune.tuning.frontier.trainings import NOISE_SCALE, Recipe, StepKind, Training
from elastune.tuning.search.front import nondominated
from elastune.tuning.search.objective import Objective

MARGIN = 0.01  # of the range of a metric with two bounds
RELATIVE_MARGIN = 0.02  # of the baseline's value, for any other metric
VerdictWord = Literal["holds", "not shown", "falls"]


# --- time, cost and margin ---


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, and whether they were ``measured`` or modelled."""

    step_s: float
    measured: bool


@dataclass(frozen=True)
class Times:
    """Step times: measured for a (batch, kind) that was measured, otherwise from the model.

    The model covers workers that share a batch. Factors correct it for meshes that divide layers, and for execution
    settings that it was not fitted to.

    Attributes:
        model: The fitted step-time model.
        measured: Seconds of a step, by global batch and kind.
        errors: Predicted over measured, of the steps on several workers that were measured.
        factors: Measured over predicted, by kind of steps that the model does not cover.
        apart: The same by differing execution settings, for meshes where these were not measured.
    """

    model: DataParallelStep
    measured: Mapping[tuple[int, StepKind], float]
    errors: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[StepKind, float] = field(default_factory=dict)
    apart: Mapping[str, float] = field(default_factory=dict)

    @property
    def miss(self) -> float | None:
        """The largest factor by which the model was wrong; None if it could not be checked."""
        return max((max(ratio, 1 / ratio) for ratio in self.errors.values()), default=None)

    @property
    def links(self) -> dict[str, LinkFitted]:
        """The fitted links by name; empty on one host."""
        if self.model.hosts is None:
            return {}
        within = {} if self.model.hosts.workers_each == 1 else {"within a host": self.model.link.to_record()}
        return {**within, "across hosts": self.model.hosts.link.to_record()}

    def factor_of(self, kind: StepKind) -> float | None:
        """By which factor a modelled time of ``kind`` may be wrong; None if that was not checked."""
        return self.miss if not kind.apart and kind.every == 1 and kind not in self.factors else None

    def estimate(
        self, batch: int, kind: StepKind, run: RunFinished, slots: int, *, batch_varies: bool = False
    ) -> Estimate:
        """Seconds of a step of ``run``'s program, which was trained with ``slots`` slots.

        A run whose model differs in size from the calibrated one is timed by its own steps and its own gradients.
        ``batch_varies``: the batch changed during the run, so the run's mean batch counts, and the model is corrected
        by the measured steps of the kind.
        """
        same, mean = run.grad_bytes == self.model.grad_bytes, -(-run.samples // run.steps)
        if same and not batch_varies and (batch, kind) in self.measured:
            return Estimate(self.measured[batch, kind], measured=True)
        batch = mean if batch_varies else min(batch, mean)  # an epoch's last batch is smaller
        if same or run.step_s is None:
            correction = self._correction(kind) if batch_varies else 1.0
            return Estimate(self._modelled_s(self.model, batch, kind) * correction, measured=False)
        passes = -(-slots // run.workers)
        scale = run.step_s / self.model.step_s(batch, run.workers, passes=passes)
        scaled = replace(
            self.model,
            base_s=self.model.base_s * scale,
            per_sample_s=self.model.per_sample_s * scale,
            grad_bytes=run.grad_bytes,
        )
        plain = not kind.apart and not batch_varies
        measured = plain and kind.workers == run.workers == slots == 1
        return Estimate(self._modelled_s(scaled, batch, kind), measured=measured)

    def expected_s(self, batch: int, kind: StepKind) -> float:
        """Seconds of a step of a training that has not ended."""
        measured_s = self.measured.get((batch, kind))
        return self._modelled_s(self.model, batch, kind) if measured_s is None else measured_s

    def _correction(self, kind: StepKind) -> float:
        """Measured over modelled, of the steps of ``kind`` that were measured; 1 if none was."""
        ratios = [s / self._modelled_s(self.model, n, k) for (n, k), s in self.measured.items() if k == kind]
        return median(ratios) if ratios else 1.0

    def _modelled_s(self, model: DataParallelStep, batch: int, kind: StepKind) -> float:
        factor = self.factors.get(kind, self.apart.get(kind.apart, 1.0))
        hosts = model.hosts_for(kind.workers)  # the hosts of all workers: one worker of each replica sums
        return model.step_s(batch, kind.mesh.batch, hosts, passes=kind.passes, every=kind.every) * factor


@dataclass(frozen=True)
class FrontierCriteria:
    """How the rows of a frontier are judged: quality by a target or a margin, and time and cost.

    The baseline is the program with its own settings on the smallest worker count.

    Attributes:
        quality: The objective that must hold.
        target: The quality that must be reached; None: quality must hold within the margin of the baseline's.
        price_per_worker_hour: The price, if ``prices`` is None.
        times: The step times.
        margin: By how much quality may be worse than the baseline's; None: see ``margin_at``.
        prices: Prices over time since the beginning of the frontier. All trainings are priced as if they began then.
    """

    quality: Objective
    target: float | None
    price_per_worker_hour: float
    times: Times
    margin: float | None = None
    prices: Prices | None = None

    def cost(self, workers: int, seconds: float) -> float:
        """The cost of a training that takes ``seconds`` on ``workers``, by ``prices`` if they are known."""
        if self.prices is None:
            return Cost(workers * seconds, self.price_per_worker_hour).total
        return self.prices.cost(Paid(UNKNOWN, workers, 0.0, seconds))

    def better(self, a: float, b: float) -> bool:
        """Whether quality ``a`` beats ``b``."""
        return self.loss(a, b) < 0

    def loss(self, value: float, base: float) -> float:
        """By how much ``value`` is worse than ``base``; negative where it is better."""
        return base - value if self.quality.direction == "max" else value - base

    def reaches(self, value: float) -> bool:
        """Whether ``value`` reaches the target; always true without a target."""
        return self.target is None or not self.better(self.target, value)

    def margin_at(self, base: float) -> float:
        """The margin if the baseline's quality is ``base``: as asked for, or a hundredth of the metric's range.

        A metric without two bounds has no range; its margin is a fiftieth of the baseline's quality.
        """
        if self.margin is not None:
            return self.margin
        width = self.quality.high - self.quality.low
        return MARGIN * width if width < float("inf") else RELATIVE_MARGIN * abs(base) or RELATIVE_MARGIN

    def interval(self, values: Sequence[float], samples: int | None) -> tuple[float, float] | None:
        """The 95 % interval of the mean of ``values``. If a value is out of the metric's bounds, bounds are ignored."""
        low, high = self.quality.low, self.quality.high
        if min(values) < low or max(values) > high:
            return bounded_ci(values)
        return bounded_ci(values, low, high, samples)

    def seconds(self, training: Training, kind: StepKind) -> tuple[float, bool]:
        """Seconds of the whole training by steps of ``kind``, and whether their time was measured."""
        assert training.run is not None
        step = self.step(training, kind)
        return training.run.steps * step.step_s, step.measured

    def step(self, training: Training, kind: StepKind) -> Estimate:
        """Seconds of one step of ``kind``. Policies may have changed the batch during the training."""
        assert training.run is not None
        batch, varies = batch_of(training.config), bool(training.variant.policies) and not steady(training)
        return self.times.estimate(batch, kind, training.run, training.slots, batch_varies=varies)


def steady(training: Training) -> bool:
    """Whether it took as many steps as its batch gives for its samples, so that no policy changed the batch."""
    run = training.run
    if run is None or run.epoch < 1 or run.samples % run.epoch:
        return False
    return run.steps == run.epoch * -(-(run.samples // run.epoch) // batch_of(training.config))


def batch_of(config: Config) -> int:
    """The global batch size of a configuration."""
    return int(number(config, "batch_size"))


# --- does quality hold? ---


@dataclass(frozen=True)
class QualityVerdict:
    """Whether quality holds, as far as the trained seeds show it.

    Attributes:
        word: With a target, where the interval lies. Without one, the result of the comparison with the baseline. If a
            seed diverged, quality is not shown to hold.
        values: The quality of each seed that did not diverge.
        interval: The interval of their mean.
        samples: The size of the test set; None: not known.
        against: The comparison with the baseline on the same seeds; None if no seed was trained for both.
    """

    word: VerdictWord
    values: tuple[float, ...]
    interval: tuple[float, float] | None
    samples: int | None
    against: Comparison | None


def judge(
    trainings: Sequence[Training], baseline: Sequence[Training], by: FrontierCriteria, metric: str
) -> QualityVerdict | None:
    """Whether quality holds by ``metric``, which names the quality on validation or test data.

    None if all ``trainings`` diverged.
    """
    good = [t for t in trainings if t.run is not None]
    if not good:
        return None
    values = [t.result.metrics[metric] for t in good]
    samples = _samples(good, metric)
    interval, against = by.interval(values, samples), _against(good, baseline, by, metric)
    against_word: VerdictWord = "not shown" if against is None else against.verdict
    word = against_word if by.target is None else _at_target(interval, by)
    diverged = len(trainings) - len(good)
    if diverged and word == "holds":
        word = "not shown"
    return QualityVerdict("falls" if diverged > len(good) else word, tuple(values), interval, samples, against)


def _at_target(interval: tuple[float, float] | None, by: FrontierCriteria) -> VerdictWord:
    """Quality holds if the whole interval reaches the target, and falls if no part of it does."""
    if interval is None:
        return "not shown"
    reaching = [by.reaches(end) for end in interval]
    return "holds" if all(reaching) else "not shown" if any(reaching) else "falls"


def _against(
    good: Sequence[Training], baseline: Sequence[Training], by: FrontierCriteria, metric: str
) -> Comparison | None:
    base = {t.seed: t.result.metrics[metric] for t in baseline if t.run is not None and metric in t.result.metrics}
    losses = [by.loss(t.result.metrics[metric], base[t.seed]) for t in good if t.seed in base]
    return non_inferiority(losses, by.margin_at(fmean(base.values()))) if losses else None


def _samples(good: Sequence[Training], metric: str) -> int | None:
    """The number of samples that the metric was measured on; None if a training does not report it."""
    counts = [t.run.evaluated_on.get(metric) for t in good if t.run is not None]
    reported = [n for n in counts if n is not None]
    return min(reported) if len(reported) == len(good) else None


# --- rows ---


def row(
    role: Literal["naive", "tuned"],
    layout: ExecutionSettings,
    recipe: Recipe,
    lr_rule: str,
    trainings: Sequence[Training],
    by: FrontierCriteria,
    baseline: Sequence[Training] = (),
    kind: StepKind | None = None,
    differences: str = "",
    others: Mapping[int, StepKind] | None = None,
) -> FrontierRow | None:
    """The table's row for ``recipe`` and ``layout``, over the seeds in ``trainings``.

    Args:
        role: "naive" for a row of the naive rule, "tuned" for any other.
        layout: The execution settings of the row, its variant included.
        recipe: The configuration and the variant.
        lr_rule: The rule by which the learning rate follows the batch.
        trainings: The trainings of the row, one for each seed.
        by: How rows are judged.
        baseline: Trainings of the program's own settings on the smallest worker count, with any seeds.
        kind: The kind of its steps; None: plain steps on its mesh.
        differences: How its execution settings differ from those asked for, in words.
        others: The kinds of steps on other worker counts, for ``scaling``.

    Returns:
        The row; None if all seeds diverged.
    """
    good = [t for t in trainings if t.run is not None]
    name = by.quality.name
    held_out = all(f"test_{name}" in t.result.metrics for t in good)
    verdict = judge(trainings, baseline, by, f"test_{name}" if held_out else name)
    if verdict is None:
        return None
    noise_scale, noise_scale_error = noise_scale_of([t.run for t in good if t.run is not None])
    workers, mesh, config = layout.workers, layout.first_mesh, recipe.config
    kind = kind or StepKind(mesh)
    points = _scaling(good, {**(others or {}), workers: kind}, by)
    at_workers = next(point for point in points if point.workers == workers)
    efficiency, label = _efficiency(points[0], at_workers)
    reached = _times_to_target(good, kind, by)
    samples = fmean(t.run.samples for t in good if t.run is not None)  # 0: a command need not report them
    return FrontierRow(
        role=role,
        workers=workers,
        batch_size=batch_of(config),
        lr=number(config, "lr"),
        lr_rule=lr_rule,
        mechanism=layout.mechanism,
        mesh=str(mesh),
        mode=layout.mode,
        config=dict(recipe.config),
        quality=fmean(verdict.values),
        ci=verdict.interval,
        seeds=len(good),
        held_out=held_out,
        test_samples=verdict.samples,
        verdict=verdict.word,
        loss=None if verdict.against is None else verdict.against.loss,
        loss_bound=None if verdict.against is None else verdict.against.high,
        margin=None if verdict.against is None else verdict.against.margin,
        pairs=0 if verdict.against is None else verdict.against.pairs,
        validation=fmean(t.result.metrics[name] for t in good),
        seconds=at_workers.seconds,
        seconds_label=at_workers.seconds_label,
        seconds_factor=at_workers.seconds_factor,
        throughput=samples / at_workers.seconds if at_workers.seconds > 0 and samples > 0 else None,
        scaling_efficiency=efficiency,
        scaling_label=label,
        cost=at_workers.cost,
        time_to_target_s=fmean(reached) if len(reached) == len(good) else None,
        time_to_target_ci=bounded_ci(reached, 0.0) if len(reached) == len(good) else None,
        reached=len(reached),
        diverged=len(trainings) - len(good),
        trials=[t.trial for t in trainings],
        noise_scale=noise_scale,
        noise_scale_error=noise_scale_error,
        quality_label="measured" if all(t.run.workers == workers for t in good if t.run is not None) else "emulated",
        num_slots=layout.num_slots,
        execution=recipe.variant.to_record(layout),
        differences=differences,
        scaling=points,
        seed_values=list(verdict.values),
        seed_seconds=[by.seconds(t, kind)[0] for t in good],
    )


def _scaling(trainings: Sequence[Training], kinds: Mapping[int, StepKind], by: FrontierCriteria) -> list[ScalingPoint]:
    """The time and cost of ``trainings`` on each worker count, by its kind of steps; fewest workers first."""
    points = []
    for workers, kind in sorted(kinds.items(), key=lambda each: each[0]):
        timed = [by.seconds(t, kind) for t in trainings]
        seconds, measured = fmean(s for s, _ in timed), all(measured for _, measured in timed)
        factor = 1.0 if measured else by.times.factor_of(kind)
        label: Literal["measured", "modelled"] = "measured" if measured else "modelled"
        points.append(ScalingPoint(workers, seconds, label, factor, by.cost(workers, seconds)))
    return points


def _efficiency(
    fewest: ScalingPoint, point: ScalingPoint
) -> tuple[float | None, Literal["measured", "modelled"] | None]:
    """The speed-up over the factor of workers, and its label; (None, None) for the fewest workers."""
    if fewest.workers == point.workers or point.seconds <= 0:
        return None, None
    measured = fewest.seconds_label == point.seconds_label == "measured"
    return fewest.seconds / point.seconds * fewest.workers / point.workers, "measured" if measured else "modelled"


def noise_scale_of(runs: Sequence[RunFinished]) -> tuple[float | None, float | None]:
    """The mean of the runs' last noise scales, and its standard error; (None, None) if none was measured.

    The error is the larger one of two: from the runs' own errors, and from the spread between runs. None if neither
    is known.
    """
    scales = [run.signals[NOISE_SCALE] for run in runs if NOISE_SCALE in run.signals]
    if not scales:
        return None, None
    values, errors = [value for value, _ in scales], [error for _, error in scales]
    bounded = [error for error in errors if error is not None]
    propagated = [math.hypot(*bounded) / len(scales)] if len(bounded) == len(scales) else []
    spread = [stdev(values) / math.sqrt(len(scales))] if len(scales) > 1 else []
    return fmean(values), max(propagated + spread, default=None)


def _times_to_target(trainings: Sequence[Training], kind: StepKind, by: FrontierCriteria) -> list[float]:
    """For each seed that reaches the target, the seconds until its validation quality first does."""
    times: list[float] = []
    for training in trainings if by.target is not None else ():
        run = training.run
        assert run is not None
        values = [(r.step, r.metrics.get(by.quality.name)) for r in training.reports]
        step = next((s for s, v in values if v is not None and by.reaches(v)), None)
        if step is not None:
            times.append(step * by.step(training, kind).step_s)
    return times


def points(rows: Sequence[FrontierRow], by: FrontierCriteria) -> np.ndarray:
    """(validation quality, seconds, cost) of each row, smaller is better. Shape (n, 3)."""
    sign = -1.0 if by.quality.direction == "max" else 1.0
    return np.array([[sign * r.validation, r.seconds, r.cost] for r in rows]).reshape(len(rows), 3)


def mark_front(rows: Sequence[FrontierRow], by: FrontierCriteria) -> list[FrontierRow]:
    """The rows with ``on_front`` set. A row whose whole interval misses the target is never on the front."""
    eligible = [i for i, r in enumerate(rows) if by.target is None or r.verdict != "falls"]
    keep = nondominated(points([rows[i] for i in eligible], by))
    front = {i for i, kept in zip(eligible, keep, strict=True) if kept}
    return [replace(r, on_front=i in front) for i, r in enumerate(rows)]
