"""The answer at a glance: title, tiles, banners and a small table, at the head of a page and of a terminal's output.

``frontier_glance``, ``study_glance`` and ``run_glance`` read what the journal holds, and compute no results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from elastune.core.formatting import (
    cost,
    count,
    differing,
    duration,
    estimate,
    interval,
    number,
    plain,
    settings_text,
    whole,
)
from elastune.core.journal.records import FrontierFound, FrontierRow
from elastune.report.document import Glance, Tile, few_words
from elastune.report.frontier import own_settings_row, row_anchor, shown_row
from elastune.report.overviews import RunOverview, StudyOverview, TrialOverview
from elastune.report.study import trial_anchor
from elastune.report.tables import Table
from elastune.tuning.search.front import quality
from elastune.tuning.search.objective import Objective, oriented, valued
from elastune.tuning.study.results import Picked, Study
from elastune.tuning.study.trials import Trial

FEW_TRIALS = 20
"""A search of fewer trials is thin: 20 random ones have one of the best 5 % of settings in two of three cases."""
MOST_ROWS = 12
MOST_LEFT_OUT = 2
TODAY, ONE_TUNED = "today's settings", "one worker, tuned"
NOT_TRIED = "not tried"


# --- a frontier ---


def frontier_glance(frontier: FrontierFound, study: StudyOverview | None = None) -> Glance:
    """The pick of a frontier beside the program's own settings and beside tuned settings on the fewest workers."""
    number_of_pick = frontier.answer.pick
    banners = _frontier_banners(frontier, study)
    table = frontier_short_table(frontier)
    if number_of_pick is None:
        return Glance(_no_pick(frontier), (), banners, table)
    pick = frontier.rows[number_of_pick]
    label = " (modelled)" if pick.seconds_label == "modelled" else ""
    title = f"{count(pick.workers, 'worker')}: {number(pick.quality, 3)} in {duration(pick.seconds)}{label}"
    return Glance(few_words(title), _frontier_tiles(frontier, pick), banners, table)


def _no_pick(frontier: FrontierFound) -> str:
    if not frontier.rows:
        return "No training has a result"
    name = plain(frontier.quality, 30)
    if frontier.target is not None:
        return few_words(f"No row is shown to reach {name} {number(frontier.target)}")
    return few_words(f"No row is shown to hold {name}")


def _frontier_tiles(frontier: FrontierFound, pick: FrontierRow) -> tuple[Tile, ...]:
    price = frontier.price_per_worker_hour
    fewest = min(row.workers for row in frontier.rows)
    tuned = [row for row in frontier.rows if row.role == "tuned" and row.workers == fewest]
    rows = [(TODAY, own_settings_row(frontier)), (_one_tuned(fewest), shown_row(tuned, frontier) if tuned else None)]

    def beside(text: Any) -> tuple[tuple[str, str], ...]:
        return tuple(
            (what, NOT_TRIED if row is None else "this is it" if row is pick else text(row)) for what, row in rows
        )

    return (
        Tile(
            plain(frontier.quality, 40) + (f" ({interval(pick.ci)}, 95 %)" if pick.ci is not None else ""),
            estimate(pick.quality, pick.ci).partition(" ")[0],
            beside(lambda row: number(row.quality)),
        ),
        Tile(f"time{_label(pick)}", duration(pick.seconds), beside(lambda row: duration(row.seconds) + _label(row))),
        Tile(f"cost{_label(pick)}", cost(pick.cost, price), beside(lambda row: cost(row.cost, price))),
    )


def _one_tuned(fewest: int) -> str:
    return ONE_TUNED if fewest == 1 else f"{count(fewest, 'worker')}, tuned"


def _label(row: FrontierRow) -> str:
    if row.seconds_label == "measured":
        return ""
    return " (modelled)" if row.seconds_factor is None else f" (modelled, ×÷ {number(row.seconds_factor, 3)})"


def _frontier_banners(frontier: FrontierFound, study: StudyOverview | None) -> tuple[str, ...]:
    banners = []
    if study is not None:
        banners += _thin(sum(trial.phase == "search" and trial.complete for trial in study.trials))
    modelled = sorted({row.workers for row in frontier.rows if row.seconds_label == "modelled"})
    if modelled:
        factors = [row.seconds_factor for row in frontier.rows if row.seconds_label == "modelled"]
        known = [factor for factor in factors if factor is not None]
        off = f"they may be off by a factor of {number(max(known), 3)}" if known else "the model could not be checked"
        workers = "1 worker" if modelled == [1] else f"{', '.join(map(str, modelled))} workers"
        banners.append(f"Times on {workers} are modelled, not measured: {off}.")
    machine, pick = frontier.answer.this_machine, frontier.answer.pick
    if machine is not None and pick is not None:
        banners += _exceeds(
            frontier.rows[pick].workers, machine.gpus or machine.cores, "GPU" if machine.gpus else "core"
        )
    left_out = frontier.answer.not_done
    banners += [f"Not done: {plain(each, 200)}." for each in left_out[:MOST_LEFT_OUT]]
    if len(left_out) > MOST_LEFT_OUT:
        banners.append(f"{count(len(left_out) - MOST_LEFT_OUT, 'further request')} not carried out: see below.")
    return tuple(banners)


def frontier_short_table(frontier: FrontierFound) -> Table:
    """Each row of a frontier in five columns. Of the settings only those that differ between rows are shown."""
    rows = frontier.rows
    names = differing([_row_settings(row) for row in rows])
    cells = tuple(
        (
            whole(row.workers),
            _which(row, frontier, i, names),
            estimate(row.quality, row.ci),
            ("" if row.seconds_label == "measured" else "≈ ") + duration(row.seconds),
            ("" if row.seconds_label == "measured" else "≈ ") + cost(row.cost, frontier.price_per_worker_hour),
        )
        for i, row in enumerate(rows)
    )
    header = ("workers", "settings that differ", f"{plain(frontier.quality, 40)} (95 % interval)", "time", "cost")
    strong = frozenset() if frontier.pick is None else frozenset({frontier.pick})
    note = "≈: modelled." if any(row.seconds_label == "modelled" for row in rows) else ""
    anchors = tuple(row_anchor(i) for i in range(len(rows)))
    return Table("The frontier", header, cells, frozenset({0, 3, 4}), note, strong, anchors=anchors)


def _row_settings(row: FrontierRow) -> dict[str, Any]:
    return {**row.config, "batch_size": row.batch_size, "lr": row.lr}


def _which(row: FrontierRow, frontier: FrontierFound, i: int, names: Sequence[str]) -> str:
    """What the row is, and the settings by which it differs from others."""
    own = own_settings_row(frontier)
    role = "pick: " if i == frontier.pick else ""
    role += "today's" if row is own else "naive rule" if row.role == "naive" else "tuned"
    settings = _row_settings(row)
    shown = settings_text({name: settings[name] for name in names if name in settings})
    return "; ".join(part for part in (role, plain(row.apart, 80), shown) if part)


# --- a study ---


def study_glance(study: StudyOverview, results: Study | None, choices: Sequence[Picked], table: Table) -> Glance:
    """The pick of a study beside the program's own settings and beside the best trial on one worker."""
    if results is None or not choices:
        return Glance(_without_choice(study, results), (), (), table)
    pick, lead = choices[0].trial, quality(results.objectives)
    on = count(workers, "worker") if isinstance(workers := pick.execution.get("workers"), int) else ""
    value = valued(lead.name, pick.values[lead.name], study.price)
    title = f"Trial {pick.number}: {value} in {duration(_time(pick))}{f' on {on}' if on else ''}"
    banners = _thin(sum(trial.phase == "search" for trial in results.complete))
    if study.settings.get("simulated") is True:
        banners.append("Simulated: the times and values of all trials are modelled.")
    cores, on_cpu = study.started.context.get("cores"), pick.execution.get("device", "cpu") == "cpu"
    if isinstance(cores, int) and isinstance(workers, int) and on_cpu:
        banners += _exceeds(workers, cores, "core")
    return Glance(few_words(title), _study_tiles(results, pick, lead), tuple(banners), table)


def _without_choice(study: StudyOverview, results: Study | None) -> str:
    ended = f"{count(len(study.ended), 'trial')} ended"
    if results is not None and results.complete:
        return f"No trial can be recommended; {ended}"
    return ended if any(trial.complete for trial in study.trials) else f"No trial has a result; {ended}"


def _study_tiles(results: Study, pick: Trial, lead: Objective) -> tuple[Tile, ...]:
    price = results.price_per_worker_hour
    alone = [trial for trial in results.complete if trial.execution.get("workers") == 1]
    best = min(alone, key=lambda trial: float(oriented(trial.values, [lead])[0]), default=None)
    trials = [(TODAY, _own_settings(results)), (ONE_TUNED, best)]

    def beside(text: Any) -> tuple[tuple[str, str], ...]:
        return tuple(
            (what, NOT_TRIED if trial is None else "this is it" if trial is pick else text(trial))
            for what, trial in trials
        )

    def reached(trial: Trial) -> str:
        return valued(lead.name, trial.values[lead.name], price)

    def spent(trial: Trial) -> str:
        return cost(trial.values.get("cost", trial.worker_seconds / 3600 * price), price)

    return (
        Tile(plain(lead.name, 40), reached(pick), beside(reached)),
        Tile("time", duration(_time(pick)), beside(lambda trial: duration(_time(trial)))),
        Tile("cost", spent(pick), beside(spent)),
    )


def _time(trial: Trial) -> float:
    return trial.values.get("seconds", trial.seconds)


def _own_settings(results: Study) -> Trial | None:
    """The complete trial on the fewest workers that has the program's own settings; None if none was tried."""
    own = [
        trial
        for trial in results.complete
        if results.defaults and all(trial.config.get(name, value) == value for name, value in results.defaults.items())
    ]
    return min(own, key=lambda trial: int(trial.execution.get("workers", 1)), default=None)


def front_short_table(study: StudyOverview, best: Sequence[int], choices: Sequence[Picked]) -> Table:
    """The choices, the pick first, then the other trials ``best`` of the front, in five columns.

    The columns are the number, two objectives, the workers, and the settings that differ between the trials.
    """
    picks = {choice.trial.number: "or" if place else "pick" for place, choice in enumerate(choices)}
    by_number, names = {trial.trial: trial for trial in study.trials}, list(study.objectives)[:2]
    trials = [by_number[number] for number in dict.fromkeys([*picks, *best])]
    shown = trials[:MOST_ROWS]
    settings = differing([trial.settings for trial in shown]) if len(shown) > 1 else _searched(shown)
    rows = tuple(
        (
            str(trial.trial),
            *(valued(name, trial.value(name), study.price) for name in names),
            trial.workers or "–",
            "; ".join(
                part
                for part in (
                    picks.get(trial.trial, ""),
                    settings_text({name: trial.settings[name] for name in settings if name in trial.settings}),
                )
                if part
            ),
        )
        for trial in shown
    )
    header = ("trial", *(f"{plain(name, 30)} ({study.objectives[name]})" for name in names), "workers")
    title = "The front" if len(study.objectives) > 1 else "Best trial"
    rest = len(trials) - len(shown)
    note = f"{count(rest, 'further trial')} of the front: see the table of all." if rest > 0 else ""
    strong = frozenset(i for i, trial in enumerate(shown) if picks.get(trial.trial) == "pick")
    links = tuple(trial_anchor(trial.trial) for trial in shown)
    numeric = frozenset(range(2 + len(names)))
    return Table(title, (*header, "settings that differ"), rows, numeric, note, strong, links=links)


def _searched(trials: Sequence[TrialOverview]) -> tuple[str, ...]:
    """The settings of one trial that the search chose; all of its settings where no search did."""
    chosen = tuple(name for trial in trials for name in trial.started.params)
    return chosen or tuple(name for trial in trials for name in trial.settings)


# --- a run ---


def run_glance(run: RunOverview, name: str) -> Glance:
    """The first metric of a run, its time and its worker time, and its last reports."""
    end, execution = run.finished, run.started.execution
    table = _reports(run)
    if end is None:
        if run.failed is not None:
            return Glance(few_words(f"{name} failed: {plain(run.failed.reason.replace('_', ' '), 40)}"), table=table)
        steps = run.reports[-1].step if run.reports else 0
        return Glance(few_words(f"{name}: {count(steps, 'step')} reported so far"), table=table)
    first = next(iter(end.metrics), None)
    reached = (
        f"{plain(first, 20)} {valued(first, end.metrics[first])}" if first is not None else count(end.steps, "step")
    )
    title = f"{name}: {reached} in {duration(end.seconds)} on {count(end.workers, 'worker')}"
    others = tuple((plain(key, 30), valued(key, value)) for key, value in list(end.metrics.items())[1:3])
    tiles = [] if first is None else [Tile(plain(first, 40), valued(first, end.metrics[first]), others)]
    per_second = f"{end.samples / end.seconds:,.0f}" if end.seconds > 0 else "–"
    tiles += [
        Tile("time", duration(end.seconds), (("steps", whole(end.steps)), ("median step", duration(end.step_s)))),
        Tile(
            "worker time",
            cost(end.seconds * end.workers / 3600),
            (("workers", whole(end.workers)), ("samples a second", per_second)),
        ),
    ]
    cores, banners = run.started.context.get("cores"), list[str]()
    if isinstance(cores, int) and execution.get("device") == "cpu" and end.hosts == 1 and end.workers > cores:
        shared = f"{count(end.workers, 'worker')} shared {count(cores, 'core')}"
        banners.append(f"{shared}, so the times are longer than with a core for each.")
    return Glance(few_words(title), tuple(tiles), tuple(banners), table)


def _reports(run: RunOverview) -> Table | None:
    """The last reports in five columns; None without any."""
    names = list(dict.fromkeys(name for report in run.reports for name in report.metrics))[:2]
    if not names:
        return None
    rows = tuple(
        (
            str(report.epoch),
            whole(report.step),
            duration(report.seconds),
            *(valued(name, value) if (value := report.metrics.get(name)) is not None else "–" for name in names),
        )
        for report in run.reports[-MOST_ROWS:]
    )
    header = ("epoch", "step", "time", *(plain(name, 30) for name in names))
    return Table("Last reports", header, rows, frozenset(range(len(header))))


# --- what several have ---


def _thin(complete: int) -> list[str]:
    if complete >= FEW_TRIALS:
        return []
    odds = f"{1 - math.pow(0.95, complete):.0%}"
    random = f"As many random ones have one of the best 5 % of settings in {odds} of cases."
    return [f"Thin search: {count(complete, 'trial')} with a result. {random}"]


def _exceeds(workers: int, room: int, what: str) -> list[str]:
    if workers <= room:
        return []
    return [f"The pick needs {count(workers, 'worker')}; this machine has {count(room, what)}."]
