"""From trainings and step times to the rows of a frontier, and those of them that no other beats. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Literal

import numpy as np

from elastune.core.run import Means, number
from elastune.frontier.criteria import FrontierCriteria, batch_of
from elastune.frontier.trainings import NOISE_SCALE, Training
from elastune.frontier.verdict import judge
from elastune.frontier.ways import Recipe, StepKind
from elastune.journal.records import FrontierRow, RunFinished, ScalingPoint
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
    others: Mapping[int, StepKind] | None = None,
) -> FrontierRow | None:
    """The table's row for ``recipe`` and ``crew``, over the seeds in ``trainings``; None where all seeds diverged.

    ``crew``: as it would train it, its way and all. ``baseline``: trainings of the program's own settings on the
    smallest worker count, with whatever seeds. ``kind``: of its steps; ``ways``: what of its means is not as it was
    asked for. ``others``: the kinds of steps of other numbers of workers, for ``scaling``.
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
    points = _scaling(good, {**(others or {}), workers: kind}, by)
    own = next(point for point in points if point.workers == workers)
    efficiency, label = _efficiency(points[0], own)
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
        seconds=own.seconds,
        seconds_label=own.seconds_label,
        seconds_factor=own.seconds_factor,
        throughput=fmean(t.run.samples for t in good if t.run is not None) / own.seconds if own.seconds > 0 else None,
        scaling_efficiency=efficiency,
        scaling_label=label,
        cost=own.cost,
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
        scaling=points,
        seed_values=list(found.values),
        seed_seconds=[by.seconds(t, kind)[0] for t in good],
    )


def _scaling(trainings: Sequence[Training], kinds: Mapping[int, StepKind], by: FrontierCriteria) -> list[ScalingPoint]:
    """What ``trainings`` would take by each of ``kinds``, which are those of so many workers; fewest first."""
    points = []
    for workers, kind in sorted(kinds.items(), key=lambda each: each[0]):
        timed = [by.seconds(t, kind) for t in trainings]
        seconds, measured = fmean(s for s, _ in timed), all(measured for _, measured in timed)
        factor = 1.0 if measured else by.times.factor_of(kind)
        label: Literal["measured", "modelled"] = "measured" if measured else "modelled"
        points.append(ScalingPoint(workers, seconds, label, factor, by.cost(workers, seconds)))
    return points


def _efficiency(fewest: ScalingPoint, own: ScalingPoint) -> tuple[float | None, Literal["measured", "modelled"] | None]:
    """How many times as fast over how many times as many workers; (None, None) where they are the fewest."""
    if fewest.workers == own.workers or own.seconds <= 0:
        return None, None
    measured = fewest.seconds_label == own.seconds_label == "measured"
    return fewest.seconds / own.seconds * fewest.workers / own.workers, "measured" if measured else "modelled"


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
    """The rows with ``on_front`` set. Where there is a target, no row that misses it by its whole interval is on it."""
    there = [i for i, r in enumerate(rows) if by.target is None or r.verdict != "falls"]
    keep = nondominated(points([rows[i] for i in there], by))
    front = {i for i, kept in zip(there, keep, strict=True) if kept}
    return [replace(r, on_front=i in front) for i, r in enumerate(rows)]
