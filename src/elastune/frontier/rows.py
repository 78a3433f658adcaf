"""From trainings and a step-time model to the rows, the comparison and the answer of a frontier. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

import numpy as np

from elastune.core.cost import Cost
from elastune.core.run import Config, Means, number
from elastune.frontier.trainings import NOISE_SCALE, Training
from elastune.journal.records import FrontierRow, RunFinished
from elastune.plan.intervals import mean_ci
from elastune.plan.step_time import CalibratedTimes, Estimate, StepTime
from elastune.plan.support import EFFICIENT, smallest_share, supported_workers
from elastune.search.analysis.front import hypervolume, nondominated
from elastune.search.space.objective import Objective


@dataclass(frozen=True)
class Times:
    """Step times: measured where (batch, workers) was, else from the model."""

    model: StepTime
    measured: Mapping[tuple[int, int], float]

    def estimate(self, batch: int, workers: int, run: RunFinished, slots: int) -> Estimate:
        """Seconds of a step of ``run``'s program, which was trained with ``slots`` slots.

        A run whose model differs in size from the calibrated one is timed by its own steps and its own gradients.
        """
        same = run.grad_bytes == self.model.grad_bytes
        if same and (batch, workers) in self.measured:
            return CalibratedTimes(self.model, self.measured).estimate(batch, workers)
        batch = min(batch, -(-run.samples // run.steps))  # an epoch's last batch is smaller
        if same or run.step_s is None:
            return self.model.estimate(batch, workers)
        passes = -(-slots // run.workers)
        scale = run.step_s / (self.model.step_s(batch, run.workers) + (passes - 1) * self.model.base_s)
        own = replace(
            self.model,
            base_s=self.model.base_s * scale,
            per_sample_s=self.model.per_sample_s * scale,
            grad_bytes=run.grad_bytes,
        )
        return replace(own.estimate(batch, workers), measured=workers == run.workers == slots == 1)

    def expected_s(self, batch: int, workers: int) -> float:
        """Seconds of a step of a training that has not ended."""
        return CalibratedTimes(self.model, self.measured).estimate(batch, workers).step_s


@dataclass(frozen=True)
class FrontierCriteria:
    """How rows are judged."""

    quality: Objective
    target: float | None
    price_per_worker_hour: float
    times: Times

    def better(self, a: float, b: float) -> bool:
        """Whether quality ``a`` beats ``b``."""
        return a > b if self.quality.direction == "max" else a < b

    def reaches(self, value: float) -> bool:
        """Whether ``value`` is at the target (always, where there is none)."""
        return self.target is None or not self.better(self.target, value)

    def seconds(self, training: Training, workers: int) -> tuple[float, bool]:
        """Time of the whole training on ``workers``, and whether its step time was measured."""
        assert training.run is not None
        found = self.times.estimate(batch_of(training.config), workers, training.run, training.slots)
        return training.run.steps * found.step_s, found.measured


def batch_of(config: Config) -> int:
    """The global batch size of a configuration."""
    return int(number(config, "batch_size"))


def row(
    role: Literal["naive", "tuned"],
    workers: int,
    config: Config,
    lr_rule: str,
    trainings: Sequence[Training],
    by: FrontierCriteria,
    means: Means,
) -> FrontierRow | None:
    """The table's row for ``config`` on ``workers``, over the seeds in ``trainings``; None where all seeds diverged."""
    good = [t for t in trainings if t.run is not None]
    if not good:
        return None
    name = by.quality.name
    held_out = all(f"test_{name}" in t.result.metrics for t in good)
    quality, ci = mean_ci([t.result.metrics[f"test_{name}" if held_out else name] for t in good])
    noise_scale, noise_scale_error = noise_scale_of([t.run for t in good if t.run is not None])
    timed = [by.seconds(t, workers) for t in good]
    seconds = fmean(s for s, _ in timed)
    time_to_target_s, time_to_target_ci = _time_to_target(good, workers, by)
    return FrontierRow(
        role=role,
        workers=workers,
        batch_size=batch_of(config),
        lr=number(config, "lr"),
        lr_rule=lr_rule,
        mechanism=means.mechanism,
        mode=means.mode,
        config=dict(config),
        quality=quality,
        ci=ci,
        seeds=len(good),
        held_out=held_out,
        validation=fmean(t.result.metrics[name] for t in good),
        seconds=seconds,
        seconds_label="measured" if all(measured for _, measured in timed) else "modelled",
        cost=Cost(workers * seconds, by.price_per_worker_hour).total,
        time_to_target_s=time_to_target_s,
        time_to_target_ci=time_to_target_ci,
        diverged=len(trainings) - len(good),
        trials=[t.trial for t in trainings],
        noise_scale=noise_scale,
        noise_scale_error=noise_scale_error,
        quality_label="measured" if all(t.run.workers == workers for t in good if t.run is not None) else "emulated",
        num_slots=workers,
    )


def noise_scale_of(runs: Sequence[RunFinished]) -> tuple[float | None, float | None]:
    """The mean of the runs' last noise scales, and its standard error; (None, None) where none was measured.

    The error is what the runs tell of themselves, or their spread where that says more; None where neither is known.
    """
    told = [run.signals[NOISE_SCALE] for run in runs if NOISE_SCALE in run.signals]
    if not told:
        return None, None
    values, errors = [value for value, _ in told], [error for _, error in told]
    known = [error for error in errors if error is not None]
    own = [math.hypot(*known) / len(told)] if len(known) == len(told) else []
    spread = [stdev(values) / math.sqrt(len(told))] if len(told) > 1 else []
    return fmean(values), max(own + spread, default=None)


def support(chosen: FrontierRow, model: StepTime) -> tuple[str, int | None]:
    """How many workers the noise scale of ``chosen`` supports: in words, and the number; ("", None) without one."""
    scale = chosen.noise_scale
    if scale is None or not 0 <= scale < math.inf:
        return "", None
    share = smallest_share(model.base_s, model.per_sample_s)
    error = "" if chosen.noise_scale_error is None else f" ± {_samples(chosen.noise_scale_error)}"
    first = f"gradient noise scale {_samples(scale)}{error} at the end of training: "
    first += f"batches up to about {_samples(scale)} keep their efficiency"
    if share == math.inf:
        return f"{first}; samples cost too little of a step to be shared out among workers", 1
    workers = max(1, supported_workers(scale, share))  # where no share is large enough, one worker still trains
    most = _workers(workers) if workers > 1 else "no more than 1 worker"
    at = f"at {_samples(share)} samples per worker (where a worker is still {100 * EFFICIENT:g} % efficient by the"
    return f"{first}; {at} fitted step-time model) that supports {most}", workers


def _time_to_target(
    trainings: Sequence[Training], workers: int, by: FrontierCriteria
) -> tuple[float | None, float | None]:
    """Mean time until the validation quality first reaches the target, and half of its 95 % interval over seeds.

    None for both where a seed never reaches it; None for the second from one seed.
    """
    if by.target is None:
        return None, None
    times = []
    for training in trainings:
        run = training.run
        assert run is not None
        values = [(r.step, r.metrics.get(by.quality.name)) for r in training.reports]
        step = next((s for s, v in values if v is not None and by.reaches(v)), None)
        if step is None:
            return None, None
        times.append(step * by.times.estimate(batch_of(training.config), workers, run, training.slots).step_s)
    return mean_ci(times)


def points(rows: Sequence[FrontierRow], by: FrontierCriteria) -> np.ndarray:
    """(quality, seconds, cost) of each row, smaller is better. Shape (n, 3). Quality is the validation's."""
    sign = -1.0 if by.quality.direction == "max" else 1.0
    return np.array([[sign * r.validation, r.seconds, r.cost] for r in rows]).reshape(len(rows), 3)


def mark_front(rows: Sequence[FrontierRow], by: FrontierCriteria) -> list[FrontierRow]:
    """The rows with ``on_front`` set."""
    keep = nondominated(points(rows, by))
    return [replace(r, on_front=bool(k)) for r, k in zip(rows, keep, strict=True)]


def hypervolumes(rows: Sequence[FrontierRow], by: FrontierCriteria) -> tuple[float, float]:
    """Of the naive rows and of all rows, as parts of the box from the best to a tenth beyond the worst of any row.

    Time and cost count by their logarithm: twice as fast is worth the same anywhere.
    """
    table = points(rows, by)
    table[:, 1:] = np.log(table[:, 1:])
    low, high = table.min(axis=0), table.max(axis=0)
    scaled = (table - low) / np.where(high > low, high - low, 1.0)
    reference = np.full(3, 1.1)
    naive = scaled[[r.role == "naive" for r in rows]]
    box = float(np.prod(reference))
    return hypervolume(naive, reference) / box, hypervolume(scaled, reference) / box


def falls(base: FrontierRow, other: FrontierRow, by: FrontierCriteria) -> bool:
    """Whether quality pays: most seeds diverge, the target is missed, or without one it is worse than ``base``.

    Worse: by more than the 95 % confidence interval of the difference of the means.
    """
    if other.diverged > other.seeds or not by.reaches(other.quality):
        return True
    margin = math.hypot(base.ci or 0.0, other.ci or 0.0)
    worse = by.better(base.quality, other.quality) and abs(base.quality - other.quality) > margin
    return worse and by.target is None


def answer(rows: Sequence[FrontierRow], counts: Sequence[int], by: FrontierCriteria) -> str:
    """How far the naive rule scales before quality pays, and what buys it back, in words."""
    naive = {r.workers: r for r in rows if r.role == "naive"}
    tuned = {r.workers: r for r in rows if r.role == "tuned"}
    base = naive.get(counts[0])
    if base is None:
        return f"The program's own settings diverged at {_workers(counts[0])}: there is nothing to scale yet."
    name = by.quality.name
    paying = next((w for w in counts if w not in naive or falls(base, naive[w], by)), None)
    if not by.reaches(base.quality):
        first = f"The program's own settings miss the target {by.target:g} at {_workers(counts[0])}: {_value(base)}."
    elif paying is None:
        first = f"With the naive rule (batch and lr x workers) {name} holds up to {_workers(counts[-1])}"
        first += f" ({_value(naive[counts[-1]])} against {_value(base)})."
    else:
        then = f"falls to {_value(naive[paying])}" if paying in naive else "diverges"
        first = f"With the naive rule (batch and lr x workers) {name} pays from {_workers(paying)} on: "
        first += f"{_value(base)} {then}."
    held = [w for w in counts if w in tuned and not falls(base, tuned[w], by)]
    if not held:
        return f"{first} No settings that hold it were found; search longer."
    best = min((tuned[w] for w in held), key=lambda r: r.seconds)
    gain = base.seconds / best.seconds
    told = "by the step-time model, " if best.seconds_label == "modelled" else ""
    return (
        f"{first} Tuned settings hold it up to {_workers(held[-1])} and are fastest on {best.workers} "
        f"({_value(best)}; batch {best.batch_size}, lr {best.lr:.3g}): {told}{gain:.3g} times as fast as "
        f"{_workers(base.workers)} with the program's own settings."
    )


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"


def _samples(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _value(r: FrontierRow) -> str:
    return f"{r.quality:.4f}" + (f" ± {r.ci:.4f}" if r.ci is not None else "")
