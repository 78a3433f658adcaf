"""Tables and figures of a study: trials, front, workers over time, importance, learning curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import numpy as np

from elastune.core.formatting import count, duration, number, plain, settings_text, value_text
from elastune.core.journal.folds import AllocationSpan
from elastune.core.journal.records import Measured, Reported
from elastune.report import figures as palette
from elastune.report.figures import Axis, Bars, Figure, Level, Marker, Panel, Series, without_outliers
from elastune.report.lines import LOSS
from elastune.report.overviews import (
    RunOverview,
    StudyOverview,
    TrialOverview,
    config_and_sync,
    mechanism_text,
    oriented_values,
)
from elastune.report.tables import Table
from elastune.report.worker_changes import Changes, worker_steps
from elastune.tuning.search.front import default_reference, hypervolume, nondominated
from elastune.tuning.search.importance import Importance
from elastune.tuning.search.objective import Floats, oriented, valued
from elastune.tuning.study.results import INFERENCE, TRAINING, AssetPoint, Assets, Picked, Study
from elastune.tuning.study.trials import Trial, task_of

PHASES: dict[str, tuple[str, str, Marker]] = {
    "naive": ("naive rule", palette.BEFORE, "square"),
    "policy": ("naive rule under a policy", palette.BEFORE, "diamond"),
    "search": ("search", palette.AFTER, "circle"),
    "confirm": ("confirmation, other seeds", palette.BEST, "diamond"),
    "member": ("given settings", palette.BEST, "square"),
}
"""Phases whose values are results: name, colour, marker. Short runs that take times have no results."""
FATES = {
    "complete": ("completed", palette.AFTER),
    "paused": ("paused, not gone on with", palette.PICK),
    "infeasible": ("without a result", palette.BEFORE),
    "unfinished": ("not ended", palette.QUIET),
}
"""The states of trials: their name and colour."""
MAX_CURVES = 6
MOST_SPANS = 3000
MOST_BARS = 12  # parameters, or pairs of them, of an objective
MOST_OBJECTIVES = 3
NAME_WIDTH = 26
BEYOND = "A triangle at the edge: beyond the axis."
MICRO_S = 1e-6  # shorter than any span that matters


# --- tables ---


def trials_table(study: StudyOverview) -> Table:
    """Every trial in the order they started; paused trials show the values of their last report."""
    names = list(study.objectives)
    header = ("trial", "phase", "state", *(plain(name, 30) for name in names), "wall time", "workers", "mechanism")
    header = (*header, "seed", "settings", "why")
    rows = tuple(_trial_cells(trial, names, study.price) for trial in study.trials)
    numeric = frozenset({0, *range(3, 5 + len(names)), 6 + len(names)})
    anchors = tuple(trial_anchor(trial.trial) for trial in study.trials)
    return Table(f"Trials ({len(rows)})", header, rows, numeric, anchors=anchors)


def trial_anchor(trial: int) -> str:
    """The name of the row of ``trial`` in the table of all trials."""
    return f"trial-{trial}"


def front_table(study: StudyOverview, best: Sequence[int], choices: Sequence[Picked] = ()) -> Table:
    """The non-dominated trials ``best`` and the ``choices``, sorted by the first objective. It names the pick."""
    names = list(study.objectives)
    taken = {choice.trial.number: choice for choice in choices}
    chosen = [trial for trial in study.trials if trial.trial in {*best, *taken}]
    if names:
        sign = -1.0 if study.objectives[names[0]] == "max" else 1.0
        chosen.sort(key=lambda trial: sign * (trial.value(names[0]) or 0.0))
    header = ("trial", *(f"{plain(name, 30)} ({study.objectives[name]})" for name in names), "workers", "mechanism")
    header = (*header, "settings", *(["choice"] if choices else []))
    rows = tuple(
        (
            str(trial.trial),
            *(valued(name, trial.value(name), study.price) for name in names),
            trial.workers or "–",
            trial.mechanism,
            _settings_of(trial),
            *([_role(trial.trial, choices)] if choices else []),
        )
        for trial in chosen
    )
    title = "The front" if len(names) > 1 else "Best trial"
    return Table(title, header, rows, frozenset(range(2 + len(names))))


def _role(trial: int, choices: Sequence[Picked]) -> str:
    """``pick`` for the first of ``choices``, ``or`` for the others, "" for any other trial."""
    for place, choice in enumerate(choices):
        if choice.trial.number == trial:
            return "or" if place else "pick"
    return ""


def choices_table(study: Study, choices: Sequence[Picked]) -> Table:
    """The trials to choose from, the pick first, each with the command that trains it."""
    names = [objective.name for objective in study.objectives]
    rows = tuple(
        (
            "or" if place else "pick",
            str(choice.trial.number),
            plain(choice.reason, 300),
            *(valued(name, choice.trial.values.get(name), study.price_per_worker_hour) for name in names),
            choice.command,
        )
        for place, choice in enumerate(choices)
    )
    header = ("", "trial", "why", *(plain(name, 30) for name in names), "command")
    return Table("Which trial to take", header, rows, frozenset({1, *range(3, 3 + len(names))}))


def tasks_table(study: Study) -> Table:
    """The results of trials that have different tasks, in the order they ended."""
    names = [objective.name for objective in study.objectives]
    rows = tuple(
        (
            task_of(trial.config),
            str(trial.number),
            trial.state,
            *(valued(name, trial.values.get(name), study.price_per_worker_hour) for name in names),
        )
        for trial in study.trials
    )
    header = ("part", "trial", "state", *(plain(name, 30) for name in names))
    return Table("The parts of the tree of classes", header, rows, frozenset({1, *range(3, 3 + len(names))}))


def failed_trials_table(study: StudyOverview) -> Table:
    """Trials that were rejected, crashed, diverged or broke a constraint, each with its reason."""
    rows = tuple(
        (
            str(trial.trial),
            trial.phase,
            trial.finished.state,
            trial.workers or "–",
            _settings_of(trial),
            _reason(trial),
        )
        for trial in study.trials
        if trial.finished and trial.finished.state != "complete"
    )
    header = ("trial", "phase", "state", "workers", "settings", "why")
    return Table(f"Trials without a result ({len(rows)})", header, rows, frozenset({0, 3}))


def subset_table(study: Study, chosen: Sequence[tuple[Trial, str]]) -> Table:
    """Trials that represent the front, the most important first, each with a reason."""
    names = [objective.name for objective in study.objectives]
    header = ("trial", *(plain(name, 30) for name in names), "workers", "mechanism", "settings", "why")
    rows = tuple(
        (
            str(trial.number),
            *(valued(name, trial.values.get(name), study.price_per_worker_hour) for name in names),
            value_text(trial.execution.get("workers", "–")),
            mechanism_text(trial.execution),
            settings_text(config_and_sync(trial.config, trial.execution)),
            reason,
        )
        for trial, reason in chosen
    )
    return Table("A subset that stands for the front", header, rows, frozenset(range(2 + len(names))))


def assets_table(assets: Assets, picked: AssetPoint | None = None) -> Table:
    """What can be used of a study: trials, soups, ensembles, joined models. It marks the front and ``picked``."""
    score, best = assets.objectives[0], assets.front()
    header = (
        "what",
        "trials",
        f"{plain(score.name, 30)} ({score.direction})",
        "training",
        "parameters",
        "front",
        "test",
    )
    rows = tuple(
        (
            f"{plain(point.form)} {plain(point.method, 20)}".strip(),
            plain(point.whom, 200),
            number(point.values[score.name]),
            duration(point.values[TRAINING]),
            f"{point.values[INFERENCE]:,.0f}",
            "pick" if point is picked else "front" if any(point is other for other in best) else point.trouble,
            "–" if point.test is None else number(point.test),
        )
        for point in sorted(assets.points, key=lambda point: tuple(oriented(point.values, assets.objectives)))
    )
    note = (
        f"By the predictions {plain(assets.data, 40)}, by which soups and ensembles were chosen, too. Training: "
        "worker-time of these trials and of what they began with, the rest of the search left out. Parameters: that "
        "one inference goes through. Nothing is picked by the test."
    )
    if any(point.trouble for point in assets.points):
        note += " Gone or changed: the file is not what was written, so it cannot be used."
    if unrecorded := dict.fromkeys(source for point in assets.points for source in point.unrecorded):
        note += (
            f" No record shows how long {', '.join(plain(source, 80) for source in unrecorded)} trained: not counted."
        )
    return Table("Single trials, soups, ensembles, joined models", header, rows, frozenset({2, 3, 4, 6}), note)


def importance_table(importance: Importance) -> Table:
    """How large a share each parameter has in deciding an objective."""
    rows = tuple((plain(p.name, 60), f"{100 * p.share:.1f}", str(p.trials)) for p in importance.parameters)
    note = (
        f"By {importance.trials} trials: how far a parameter's values among the best quarter differ from those among "
        "all that have it (PED-ANOVA)."
    )
    header = ("parameter", "share (%)", "trials that have it")
    return Table(f"What decides {plain(importance.objective, 40)}", header, rows, frozenset({1, 2}), note=note)


def _trial_cells(trial: TrialOverview, names: Sequence[str], price: float) -> tuple[str, ...]:
    end, rest = trial.finished, trial.paused
    state = f"paused after epoch {rest.epochs}" if rest else end.state if end else "unfinished"
    values = (rest.values.get(name) if rest else trial.value(name) for name in names)
    return (
        str(trial.trial),
        trial.phase,
        state,
        *(valued(name, value, price) for name, value in zip(names, values, strict=True)),
        duration(end.seconds if end else rest.seconds if rest else None),
        trial.workers or "–",
        trial.mechanism,
        str(trial.started.seed) if trial.started else "–",
        _settings_of(trial),
        _reason(trial),
    )


def _settings_of(trial: TrialOverview) -> str:
    return settings_text(trial.settings) if trial.started else "–"


def _reason(trial: TrialOverview) -> str:
    """The reason in the journal, or else the constraints that were broken."""
    if trial.finished is None:
        return plain(trial.paused.reason, 300) if trial.paused else ""
    broken = [f"{plain(name)} by {number(by)}" for name, by in trial.finished.violations.items() if by > 0]
    return plain(trial.finished.reason, 300) or "; ".join(f"breaks {what}" for what in broken)


# --- figures over trials, and the learning curves of a run ---


def history_figure(study: StudyOverview) -> Figure | None:
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
                    links=_links(of_phase),
                )
            )
    target = study.frontier.target if study.frontier else study.settings.get("target")
    levels = (Level(float(target), f"target {number(float(target))}"),) if isinstance(target, int | float) else ()
    label = f"{plain(name, 40)} ({'higher' if direction == 'max' else 'lower'} is better)"
    drawn = [value for trial in ended if (value := _finite(trial.value(name))) is not None]
    kept = [*(level.y for level in levels), *([y for y in best.y if y is not None][-1:] if best else [])]
    within = without_outliers(drawn, kept)
    panels = [Panel("", Axis("trials ended", whole=True), Axis(label), tuple(series), levels, within=within)]
    if len(study.objectives) > 1 and (panel := _hypervolume_panel(ended, study, places)):
        panels.append(panel)
    failed = sum(not trial.complete for trial in ended)
    caption = f"Crosses on the lower edge: {count(failed, 'trial')} without a result. " if failed else ""
    caption += f"{BEYOND} " if within is not None else ""
    caption += "A click on a mark leads to the trial."
    return Figure("history", f"History: {plain(name, 40)} over the trials", tuple(panels), caption)


def front_figure(study: StudyOverview, best: Sequence[int], pick: int | None = None) -> Figure | None:
    """First objective against time (or the second objective).

    ``best``: numbers of the non-dominated trials; ``pick``: the number of the trial to take.
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

    def points(name: str, trials: Sequence[TrialOverview], color: str, front: bool) -> Series:
        return Series(
            name,
            tuple(trial.value(across) or 0.0 for trial in trials),
            tuple(trial.value(vertical) for trial in trials),
            color,
            line="solid" if front and len(names) == 2 else None,
            labels=tuple(describe_trial(trial, study) for trial in trials),
            inside=tuple(str(trial.trial) for trial in trials) if front else (),
            links=_links(trials),
            faint=not front,
        )

    front = points("front", chosen, palette.AFTER, True)
    series: tuple[Series, ...] = (points("other trials", others, palette.QUIET, False), front)
    mechanisms = list(dict.fromkeys(trial.mechanism for trial in chosen))
    if len(mechanisms) > 1:  # each its colour, on the one line of the front
        series = (series[0], *([replace(front, marker=None, labels=(), inside=())] if front.line else []))
        for i, mechanism in enumerate(mechanisms):
            of_mechanism = [trial for trial in chosen if trial.mechanism == mechanism]
            color = palette.SEQUENCE[i % len(palette.SEQUENCE)]
            series = (*series, replace(points(f"front: {mechanism}", of_mechanism, color, True), line=None))
    if taken := [trial for trial in drawn if trial.trial == pick]:
        ring = replace(points("pick", taken, palette.PICK, True), line=None, marker="ring", inside=())
        series = (*series, ring)
    log = all((trial.value(across) or 0.0) > 0 for trial in drawn)
    kept = [value for trial in chosen if (value := trial.value(vertical)) is not None]
    within = without_outliers([trial.value(vertical) or 0.0 for trial in drawn], kept)
    axes = _objective_axis(across, study, log), _objective_axis(vertical, study, False)
    kept_across = [value for trial in chosen if (value := trial.value(across)) is not None]
    beside = without_outliers([trial.value(across) or 0.0 for trial in drawn], kept_across, log=log)
    panel = Panel("", *axes, series, within=within, across=beside)
    words = "Numbers in the markers are trials; a click on one leads to its row."
    words += f" {BEYOND}" if within is not None or beside is not None else ""
    if len(names) > 2:
        words += f" The front is that of all objectives: {', '.join(plain(name, 30) for name in names)}."
    return Figure("front", f"The front: {plain(vertical, 40)} against {plain(across, 40)}", (panel,), words)


def curves_figure(run: RunOverview, measured: Sequence[Measured] = ()) -> Figure | None:
    """The training loss and every reported metric over the steps, up to ``MAX_CURVES`` metrics.

    ``measured``: records that may have the training loss.
    """
    names = list(dict.fromkeys(name for report in run.reports for name in report.metrics))
    losses = _loss_curve(measured)
    if not names and not losses:
        return None
    panels = (
        *losses,
        *(
            _curve(name, [report for report in run.reports if name in report.metrics], i)
            for i, name in enumerate(names[:MAX_CURVES])
        ),
    )
    rest = len(names) - MAX_CURVES
    caption = f"{count(rest, 'further metric')} in the table." if rest > 0 else ""
    return Figure("curves", "Learning curves", panels, caption)


def _loss_curve(measured: Sequence[Measured]) -> tuple[Panel, ...]:
    """The panel of the training loss; none if no record has one."""
    points = [
        (each, value) for each in measured if (value := _finite(each.signals.get(LOSS, (None, None))[0])) is not None
    ]
    if not points:
        return ()
    x, y = tuple(float(each.step) for each, _ in points), tuple(value for _, value in points)
    labels = tuple(f"loss {number(value)}; step {each.step}; {duration(each.seconds)}" for each, value in points)
    marker: Marker | None = "circle" if len(points) == 1 else None
    series = Series("training loss", x, y, palette.INK, marker=marker, line="solid", labels=labels)
    return (Panel("", Axis("steps", whole=True), Axis("training loss"), (series,), within=without_outliers(y)),)


def workers_figure(run: RunOverview, changes: Changes) -> Figure | None:
    """The number of workers over the steps; None if it did not change."""
    start_workers = run.started.execution.get("workers")
    if not changes.regroupings or not isinstance(start_workers, int):
        return None
    last = run.finished.steps if run.finished else run.reports[-1].step if run.reports else 0
    x, y = worker_steps(start_workers, changes, last)
    series = Series("workers", x, y, palette.SEQUENCE[0], marker=None, line="steps")
    return Figure(
        "workers",
        "Workers over the steps",
        (Panel("", Axis("steps", whole=True), Axis("workers", whole=True), (series,)),),
    )


def _links(trials: Sequence[TrialOverview]) -> tuple[str, ...]:
    return tuple(trial_anchor(trial.trial) for trial in trials)


def describe_trial(trial: TrialOverview, study: StudyOverview) -> str:
    """One trial in one line, shown on hover."""
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
    within = without_outliers([value for value in series.y if value is not None])
    return Panel("", Axis("steps", whole=True), Axis(plain(name, 40)), (series,), within=within)


def _best_so_far(trials: Sequence[TrialOverview], name: str, direction: str, places: dict[int, float]) -> Series | None:
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


def _hypervolume_panel(ended: Sequence[TrialOverview], study: StudyOverview, places: dict[int, float]) -> Panel | None:
    """The hypervolume of the front so far, as a share of the final one."""
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
    return Panel("", Axis("trials ended", whole=True), Axis("hypervolume / final hypervolume"), (series,))


def front_growth(points: Floats) -> list[float]:
    """The hypervolume after each of ``points``, as a share of the final one, whose front sets the reference.

    ``points``: shape (n, k), smaller is better.
    """
    reference = default_reference(points)
    whole, front = hypervolume(points, reference), points[:0]
    shares: list[float] = []
    for point in points:
        front = np.vstack([front, point])
        front = front[nondominated(front)]
        shares.append(hypervolume(front, reference) / whole)
    return shares


def _objective_axis(name: str, study: StudyOverview, log: bool) -> Axis:
    unit = {"seconds": "s", "cost": "worker-hours × price"}.get(name)
    words = "training time" if name == "seconds" else plain(name, 40)
    better = "higher" if study.objectives[name] == "max" else "lower"
    return Axis(f"{words} ({unit + '; ' if unit else ''}{better} is better)", log=log)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# --- figures of the search as a whole: workers over time, importance, growth of the front ---


def workers_by_trial(study: Study) -> Figure | None:
    """Which trial had which part of the workers when: white is waiting. Bars are as thick as their workers are many."""
    shown = [span for span in study.spans if span.end_s - span.begin_s > MICRO_S]
    if not shown:
        return None
    left_out = len(shown) - MOST_SPANS
    lanes = _lanes(shown)
    fates = {trial.number: trial.state for trial in study.trials}
    bars = []
    for fate, (words, color) in FATES.items():
        of_fate = [
            (span, low, high)
            for span, runs in zip(shown[-MOST_SPANS:], lanes[-MOST_SPANS:], strict=True)
            if fates.get(span.trial, "unfinished") == fate
            for low, high in runs
        ]
        if of_fate:
            bars.append(
                Bars(
                    words,
                    color,
                    y=tuple((low + high) / 2 for _, low, high in of_fate),
                    begin=tuple(span.begin_s for span, _, _ in of_fate),
                    end=tuple(span.end_s for span, _, _ in of_fate),
                    thickness=tuple(float(high - low) for _, low, high in of_fate),
                    labels=tuple(_span_label(span) for span, _, _ in of_fate),
                    links=tuple(trial_anchor(span.trial) for span, _, _ in of_fate),
                )
            )
    if not bars:
        return None
    pauses = sum(span.ended == "paused" for span in study.spans)
    resumes = sum(span.began_as == "resumed" for span in study.spans)
    moves = sum(span.ended == "regrouped" for span in study.spans)
    caption = (
        "A bar is a span of a trial with unchanged workers, as thick as they are many; its colour shows what became "
        f"of the trial. {count(pauses, 'pause')}, {count(resumes, 'resumption')}, "
        f"{count(moves, 'change')} of workers while a trial ran."
    )
    if left_out > 0:
        caption += f" The first {left_out} spans are not drawn."
    panel = Panel("", Axis("time of the study (s)"), Axis("workers", whole=True), (), bars=tuple(bars))
    return Figure("timeline", "Who had the workers when", (panel,), caption)


def importance_figure(importances: Sequence[Importance]) -> Figure | None:
    """The parameters that decide each objective, with their shares."""
    panels = tuple(_importance_panel(each) for each in importances if each.parameters)[:MOST_OBJECTIVES]
    if not panels:
        return None
    caption = "How far a parameter's values among the best quarter of the trials differ from those among all."
    return Figure("importance", "What decides the objectives", panels, caption)


def front_over_time(study: Study) -> Figure | None:
    """The hypervolume of the front over the study's time; with one objective, the best value so far."""
    done = sorted((t for t in study.complete if t.phase == "search"), key=lambda trial: trial.ended_s)
    if not done:
        return None
    points = oriented([trial.values for trial in done], study.counted)
    first = study.objectives[0]
    if len(study.objectives) == 1:
        best = np.minimum.accumulate(points[:, 0]) * (-1.0 if first.direction == "max" else 1.0)
        heights, label = best.tolist(), f"best {plain(first.name, 40)} so far"
    else:
        heights, label = front_growth(points), "hypervolume / final hypervolume"
    times = [trial.ended_s for trial in done]
    labels = [
        f"trial {trial.number}; after {duration(trial.ended_s)}; {number(h)}"
        for trial, h in zip(done, heights, strict=True)
    ]
    if study.seconds > times[-1]:
        times, heights, labels = [*times, study.seconds], [*heights, heights[-1]], [*labels, "end of the journal"]
    series = Series(label, tuple(times), tuple(heights), palette.BEST, marker=None, line="steps", labels=tuple(labels))
    panel = Panel("", Axis("time of the study (s)"), Axis(label), (series,))
    return Figure("front_over_time", "What was found by when", (panel,), "Failed and paused trials take time as well.")


def _importance_panel(importance: Importance) -> Panel:
    shown = importance.parameters[:MOST_BARS]
    places = tuple(float(len(shown) - i) for i in range(len(shown)))  # the most important on top
    names = tuple(plain(each.name, NAME_WIDTH) for each in shown)
    labels = tuple(f"{name}; {each.share:.1%}" for name, each in zip(names, shown, strict=True))
    ends = tuple(each.share for each in shown)
    bars = Bars("share", palette.AFTER, places, (0.0,) * len(shown), ends, (0.6,) * len(shown), labels)
    axis = Axis("", ticks=places, names=names)
    return Panel(plain(importance.objective, 40), Axis("share of what decides it"), axis, (), bars=(bars,))


def _lanes(spans: Sequence[AllocationSpan]) -> list[list[tuple[int, int]]]:
    """For each span, the runs [low, high) of worker lanes that it is drawn on: the lowest free lanes.

    A trial whose workers change keeps its lanes as far as possible.
    """
    events = sorted(
        [(span.begin_s, True, span.trial, i) for i, span in enumerate(spans)]
        + [(span.end_s, False, span.trial, i) for i, span in enumerate(spans)]
    )
    taken: dict[int, list[int]] = {}  # by span
    used: set[int] = set()
    last: dict[int, list[int]] = {}  # by trial: its newest lanes
    runs: list[list[tuple[int, int]]] = [[] for _ in spans]
    for _, begins, _, i in events:
        span = spans[i]
        if not begins:
            last[span.trial] = taken.pop(i)
            used.difference_update(last[span.trial])
            continue
        chosen = set([lane for lane in last.get(span.trial, []) if lane not in used][: span.workers])
        lane = 0
        while len(chosen) < span.workers:
            chosen |= {lane} - used
            lane += 1
        taken[i] = sorted(chosen)
        used.update(chosen)
        runs[i] = [(run[0], run[-1] + 1) for run in _consecutive(taken[i])]
    return runs


def _consecutive(numbers: Sequence[int]) -> list[list[int]]:
    return [[n for _, n in group] for _, group in groupby(enumerate(numbers), key=lambda each: each[1] - each[0])]


def _span_label(span: AllocationSpan) -> str:
    ended = f"{span.ended}: {plain(span.reason, 100)}" if span.reason else span.ended
    return (
        f"trial {span.trial}; {count(span.workers, 'worker')}; {span.began_as} after {duration(span.begin_s)}; "
        f"{duration(span.end_s - span.begin_s)}; {ended}"
    )
