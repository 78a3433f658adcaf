"""From trainings and step times to the rows of a frontier, and those of them that no other beats. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Literal

import numpy as np

from elastune.core.run import Means, number
from elastune.frontier.criteria import FrontierCriteria, batch_of
from elastune.frontier.trainings import NOISE_SCALE, Training
from elastune.frontier.verdict import judge
from elastune.frontier.ways import Recipe, StepKind
from elastune.journal.records import FrontierRow, RunFinished
from elastune.plan.intervals import bounded_ci
from elastune.search.analysis.front import nondominated


def row(
    role: Literal["naive", "tuned"],
    crew: Means,
    recipe: Recipe,
    lr_rule: str,
    trainings: Sequence[Training],
    by: FrontierCriteria,
    baseline: Sequence[Training] = (),
    kind: StepKind | None = None,
    ways: str = "",
) -> FrontierRow | None:
    """The table's row for ``recipe`` and ``crew``, over the seeds in ``trainings``; None where all seeds diverged.

    ``crew``: as it would train it, its way and all. ``baseline``: trainings of the program's own settings on the
    smallest worker count, with whatever seeds. ``kind``: of its steps; ``ways``: what of its means is not as it was
    asked for.
    """
    good = [t for t in trainings if t.run is not None]
    name = by.quality.name
    held_out = all(f"test_{name}" in t.result.metrics for t in good)
    found = judge(trainings, baseline, by, f"test_{name}" if held_out else name)
    if found is None:
        return None
    noise_scale, noise_scale_error = noise_scale_of([t.run for t in good if t.run is not None])
    workers, mesh, config = crew.workers, crew.first_mesh, recipe.config
    kind = kind or StepKind(mesh)
    timed = [by.seconds(t, kind) for t in good]
    seconds, measured = fmean(s for s, _ in timed), all(measured for _, measured in timed)
    reached = _times_to_target(good, kind, by)
    return FrontierRow(
        role=role,
        workers=workers,
        batch_size=batch_of(config),
        lr=number(config, "lr"),
        lr_rule=lr_rule,
        mechanism=crew.mechanism,
        mesh=str(mesh),
        mode=crew.mode,
        config=dict(recipe.config),
        quality=fmean(found.values),
        ci=found.interval,
        seeds=len(good),
        held_out=held_out,
        test_samples=found.samples,
        verdict=found.word,
        loss=None if found.against is None else found.against.loss,
        loss_bound=None if found.against is None else found.against.high,
        margin=None if found.against is None else found.against.margin,
        pairs=0 if found.against is None else found.against.pairs,
        validation=fmean(t.result.metrics[name] for t in good),
        seconds=seconds,
        seconds_label="measured" if measured else "modelled",
        seconds_factor=1.0 if measured else by.times.factor_of(kind),
        throughput=fmean(t.run.samples for t in good if t.run is not None) / seconds if seconds > 0 else None,
        cost=by.cost(workers, seconds),
        time_to_target_s=fmean(reached) if len(reached) == len(good) else None,
        time_to_target_ci=bounded_ci(reached, 0.0) if len(reached) == len(good) else None,
        reached=len(reached),
        diverged=len(trainings) - len(good),
        trials=[t.trial for t in trainings],
        noise_scale=noise_scale,
        noise_scale_error=noise_scale_error,
        quality_label="measured" if all(t.run.workers == workers for t in good if t.run is not None) else "emulated",
        num_slots=crew.num_slots,
        means=recipe.way.told(crew),
        ways=ways,
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


def _times_to_target(trainings: Sequence[Training], kind: StepKind, by: FrontierCriteria) -> list[float]:
    """Seconds until the validation quality first reaches the target, of each seed that does."""
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
    """(quality, seconds, cost) of each row, smaller is better. Shape (n, 3). Quality is the validation's."""
    sign = -1.0 if by.quality.direction == "max" else 1.0
    return np.array([[sign * r.validation, r.seconds, r.cost] for r in rows]).reshape(len(rows), 3)


def mark_front(rows: Sequence[FrontierRow], by: FrontierCriteria) -> list[FrontierRow]:
    """The rows with ``on_front`` set."""
    keep = nondominated(points(rows, by))
    return [replace(r, on_front=bool(k)) for r, k in zip(rows, keep, strict=True)]


def with_efficiency(rows: Sequence[FrontierRow]) -> list[FrontierRow]:
    """The rows with their scaling efficiency: samples a second over those of one worker with the program's own
    settings, divided by workers. None have one where no such row is."""
    base = next((r for r in rows if r.role == "naive" and r.workers == 1), None)
    return [r if base is None else _efficient(r, base) for r in rows]


def _efficient(r: FrontierRow, base: FrontierRow) -> FrontierRow:
    if not r.throughput or not base.throughput:
        return r
    both_measured = r.seconds_label == base.seconds_label == "measured"
    return replace(
        r,
        scaling_efficiency=r.throughput / base.throughput / r.workers,
        scaling_label="measured" if both_measured else "modelled",
    )
