"""What the trainings of ``adaptive.py`` say: accuracy, steps and modelled time by method, and who beats whom. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.adaptive.adaptive_search import Chosen
from benchmarks.adaptive.adaptive_trial import Course, Look

from elastune.core.plan.confidence_intervals import mean_ci
from elastune.core.plan.data_parallel import DataParallelStep

MONITORED = (
    1.02  # what a step with monitors may take over one without: the bound that benchmarks/adaptive/monitoring.py holds
)
GOAL = 0.6  # of the best fixed setting's time
StepSeconds = Callable[[int], float]  # by global batch


@dataclass(frozen=True)
class Row:
    """A method over its seeds. Accuracies are fractions; ``ci`` half-widths of 95 % intervals of means (t over seeds).

    ``failed``: seeds that diverged or collapsed; they are in no mean. ``seconds``: modelled, of the whole training.
    """

    name: str
    data: str
    decay: str
    batch: int
    adaptive: bool
    lr: float
    at_edge: bool
    seeds: int
    failed: int
    validation: float
    validation_ci: float
    test: float
    test_ci: float
    steps: float
    samples: float
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """An adaptive method against the best fixed setting: that with the best mean validation accuracy at the end of
    those that brought all seeds through. Settings that did not are no rivals.

    ``target``: that mean less its interval's half-width. ``*_to_target_s``: mean modelled time at which validation
    first reaches it, None where a seed never does. ``within``: its test accuracy is not below the best fixed one's by
    more than that one's half-width. ``dominated_by``: fixed settings at least as accurate on test data in no more time.
    """

    adaptive: str
    best_fixed: str
    difference: float
    within: bool
    time_ratio: float
    target: float
    fixed_to_target_s: float | None
    adaptive_to_target_s: float | None
    dominated_by: tuple[str, ...]

    @property
    def to_target_ratio(self) -> float | None:
        """Adaptive over fixed."""
        if self.adaptive_to_target_s is None or self.fixed_to_target_s is None:
            return None
        return self.adaptive_to_target_s / self.fixed_to_target_s

    @property
    def holds(self) -> bool:
        """Whether adapting was worth it, as the goal has it."""
        return self.within and self.time_ratio <= GOAL and not self.dominated_by

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "to_target_ratio": self.to_target_ratio, "holds": self.holds}


def at_workers(model: DataParallelStep, workers: int) -> StepSeconds:
    """Steps on so many workers, whatever the batch."""
    return lambda batch: model.step_s(batch, workers)


def at_most_workers(model: DataParallelStep, most: int) -> StepSeconds:
    """Each step on as many workers as make it fastest, up to ``most``: small batches need not pay for all of them."""
    counts = [1 << k for k in range(most.bit_length()) if 1 << k <= most]
    return lambda batch: min(model.step_s(batch, workers) for workers in counts)


def seconds(step_s: StepSeconds, look: Look, monitored: bool) -> float:
    """Modelled time from the start of training to ``look``."""
    return sum(count * step_s(size) for size, count in look.steps) * (MONITORED if monitored else 1.0)


def row(chosen: Chosen, step_s: StepSeconds) -> Row | None:
    """The method's figures; None where no seed came through."""
    method = chosen.method
    ended = [course.looks[-1] for course in chosen.courses if not course.lost]
    if not ended:
        return None
    validation, validation_ci = mean_ci([look.validation for look in ended])
    test, test_ci = mean_ci([look.test for look in ended if look.test is not None])
    return Row(
        name=method.name,
        data=method.data,
        decay=method.decay,
        batch=method.batch,
        adaptive=method.adaptive,
        lr=chosen.lr,
        at_edge=chosen.at_edge,
        seeds=len(ended),
        failed=len(chosen.courses) - len(ended),
        validation=validation,
        validation_ci=validation_ci or 0.0,
        test=test,
        test_ci=test_ci or 0.0,
        steps=statistics.mean(look.count for look in ended),
        samples=statistics.mean(look.samples for look in ended),
        seconds=statistics.mean(seconds(step_s, look, method.adaptive) for look in ended),
    )


def to_target(courses: Sequence[Course], target: float, step_s: StepSeconds) -> float | None:
    """Mean modelled time at which validation first reaches ``target``; None where some seed never does."""
    times = []
    for course in courses:
        reached = next((look for look in course.looks if look.validation >= target), None)
        if course.lost or reached is None:
            return None
        times.append(seconds(step_s, reached, bool(course.setting.policies)))
    return statistics.mean(times)


def verdict(adaptive: Chosen, fixed: Sequence[Chosen], step_s: StepSeconds) -> Verdict | None:
    """``adaptive`` against all of ``fixed``; None where nothing came through on a side."""
    mine = row(adaptive, step_s)
    rows = [(result, chosen) for chosen in fixed if (result := row(chosen, step_s)) is not None and not result.failed]
    if mine is None or not rows:
        return None
    best, courses = max(rows, key=lambda pair: pair[0].validation)
    target = best.validation - best.validation_ci
    return Verdict(
        adaptive=mine.name,
        best_fixed=best.name,
        difference=mine.test - best.test,
        within=mine.test >= best.test - best.test_ci,
        time_ratio=mine.seconds / best.seconds,
        target=target,
        fixed_to_target_s=to_target(courses.courses, target, step_s),
        adaptive_to_target_s=to_target(adaptive.courses, target, step_s),
        dominated_by=tuple(r.name for r, _ in rows if r.test >= mine.test and r.seconds <= mine.seconds),
    )


def batches_over_time(course: Course, step_s: StepSeconds) -> list[tuple[float, int]]:
    """(modelled seconds, global batch from then on), from the start to the end; an epoch's smaller last step is taken
    as a whole one."""
    batch, step, now_s = course.setting.batch, 0, 0.0
    results = [(0.0, batch)]
    for at, what in course.changes:
        if "batch_size" not in what:
            continue
        now_s, step, batch = now_s + (at - step) * step_s(batch), at, what["batch_size"]
        results.append((now_s, batch))
    return [*results, (now_s + (course.looks[-1].count - step) * step_s(batch), batch)]


def table(rows: Sequence[Row], heading: str) -> str:
    """Rows as Markdown."""
    lines = [
        f"{heading}",
        "",
        "| method | lr | test accuracy % | validation % | steps | samples | modelled time s |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        edge = " (edge)" if r.at_edge else ""
        failed = f" ({r.failed} of {r.failed + r.seeds} seeds diverged)" if r.failed else ""
        lines.append(
            f"| {r.name}{failed} | {r.lr:g}{edge} | {100 * r.test:.2f} ± {100 * r.test_ci:.2f} "
            f"| {100 * r.validation:.2f} ± {100 * r.validation_ci:.2f} | {r.steps:.0f} | {r.samples:.0f} "
            f"| {r.seconds:.2f} |"
        )
    return "\n".join(lines)


def sentence(v: Verdict) -> str:
    """The verdict in words."""
    ratio = v.to_target_ratio
    reach = "never reached by every seed" if ratio is None else f"reached in {ratio:.2f} x its time"
    dominated = f"dominated by {', '.join(v.dominated_by)}" if v.dominated_by else "dominated by no fixed setting"
    return (
        f"{v.adaptive} against {v.best_fixed}: test accuracy {100 * v.difference:+.2f} points "
        f"({'within' if v.within else 'NOT within'} its CI) in {v.time_ratio:.2f} x its time; its accuracy less CI "
        f"({100 * v.target:.2f} % on validation) {reach}; {dominated}. Goal (<= {GOAL} x): "
        f"{'met' if v.holds else 'NOT met'}."
    )
