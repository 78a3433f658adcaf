"""The figures of a study (its history, its front) and of a run (its learning curves)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from elastune.core.text import count, duration, number, plain, settings_text
from elastune.journal.records import Reported
from elastune.report.figures import palette
from elastune.report.figures.figures import Axis, Figure, Level, Marker, Panel, Series
from elastune.report.gather import RunStory, StudyStory, TrialStory, oriented_values
from elastune.report.tables.changes import Changes, worker_steps
from elastune.search.analysis.front import default_reference, hypervolume, nondominated
from elastune.search.space.objective import Floats, valued

PHASES: dict[str, tuple[str, str, Marker]] = {
    "naive": ("naive rule", palette.BEFORE, "square"),
    "policy": ("naive rule under a policy", palette.BEFORE, "diamond"),
    "search": ("search", palette.AFTER, "circle"),
    "confirm": ("confirmation, other seeds", palette.BEST, "diamond"),
    "member": ("given settings", palette.BEST, "square"),
}
"""Phases whose values are results. Calibration trials are cut short to take times: their quality means nothing."""

MAX_CURVES = 6


def history(study: StudyStory) -> Figure | None:
    """The first objective of every trial in the order they ended, and the best of the search so far."""
    if not study.objectives:
        return None
    name, direction = next(iter(study.objectives.items()))
    ended = [trial for trial in study.ended if trial.phase in PHASES]
    if not any(_finite(trial.value(name)) is not None for trial in ended):
        return None
    places = {trial.trial: float(place) for place, trial in enumerate(ended, start=1)}
    series = []
    best = _best_so_far([t for t in ended if t.phase == "search"], name, direction, places)
    if best:
        series.append(best)
    for phase, (words, color, marker) in PHASES.items():
        of_phase = [trial for trial in ended if trial.phase == phase]
        if of_phase:
            series.append(
                Series(
                    words,
                    tuple(places[trial.trial] for trial in of_phase),
                    tuple(_finite(trial.value(name)) for trial in of_phase),
                    color,
                    marker=marker,
                    labels=tuple(describe_trial(trial, study) for trial in of_phase),
                )
            )
    target = study.found.target if study.found else study.settings.get("target")
    levels = (Level(float(target), f"target {number(float(target))}"),) if isinstance(target, int | float) else ()
    label = f"{plain(name, 40)} ({'higher' if direction == 'max' else 'lower'} is better)"
    panels = [Panel("", Axis("trials ended"), Axis(label), tuple(series), levels)]
    if len(study.objectives) > 1 and (panel := _hypervolume_panel(ended, study, places)):
        panels.append(panel)
    failed = sum(not trial.complete for trial in ended)
    caption = f"Crosses on the lower edge: {count(failed, 'trial')} without a result." if failed else ""
    return Figure("history", f"History: {plain(name, 40)} over the trials", tuple(panels), caption)


def study_front(study: StudyStory, best: Sequence[int], pick: int | None = None) -> Figure | None:
    """First objective against time (or the second objective).

    ``best``: trial numbers of the non-dominated ones; ``pick``: which one to take.
    """
    names = list(study.objectives)
    if len(names) < 2:
        return None
    vertical = names[0]
    across = "seconds" if "seconds" in names[1:] else names[1]
    drawn = [
        trial
        for trial in study.trials
        if trial.phase == "search"
        and _finite(trial.value(vertical)) is not None
        and _finite(trial.value(across)) is not None
    ]
    if not drawn:
        return None
    chosen = sorted((t for t in drawn if t.trial in set(best)), key=lambda t: t.value(across) or 0.0)
    others = [trial for trial in drawn if trial not in chosen]

    def points(name: str, trials: Sequence[TrialStory], color: str, front: bool) -> Series:
        return Series(
            name,
            tuple(trial.value(across) or 0.0 for trial in trials),
            tuple(trial.value(vertical) for trial in trials),
            color,
            line="solid" if front and len(names) == 2 else None,
            labels=tuple(describe_trial(trial, study) for trial in trials),
            inside=tuple(trial.workers for trial in trials) if front else (),
            faint=not front,
        )

    front = points("front", chosen, palette.AFTER, True)
    series: tuple[Series, ...] = (points("other trials", others, palette.QUIET, False), front)
    mechanisms = list(dict.fromkeys(trial.mechanism for trial in chosen))
    if len(mechanisms) > 1:  # each its colour, on the one line of the front
        series = (series[0], *([replace(front, marker=None, labels=(), inside=())] if front.line else []))
        for i, mechanism in enumerate(mechanisms):
            own = [trial for trial in chosen if trial.mechanism == mechanism]
            color = palette.SEQUENCE[i % len(palette.SEQUENCE)]
            series = (*series, replace(points(f"front: {mechanism}", own, color, True), line=None))
    if taken := [trial for trial in drawn if trial.trial == pick]:
        ring = replace(points("pick", taken, palette.PICK, True), line=None, marker="ring", inside=())
        series = (*series, ring)
    log = all((trial.value(across) or 0.0) > 0 for trial in drawn)
    panel = Panel("", _objective_axis(across, study, log), _objective_axis(vertical, study, False), series)
    words = "Numbers in the markers are worker counts."
    if len(names) > 2:
        words += f" The front is that of all objectives: {', '.join(plain(name, 30) for name in names)}."
    return Figure("front", f"The front: {plain(vertical, 40)} against {plain(across, 40)}", (panel,), words)


def curves(run: RunStory) -> Figure | None:
    """Every reported metric over the steps, up to ``MAX_CURVES`` of them."""
    names = list(dict.fromkeys(name for report in run.reports for name in report.metrics))
    if not names:
        return None
    panels = tuple(
        _curve(name, [report for report in run.reports if name in report.metrics], i)
        for i, name in enumerate(names[:MAX_CURVES])
    )
    rest = len(names) - MAX_CURVES
    caption = f"{count(rest, 'further metric')} in the table." if rest > 0 else ""
    return Figure("curves", "Learning curves", panels, caption)


def workers(run: RunStory, changes: Changes) -> Figure | None:
    """How many workers there were over the steps, if that changed."""
    begun = run.started.means.get("workers")
    if not changes.regroupings or not isinstance(begun, int):
        return None
    last = run.finished.steps if run.finished else run.reports[-1].step if run.reports else 0
    x, y = worker_steps(begun, changes, last)
    series = Series("workers", x, y, palette.SEQUENCE[0], marker=None, line="steps")
    return Figure("workers", "Workers over the steps", (Panel("", Axis("steps"), Axis("workers"), (series,)),))


def describe_trial(trial: TrialStory, study: StudyStory) -> str:
    """One trial in one line, for hovering."""
    parts = [f"trial {trial.trial}"]
    parts += [
        f"{plain(name, 30)} {valued(name, trial.value(name), study.price)}"
        for name in study.objectives
        if trial.complete
    ]
    if trial.started:
        parts += [f"{trial.workers} worker{'' if trial.workers == '1' else 's'}"] if trial.workers else []
        parts += [trial.mechanism] if trial.mechanism != "replicated" else []
        parts.append(plain(settings_text(trial.settings), 160))
    if trial.finished and trial.finished.reason:
        parts.append(plain(trial.finished.reason, 100))
    return "; ".join(parts)


def _curve(name: str, reports: Sequence[Reported], place: int) -> Panel:
    series = Series(
        plain(name, 40),
        tuple(float(report.step) for report in reports),
        tuple(_finite(report.metrics[name]) for report in reports),
        palette.SEQUENCE[place % len(palette.SEQUENCE)],
        line="solid",
        labels=tuple(
            f"{plain(name, 40)} {valued(name, report.metrics[name])}; epoch {report.epoch}; "
            f"{count(report.samples, 'sample')}; {duration(report.seconds)}"
            for report in reports
        ),
    )
    return Panel("", Axis("steps"), Axis(plain(name, 40)), (series,))


def _best_so_far(trials: Sequence[TrialStory], name: str, direction: str, places: dict[int, float]) -> Series | None:
    valued = [(places[trial.trial], value) for trial in trials if (value := _finite(trial.value(name))) is not None]
    if not valued:
        return None
    better = max if direction == "max" else min
    best = tuple(accumulate((value for _, value in valued), better))
    return Series(
        "best of the search so far",
        tuple(place for place, _ in valued),
        best,
        palette.INK,
        marker=None,
        line="steps",
    )


def _hypervolume_panel(ended: Sequence[TrialStory], study: StudyStory, places: dict[int, float]) -> Panel | None:
    """What the front so far covers, as a share of what the last one does; the reference lies just outside the last."""
    trials, points = oriented_values((trial for trial in ended if trial.phase == "search"), study.objectives)
    if not trials:
        return None
    series = Series(
        "hypervolume of the front so far",
        tuple(places[trial.trial] for trial in trials),
        tuple(front_growth(points)),
        palette.BEST,
        marker=None,
        line="steps",
    )
    return Panel("", Axis("trials ended"), Axis("hypervolume / final hypervolume"), (series,))


def front_growth(points: Floats) -> list[float]:
    """After each of ``points``, shape (n, k), smaller is better: the share of the last front's hypervolume so far."""
    reference = default_reference(points)
    whole, front = hypervolume(points, reference), points[:0]
    shares: list[float] = []
    for point in points:
        front = np.vstack([front, point])
        front = front[nondominated(front)]
        shares.append(hypervolume(front, reference) / whole)
    return shares


def _objective_axis(name: str, study: StudyStory, log: bool) -> Axis:
    unit = {"seconds": "s", "cost": "worker-hours × price"}.get(name)
    words = "training time" if name == "seconds" else plain(name, 40)
    better = "higher" if study.objectives[name] == "max" else "lower"
    return Axis(f"{words} ({unit + '; ' if unit else ''}{better} is better)", log=log)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
