"""The results in a journal of a run, a study or a frontier: as one JSON object, and as tables and lines for people.

Commands print these results at their end, ``elastune report`` at any time. Both read the journal alone.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastune.core.cost import Prices
from elastune.core.errors import UserError
from elastune.core.formatting import bandwidth, byte_count, count, duration, plain
from elastune.core.journal.files import read
from elastune.core.journal.folds import compared_all, money
from elastune.core.journal.records import Entry, FrontierFound, PhasesPlanned, RunFailed, RunFinished
from elastune.core.plan.step_time import last_plan
from elastune.report.adaptation import (
    Adaptation,
    SyncHistory,
    adaptation_json,
    adaptation_line,
    batch_line,
    decisions_table,
    failures_table,
    gather_adaptation,
    gather_sync,
    sync_line,
    sync_table,
    trial_batch_line,
)
from elastune.report.document import Glance
from elastune.report.glance import front_short_table, frontier_glance, study_glance
from elastune.report.lines import accepted_lines
from elastune.report.overviews import RunOverview, StudyOverview, front_trials, gather_run, gather_study, mechanism_text
from elastune.report.plan import plan_lines
from elastune.report.study import assets_table, subset_table, tasks_table
from elastune.report.tables import Table, memory_line
from elastune.report.worker_changes import Changes, changes_line, gather_changes, left_out_table
from elastune.runtime.job.output import JOURNAL
from elastune.tuning.search.constraint import Constraint, shortfall, time_to
from elastune.tuning.search.objective import valued
from elastune.tuning.study.results import COSTS, Assets, Picked, PickedAsset, Study, asset_json
from elastune.tuning.study.trials import Trial, task_of


@dataclass(frozen=True)
class Result:
    """``data`` is the documented JSON object; ``tables`` and ``lines`` show the same to people."""

    data: dict[str, Any]
    tables: tuple[Table, ...] = ()
    lines: tuple[str, ...] = ()
    failure: RunFailed | None = None
    stopped: str = "complete"
    """Why it ended: "complete", "requested" or "interrupted" (by a person), or "unfinished" if it has not ended."""


@dataclass(frozen=True)
class PickOptions:
    """Which trial of a study to pick: by ``targets`` or by ``weights``; with neither by ``Study.choices``.

    ``subset``: how many trials are to represent the front; None for no such choice.
    """

    targets: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    subset: int | None = None
    to_target: Constraint | None = None
    """For a run: also report when the run reached this target."""

    @property
    def any(self) -> bool:
        return bool(self.targets or self.weights or self.subset is not None)


def result_of(out: Path, pick_options: PickOptions | None = None, *, across_changes: bool = False) -> Result:
    """Return the results in ``out/journal.jsonl``.

    Args:
        out: The output folder of a run, a study, a frontier or a plan.
        pick_options: The pick to make among the trials of a study.
        across_changes: Fronts also hold trials from before accepted changes.

    Raises:
        UserError: If the journal is missing or broken, or ``pick_options`` do not fit its kind.
    """
    pick_options = pick_options or PickOptions()
    entries = read(out / JOURNAL)
    entries = compared_all(entries) if across_changes else entries
    study, run = gather_study(entries), gather_run(entries)
    if pick_options.to_target is not None and study is not None:
        raise UserError("--target needs a run", out, "give the --out of elastune run, or --target to elastune tune")
    if study is not None and not study.is_frontier:
        return _study(study, entries, out, pick_options)
    if (made := last_plan(entries)) is not None and study is None:
        return Result({"kind": "plan", **made.answer, "out": str(out)}, lines=tuple(plan_lines(made)))
    if pick_options.any:
        raise UserError("--pick, --weights and --subset need a study", out, "give the --out of elastune tune")
    if study is not None:
        return _frontier(study, out)
    if run is not None:
        result = _run(run, gather_changes(entries), gather_adaptation(entries), gather_sync(entries), out)
        return result if pick_options.to_target is None else _with_time_to(pick_options.to_target, run, result)
    raise UserError("a journal must hold the start of a run or study", out, "run one with this output folder first")


def with_money(result: Result, out: Path, prices: Prices) -> Result:
    """Return ``result`` of the run in ``out`` with its cost. Raises ``UserError`` if it is not the result of a run."""
    if result.data.get("kind") != "run":
        rule = "the cost of hosts is computed for one run"
        raise UserError(rule, out, "give a study its --prices when it begins: its costs are those of its trials")
    spent = money(read(out / JOURNAL), prices)
    return replace(result, data={**result.data, "money": spent.data}, lines=(*result.lines, spent.line))


def _with_time_to(target: Constraint, run: RunOverview, result: Result) -> Result:
    """``result`` of ``run``, with the time until it reached ``target``."""
    settings = {**run.started.config, "workers": run.started.execution.get("workers")}
    reached = time_to(target, run.reports, settings)
    line = f"target  {plain(target.text)} "
    if reached is not None:
        data: dict[str, Any] | None = {"target": target.text, **asdict(reached)}
        before = f"not yet after {duration(reached.missed_s)}" if reached.missed_s else "by the first report"
        line += f"reached after {duration(reached.seconds)}, {count(reached.epoch, 'epoch')}; {before}"
    else:
        data, short = None, shortfall(target, run.reports, settings)
        line += f"not reached: short by {short:.4g} at best" if short < math.inf else "not in any report"
    return replace(result, data={**result.data, "time_to_target": data}, lines=(*result.lines, line))


def _run(run: RunOverview, changes: Changes, adaptation: Adaptation, sync: SyncHistory, out: Path) -> Result:
    execution = run.started.execution
    common = {
        "mode": execution.get("mode"),
        "compress": execution.get("compress"),
        "mechanism": execution.get("mechanism"),
        **({"mesh": execution["mesh"]} if "mesh" in execution else {}),
        "num_slots": execution.get("num_slots"),
        "sync": run.started.sync,
        "sync_changes": [{"step": e.step, e.which: e.what, "why": e.why} for e in sync.changes],
        "seed": run.started.seed,
        "config": run.started.config,
        **adaptation_json(adaptation),
        "out": str(out),
    }
    tables = tuple(
        table
        for table in (
            sync_table(sync),
            left_out_table(changes),
            decisions_table(adaptation),
            failures_table(adaptation),
        )
        if table.rows
    )
    end = run.finished
    if end is not None:
        data = _finished(end) | _changed(changes) | common
        lines = _run_lines(end, execution, changes, adaptation, sync, out)
        return Result(data, tables, lines, stopped=end.stopped)
    if run.failed is not None:
        failed = {name: getattr(run.failed, name) for name in ("reason", "detail", "rank", "exit_code")}
        if run.failed.wanted_bytes is not None:
            failed["wanted_bytes"] = run.failed.wanted_bytes
        line = f"failed: {plain(run.failed.detail, 300)}"
        return Result({"kind": "run", "failed": failed, **common}, tables, (line,), failure=run.failed)
    steps = run.reports[-1].step if run.reports else 0
    line = f"unfinished, {count(steps, 'step')} reported"
    return Result({"kind": "run", "unfinished": True, "steps": steps, **common}, tables, (line,), stopped="unfinished")


def _finished(end: RunFinished) -> dict[str, Any]:
    fields = asdict(end)
    for hidden in ("kind", "grad_bytes", "signals", "context", "epoch"):
        del fields[hidden]
    return {"kind": "run", **fields}


def _changed(changes: Changes) -> dict[str, Any]:
    return {
        "changes": changes.number,
        "median_pause_s": changes.median_pause_s,
        "longest_pause_s": changes.longest_pause_s,
        "steps_discarded": changes.discarded,
        "rounds_short": changes.short_rounds,
        "samples_left_out": changes.samples_left_out,
        **({"changes_accepted": list(changes.accepted)} if changes.accepted else {}),
    }


def _run_lines(
    end: RunFinished, execution: dict[str, Any], changes: Changes, adaptation: Adaptation, sync: SyncHistory, out: Path
) -> tuple[str, ...]:
    metrics = ", ".join(f"{plain(name, 40)} {valued(name, value)}" for name, value in end.metrics.items())
    steps, on = count(end.steps, "step"), count(end.workers, "worker")
    how = [
        plain(execution.get("mode")),
        *([mechanism] if (mechanism := mechanism_text(execution)) != "replicated" else []),
    ]
    return (
        f"{metrics or 'no metrics'} after {steps} in {duration(end.seconds)} on {on} ({', '.join(how)})",
        *(f"changed {line}" for line in changes.accepted),
        *(f"workers {line}" for line in (changes_line(changes),) if line),
        *(f"agreed  {line}" for line in (sync_line(sync),) if line),
        *(f"adapted {line}" for line in (adaptation_line(adaptation),) if line),
        *(f"batch   {line}" for line in (batch_line(adaptation),) if line),
        *([f"wire    {byte_count(round(end.sent_bytes))} sent in a step"] if execution.get("compress") else []),
        *(f"memory  {line}" for line in (memory_line(end.memory),) if line),
        f"state   sha256 {end.sha256}",
        f"journal {out / JOURNAL}",
    )


def _study(overview: StudyOverview, entries: Sequence[Entry], out: Path, pick_options: PickOptions) -> Result:
    study = Study.of(out, entries)
    asset = _picked_asset(study, pick_options)
    trial_options = PickOptions() if asset is not None else pick_options  # of trials alone
    if study.tasks and not pick_options.any:
        return _tasks(overview, study, out)
    stated = bool(trial_options.targets or trial_options.weights)
    why_not = "" if stated else study.no_choice_reason()
    choices: tuple[Picked, ...] = () if why_not else study.choices() if not stated else ()
    if stated:
        choices = (study.pick(weights=trial_options.weights or None, **trial_options.targets),)
    choices_json = [_choice_json(each) for each in choices]
    data = {
        "kind": "tune",
        "objectives": {o.name: o.direction for o in study.objectives},
        "trials": dict(Counter(t.state for t in study.trials)),
        "front": [_shown(trial) for trial in study.front()],
        "pick": choices_json[0] if choices_json else None,
        "choices": choices_json,
        **_ending(overview, out),
        **({"changes_accepted": list(accepted)} if (accepted := accepted_lines(entries)) else {}),
        **({"kept": [{"trial": k.trial, "size": k.size} for k in study.kept]} if study.kept else {}),
        **({"assets": _assets_json(study.assets, asset)} if study.assets else {}),
    }
    if not study.complete:
        why = Counter(plain(t.reason, 200) or t.state for t in study.trials).most_common(3)
        reasons = "; ".join(f"{times} x {reason}" for reason, times in why)
        return Result(
            data, lines=(f"no trial has a result{f': {reasons}' if reasons else ''}",), stopped=data["reason"]
        )
    best = front_trials(overview)
    table = front_short_table(overview, best, choices)
    glance = study_glance(overview, study, choices, table)
    lines = (
        glance.title,
        *(f"changed {line}" for line in accepted_lines(overview.accepted)),
        *(f"note    {text}" for text in glance.banners),
        *([f"pick    none: {plain(why_not, 400)}"] if why_not else []),
        *(line for place, each in enumerate(choices) for line in _choice_lines(study, each, place)),
        *([f"kept    {_kept_text(study)}"] if study.kept else []),
        *([_asset_line(asset)] if asset is not None else []),
        *([_why_line(out)] if choices else []),
    )
    tables = [table]
    if study.assets is not None:
        tables.append(assets_table(study.assets, None if asset is None else asset.point))
    if pick_options.subset is not None:
        chosen = _subset(study, pick_options.subset)
        data["subset"] = [_shown(trial) | {"reason": reason} for trial, reason in chosen]
        tables.append(subset_table(study, chosen))
    return Result(data, tuple(tables), lines, stopped=data["reason"])


def _tasks(overview: StudyOverview, study: Study, out: Path) -> Result:
    """The result of a study whose trials have different tasks (``elastune tree``): no trial is picked."""
    data = {
        "kind": "tune",
        "objectives": {o.name: o.direction for o in study.objectives},
        "trials": dict(Counter(t.state for t in study.trials)),
        "tasks": {str(trial.number): task_of(trial.config) for trial in study.trials},
        "front": [],
        "pick": None,
        "choices": [],
        **_ending(overview, out),
        **({"kept": [{"trial": k.trial, "size": k.size} for k in study.kept]} if study.kept else {}),
    }
    done = Counter(task_of(trial.config) for trial in study.complete)
    lines = (
        f"trained {len(done)} of {count(len(study.tasks), 'part')} of a tree of classes: each is a task of its own, so "
        "none is picked",
        f"join    elastune join {plain(out)} --tree LISTS --front FLAT makes one model of them; FLAT is a study of all "
        "classes, see docs/transfer.md",
        *([f"kept    {_kept_text(study)}"] if study.kept else []),
    )
    return Result(data, (tasks_table(study),), lines, stopped=data["reason"])


def _choice_json(choice: Picked) -> dict[str, Any]:
    return {
        "trial": choice.trial.number,
        "reason": choice.reason,
        "values": choice.trial.values,
        "command": choice.command,
        "found_after_s": choice.trial.ended_s,
        **({"batch_verdict": line} if (line := trial_batch_line(choice.trial)) else {}),
    }


def _choice_lines(study: Study, choice: Picked, place: int) -> list[str]:
    """The lines of a choice: the first one in full, with the time at which it was found; others in short."""
    trial, price = choice.trial, study.price_per_worker_hour
    values = ", ".join(f"{name} {valued(name, value, price)}" for name, value in trial.values.items())
    first = "or      " if place else "pick    "
    return [
        f"{first}trial {trial.number} ({plain(choice.reason, 300)}): {values}",
        *([] if place else [f"found   {_found_after(study, trial)}"]),
        f"train   {choice.command}",
        *([f"        {choice.caveat}"] if choice.caveat else []),
    ]


def _picked_asset(study: Study, pick_options: PickOptions) -> PickedAsset | None:
    """The asset to use, if the pick names a cost: training time or parameters. None if it names none."""
    names = {o.name for o in study.objectives}
    if not any(name in {**pick_options.targets, **pick_options.weights} for name in COSTS if name not in names):
        return None
    if study.assets is None:
        rule = f"{' and '.join(COSTS)} are known of ensembles and soups that were written, and of their trials"
        raise UserError(rule, "none in the journal", "elastune ensemble OUT --out FILE, or elastune soup")
    return study.assets.pick(weights=pick_options.weights or None, **pick_options.targets)


def _asset_line(asset: PickedAsset) -> str:
    point = asset.point
    several = len(point.trials) + len(point.parts) > 1
    trials = f"{point.form} of trial{'s' if several else ''} {plain(point.whom, 200)}"
    return f"use     {trials} ({plain(asset.reason, 300)}){f': {plain(point.file)}' if point.file else ''}"


def _assets_json(assets: Assets, asset: PickedAsset | None) -> dict[str, Any]:
    front = assets.front()
    return {
        "data": assets.data,
        "objectives": {o.name: o.direction for o in assets.objectives},
        "points": [{**asset_json(p), "front": any(p is other for other in front)} for p in assets.points],
        "pick": asset and {**asset_json(asset.point), "reason": asset.reason},
    }


def _kept_text(study: Study) -> str:
    """How many trials keep their models, and the size on disk."""
    with_predictions = sum(bool(kept.predictions) for kept in study.kept)
    size = byte_count(sum(kept.size for kept in study.kept))
    return f"{count(len(study.kept), 'trial')}, {with_predictions} of them with predictions: {size}"


def _subset(study: Study, k: int) -> list[tuple[Trial, str]]:
    """The ``k`` trials that represent the front, each with its gain in hypervolume over the trials before it."""
    chosen = study.subset(k)
    covered = [study.covered(chosen[: i + 1]) for i in range(len(chosen))]
    first = f"covers {covered[0]:.1%} of the front's hypervolume, more than any other alone"
    rest = [f"adds {now - before:.1%}, {now:.1%} with those above" for before, now in pairwise(covered)]
    return list(zip(chosen, [first, *rest], strict=True))


def _found_after(study: Study, trial: Trial) -> str:
    before = [t for t in study.trials if t.ended_s <= trial.ended_s and t.state != "paused"]
    failed = sum(t.state != "complete" for t in before)
    failures = f", {failed} of them without a result" if failed else ""
    return f"after {duration(trial.ended_s)} of search, all counted: {count(len(before), 'trial')} had ended{failures}"


def _shown(t: Trial) -> dict[str, Any]:
    return {"trial": t.number, "values": t.values, "metrics": t.metrics, "config": t.config, "execution": t.execution}


def _frontier(overview: StudyOverview, out: Path) -> Result:
    ending = _ending(overview, out)
    frontier = overview.frontier
    if frontier is None:
        data = {"kind": "frontier", "unfinished": True, "trials": len(overview.ended), **ending}
        return Result(data, lines=("no frontier yet",), stopped=ending["reason"])
    phases = None if overview.phases is None else {k: v for k, v in asdict(overview.phases).items() if k != "kind"}
    data = {**asdict(frontier), "kind": "frontier", "phases": phases, **ending}
    glance = frontier_glance(frontier, overview)
    lines = (*_frontier_lines(frontier, glance), *phase_lines(overview.phases), _why_line(out))
    tables = (glance.table,) if glance.table is not None else ()
    return Result(data, tables, lines, stopped=ending["reason"])


def _frontier_lines(frontier: FrontierFound, glance: Glance) -> tuple[str, ...]:
    """The answer in a few lines. ``elastune explain`` has the reasons, the page all numbers."""
    lines = [glance.title, plain(frontier.answer.sentence, 2000), *(f"note    {text}" for text in glance.banners)]
    links = [
        f"{plain(where)} {duration(link.latency_s)} a message, {bandwidth(link.seconds_per_byte)}"
        for where, link in frontier.links.items()
    ]
    lines += [f"links   {'; '.join(links)}"] if links else []
    if frontier.command:
        lines += [f"train   {plain(frontier.command, 4000)}", f"        {plain(frontier.answer.command_note, 600)}"]
    return tuple(line for line in lines if line.strip())


def _why_line(out: Path) -> str:
    return f"why     elastune explain {shlex.quote(str(out))}"


def phase_lines(phases: PhasesPlanned | None) -> tuple[str, ...]:
    """A line with the time that each phase of a frontier took; none if no phase has ended."""
    if phases is None or not phases.took:
        return ()
    took = ", ".join(f"{name} {duration(seconds)}" for name, seconds in phases.took.items() if seconds >= 0.05)
    return (f"took    {duration(sum(phases.took.values()))} of a budget of {duration(phases.budget_s)}: {took}",)


def _ending(overview: StudyOverview, out: Path) -> dict[str, Any]:
    end = overview.finished
    return {
        "seconds": end.seconds if end else None,
        "reason": end.reason if end else "unfinished",
        "out": str(out),
    }
