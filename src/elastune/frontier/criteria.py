"""How the rows of a frontier are judged: by quality within its bounds, by a target or a margin, by time and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from elastune.core.cost import UNTOLD, Cost, Paid, Prices
from elastune.core.run import Config, number
from elastune.frontier.trainings import Training
from elastune.frontier.ways import StepKind
from elastune.journal.records import LinkFitted, RunFinished
from elastune.plan.intervals import bounded_ci
from elastune.plan.steps.data_parallel import DataParallelStep
from elastune.search.space.objective import Objective

MARGIN = 0.01  # of the range of a metric with two bounds
RELATIVE_MARGIN = 0.02  # of the baseline's value, of any other metric


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, and whether they were ``measured`` or are a model's."""

    step_s: float
    measured: bool


@dataclass(frozen=True)
class Times:
    """Step times: measured where (batch, kind) was, else from the model, which knows workers that share a batch.

    ``errors``: predicted over measured, of the steps on several workers that were measured. ``factors``: measured over
    predicted of what the model knows nothing of: a mesh that divides layers, and means that are not those it was fitted
    to (``apart``: the same on meshes where it was not measured).
    """

    model: DataParallelStep
    measured: Mapping[tuple[int, StepKind], float]
    errors: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[StepKind, float] = field(default_factory=dict)
    apart: Mapping[str, float] = field(default_factory=dict)

    @property
    def miss(self) -> float | None:
        """The factor by which the model was wrong at most, either way, where it could be checked; None: nowhere."""
        return max((max(ratio, 1 / ratio) for ratio in self.errors.values()), default=None)

    @property
    def links(self) -> dict[str, LinkFitted]:
        """Of the model, by name; empty on one host."""
        if self.model.hosts is None:
            return {}
        within = {} if self.model.hosts.workers_each == 1 else {"within a host": self.model.link.to_record()}
        return {**within, "across hosts": self.model.hosts.link.to_record()}

    def factor_of(self, kind: StepKind) -> float | None:
        """By what a modelled time of ``kind`` may be off, either way; None where that was checked nowhere."""
        return self.miss if not kind.apart and kind.every == 1 and kind not in self.factors else None

    def estimate(
        self, batch: int, kind: StepKind, run: RunFinished, slots: int, *, batch_varies: bool = False
    ) -> Estimate:
        """Seconds of a step of ``run``'s program, which was trained with ``slots`` slots.

        A run whose model differs in size from the calibrated one is timed by its own steps and its own gradients.
        ``batch_varies``: something else than ``batch`` was trained, so that the mean of the run's counts; the model is
        then corrected by what was measured of the kind.
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
        own = replace(
            self.model,
            base_s=self.model.base_s * scale,
            per_sample_s=self.model.per_sample_s * scale,
            grad_bytes=run.grad_bytes,
        )
        plain = not kind.apart and not batch_varies
        measured = plain and kind.workers == run.workers == slots == 1
        return Estimate(self._modelled_s(own, batch, kind), measured=measured)

    def expected_s(self, batch: int, kind: StepKind) -> float:
        """Seconds of a step of a training that has not ended."""
        told = self.measured.get((batch, kind))
        return self._modelled_s(self.model, batch, kind) if told is None else told

    def _correction(self, kind: StepKind) -> float:
        """Measured over modelled, of the steps of ``kind`` that were measured; 1 where none was."""
        ratios = [s / self._modelled_s(self.model, n, k) for (n, k), s in self.measured.items() if k == kind]
        return median(ratios) if ratios else 1.0

    def _modelled_s(self, model: DataParallelStep, batch: int, kind: StepKind) -> float:
        factor = self.factors.get(kind, self.apart.get(kind.apart, 1.0))
        hosts = model.hosts_for(kind.workers)  # of all of them: one worker of each replica sums
        return model.step_s(batch, kind.mesh.batch, hosts, passes=kind.passes, every=kind.every) * factor


@dataclass(frozen=True)
class FrontierCriteria:
    """How rows are judged. ``margin``: by how much quality may be worse than the baseline's; None: see ``margin_at``.
    ``prices``: with times since the frontier's beginning, when all that is told of is taken to begin.

    The baseline is the program with its own settings on the smallest worker count.
    """

    quality: Objective
    target: float | None
    price_per_worker_hour: float
    times: Times
    margin: float | None = None
    prices: Prices | None = None

    def cost(self, workers: int, seconds: float) -> float:
        """What a training costs that takes so long on ``workers``, by ``prices`` where they are known."""
        if self.prices is None:
            return Cost(workers * seconds, self.price_per_worker_hour).total
        return self.prices.cost(Paid(UNTOLD, workers, 0.0, seconds))

    def better(self, a: float, b: float) -> bool:
        """Whether quality ``a`` beats ``b``."""
        return self.loss(a, b) < 0

    def loss(self, value: float, base: float) -> float:
        """By how much ``value`` is worse than ``base``; negative where it is better."""
        return base - value if self.quality.direction == "max" else value - base

    def reaches(self, value: float) -> bool:
        """Whether ``value`` is at the target (always, where there is none)."""
        return self.target is None or not self.better(self.target, value)

    def margin_at(self, base: float) -> float:
        """The margin where the baseline's quality is ``base``: as asked for, or a hundredth of the metric's range.

        A metric without two bounds has no range: there it is a fiftieth of the baseline's quality.
        """
        if self.margin is not None:
            return self.margin
        width = self.quality.high - self.quality.low
        return MARGIN * width if width < float("inf") else RELATIVE_MARGIN * abs(base) or RELATIVE_MARGIN

    def interval(self, values: Sequence[float], samples: int | None) -> tuple[float, float] | None:
        """Of the mean of ``values`` at 95 %. Values out of bounds show that these were not the metric's."""
        low, high = self.quality.low, self.quality.high
        if min(values) < low or max(values) > high:
            return bounded_ci(values)
        return bounded_ci(values, low, high, samples)

    def seconds(self, training: Training, kind: StepKind) -> tuple[float, bool]:
        """Time of the whole training by steps of ``kind``, and whether their time was measured."""
        assert training.run is not None
        found = self.step(training, kind)
        return training.run.steps * found.step_s, found.measured

    def step(self, training: Training, kind: StepKind) -> Estimate:
        """The same of one step. What adapts a training may change its batch."""
        assert training.run is not None
        batch, varies = batch_of(training.config), bool(training.way.policies) and not steady(training)
        return self.times.estimate(batch, kind, training.run, training.slots, batch_varies=varies)


def steady(training: Training) -> bool:
    """Whether it took as many steps as its batch gives for its samples: whatever adapted it left the batch alone."""
    run = training.run
    if run is None or run.epoch < 1 or run.samples % run.epoch:
        return False
    return run.steps == run.epoch * -(-(run.samples // run.epoch) // batch_of(training.config))


def batch_of(config: Config) -> int:
    """The global batch size of a configuration."""
    return int(number(config, "batch_size"))
