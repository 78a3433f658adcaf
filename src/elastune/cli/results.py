"""What a journal tells of a run, a study or a frontier: as one JSON object, and as tables and lines for people.

Commands print this at their end, ``elastune report`` at any time; so both say what the journal says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastune.core.errors import UserError
from elastune.drive.folders import JOURNAL
from elastune.drive.results import Study
from elastune.journal.entry import Entry
from elastune.journal.reader import read
from elastune.journal.records import FrontierFound, RunFailed, RunFinished
from elastune.report.adapting import (
    Adaptation,
    adaptation_json,
    adaptation_line,
    decisions_table,
    failures_table,
    gather_adaptation,
)
from elastune.report.changes import Changes, changes_line, gather_changes
from elastune.report.gather import RunStory, StudyStory, front_trials, gather_run, gather_study
from elastune.report.tables import Table, front_table, frontier_table
from elastune.report.text import count, duration, number, plain, settings_text


@dataclass(frozen=True)
class Result:
    """``data`` is the documented JSON object; ``tables`` and ``lines`` say the same to people."""

    data: dict[str, Any]
    tables: tuple[Table, ...] = ()
    lines: tuple[str, ...] = ()
    failure: RunFailed | None = None
    stopped: str = "complete"
    """Why it ended: "requested" or "interrupted" where somebody asked for it, "unfinished" where it has not."""


def result_of(out: Path) -> Result:
    """What ``out/journal.jsonl`` holds. Raises ``UserError`` where there is nothing, or a line is no record."""
    entries = read(out / JOURNAL)
    study, run = gather_study(entries), gather_run(entries)
    if study is not None:
        return _frontier(study, out) if study.is_frontier else _study(study, entries, out)
    if run is not None:
        return _run(run, gather_changes(entries), gather_adaptation(entries), out)
    raise UserError("a journal must hold the start of a run or study", out, "run one with this output folder first")


def _run(run: RunStory, changes: Changes, adaptation: Adaptation, out: Path) -> Result:
    means = run.started.means
    asked = {
        "mode": means.get("mode"),
        "num_slots": means.get("num_slots"),
        "seed": run.started.seed,
        "config": run.started.config,
        **adaptation_json(adaptation),
        "out": str(out),
    }
    tables = tuple(table for table in (decisions_table(adaptation), failures_table(adaptation)) if table.rows)
    end = run.finished
    if end is not None:
        data = _finished(end) | _changed(changes) | asked
        return Result(data, tables, _run_lines(end, means, changes, adaptation, out), stopped=end.stopped)
    if run.failed is not None:
        failed = {name: getattr(run.failed, name) for name in ("reason", "detail", "rank", "exit_code")}
        line = f"failed: {plain(run.failed.detail, 300)}"
        return Result({"kind": "run", "failed": failed, **asked}, tables, (line,), failure=run.failed)
    steps = run.reports[-1].step if run.reports else 0
    line = f"unfinished, {count(steps, 'step')} reported"
    return Result({"kind": "run", "unfinished": True, "steps": steps, **asked}, tables, (line,), stopped="unfinished")


def _finished(end: RunFinished) -> dict[str, Any]:
    shown = asdict(end)
    del shown["kind"], shown["grad_bytes"], shown["signals"]
    return {"kind": "run", **shown}


def _changed(changes: Changes) -> dict[str, Any]:
    return {
        "changes": len(changes.regroupings),
        "median_pause_s": changes.median_pause_s,
        "longest_pause_s": changes.longest_pause_s,
        "steps_discarded": changes.discarded,
    }


def _run_lines(
    end: RunFinished, means: dict[str, Any], changes: Changes, adaptation: Adaptation, out: Path
) -> tuple[str, ...]:
    metrics = ", ".join(f"{plain(name, 40)} {number(value)}" for name, value in end.metrics.items())
    steps, on = count(end.steps, "step"), count(end.workers, "worker")
    return (
        f"{metrics or 'no metrics'} after {steps} in {duration(end.seconds)} on {on} ({plain(means.get('mode'))})",
        *(f"workers {line}" for line in (changes_line(changes),) if line),
        *(f"adapted {line}" for line in (adaptation_line(adaptation),) if line),
        f"state   sha256 {end.sha256}",
        f"journal {out / JOURNAL}",
    )


def _study(story: StudyStory, entries: Sequence[Entry], out: Path) -> Result:
    study = Study.of(out, entries)
    picked = study.pick() if study.complete else None
    front = [
        {"trial": t.number, "values": t.values, "metrics": t.metrics, "config": t.config, "means": t.means}
        for t in study.front()
    ]
    data = {
        "kind": "tune",
        "objectives": {o.name: o.direction for o in study.objectives},
        "trials": dict(Counter(t.state for t in study.trials)),
        "front": front,
        "pick": picked and {"trial": picked.trial.number, "reason": picked.reason, "command": picked.command},
        **_ending(story, out),
    }
    if picked is None:
        return Result(data, lines=("no trial has a result",), stopped=data["reason"])
    values = ", ".join(f"{name} {number(value)}" for name, value in picked.trial.values.items())
    lines = (
        f"pick    trial {picked.trial.number} ({plain(picked.reason, 300)}): {values}",
        f"        {settings_text(picked.trial.config)}",
        f"train   {picked.command}",
    )
    return Result(data, (front_table(story, front_trials(story)),), lines, stopped=data["reason"])


def _frontier(story: StudyStory, out: Path) -> Result:
    ending = _ending(story, out)
    found = story.found
    if found is None:
        data = {"kind": "frontier", "unfinished": True, "trials": len(story.ended), **ending}
        return Result(data, lines=("no frontier yet",), stopped=ending["reason"])
    data = {**asdict(found), "kind": "frontier", **ending}
    return Result(data, (frontier_table(found),), _frontier_lines(found), stopped=ending["reason"])


def _frontier_lines(found: FrontierFound) -> tuple[str, ...]:
    lines = [plain(found.answer, 2000), plain(found.support, 2000)]
    lines += [f"train   {plain(found.command, 4000)}"] if found.command else []
    return tuple(line for line in lines if line)


def _ending(story: StudyStory, out: Path) -> dict[str, Any]:
    end = story.finished
    return {
        "seconds": end.seconds if end else None,
        "reason": end.reason if end else "unfinished",
        "out": str(out),
    }
