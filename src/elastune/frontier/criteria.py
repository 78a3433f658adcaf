"""How the rows of a frontier are judged: by quality within its bounds, by a target or a margin, by time and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastune.core.cost import UNTOLD, Cost, Paid, Prices
from elastune.core.mesh import Mesh
from elastune.core.run import Config, number
from elastune.frontier.trainings import Training
from elastune.journal.records import LinkFitted, RunFinished
from elastune.plan.intervals import bounded_ci
from elastune.plan.step_time import Estimate, StepTime
from elastune.search.space.objective import Objective

MARGIN = 0.01  # of the range of a metric with two bounds
RELATIVE_MARGIN = 0.02  # of the baseline's value, of any other metric


@dataclass(frozen=True)
class Times:
    """Step times: measured where (batch, mesh) was, else from the model, which knows workers that share a batch.

    ``errors``: predicted over measured, of the steps on several workers that were measured. ``factors``: measured over
    predicted where a mesh divides layers, of which the model knows nothing.
    """

    model: StepTime
    measured: Mapping[tuple[int, Mesh], float]
    errors: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[Mesh, float] = field(default_factory=dict)

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

    def estimate(self, batch: int, mesh: Mesh, run: RunFinished, slots: int) -> Estimate:
        """Seconds of a step of ``run``'s program, which was trained with ``slots`` slots.

        A run whose model differs in size from the calibrated one is timed by its own steps and its own gradients.
        """
        same = run.grad_bytes == self.model.grad_bytes
        if same and (batch, mesh) in self.measured:
            return Estimate(self.measured[batch, mesh], measured=True)
        batch = min(batch, -(-run.samples // run.steps))  # an epoch's last batch is smaller
        if same or run.step_s is None:
            return Estimate(self._modelled_s(self.model, batch, mesh), measured=False)
        passes = -(-slots // run.workers)
        scale = run.step_s / (self.model.step_s(batch, run.workers) + (passes - 1) * self.model.base_s)
        own = replace(
            self.model,
            base_s=self.model.base_s * scale,
            per_sample_s=self.model.per_sample_s * scale,
            grad_bytes=run.grad_bytes,
        )
        return Estimate(self._modelled_s(own, batch, mesh), measured=mesh.workers == run.workers == slots == 1)

    def expected_s(self, batch: int, mesh: Mesh) -> float:
        """Seconds of a step of a training that has not ended."""
        told = self.measured.get((batch, mesh))
        return self._modelled_s(self.model, batch, mesh) if told is None else told

    def _modelled_s(self, model: StepTime, batch: int, mesh: Mesh) -> float:
        return model.step_s(batch, mesh.batch, model.hosts_for(mesh.workers)) * self.factors.get(mesh, 1.0)


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

    def seconds(self, training: Training, mesh: Mesh) -> tuple[float, bool]:
        """Time of the whole training on ``mesh``, and whether its step time was measured."""
        assert training.run is not None
        found = self.times.estimate(batch_of(training.config), mesh, training.run, training.slots)
        return training.run.steps * found.step_s, found.measured


def batch_of(config: Config) -> int:
    """The global batch size of a configuration."""
    return int(number(config, "batch_size"))
