"""The output folders below a folder: what each holds, whether it runs, how old it is, and its best result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elastune.core.errors import UserError
from elastune.core.formatting import duration, number, plain
from elastune.core.journal.files import read, writer_of
from elastune.core.journal.records import Entry
from elastune.report.overviews import RunOverview, StudyOverview, gather_run, gather_study
from elastune.report.tables import Table
from elastune.runtime.job.output import JOURNAL

State = Literal["running", "finished", "stopped", "failed", "unfinished", "unreadable"]
STOPPED = ("requested", "notice", "interrupted")
"""The endings that leave something to go on with."""


@dataclass(frozen=True)
class OutputFolder:
    """One output folder.

    Attributes:
        out: The folder.
        kind: "run", "tune", "frontier" or "other"; a plan is "other".
        state: "stopped": it was ended early, in good order. "unfinished": it has no end, and no process of this machine
            writes it.
        started_at: The time of its first record, in seconds since 1970; None if the journal has none.
        age_s: Seconds since its newest record.
        best: Its best result in a few words; "" for none.
        pid: The process that writes it; None if none does.
    """

    out: Path
    kind: str
    state: State
    started_at: float | None
    age_s: float
    best: str
    pid: int | None = None


def output_folders(root: Path, now: float) -> tuple[OutputFolder, ...]:
    """Return the output folders in ``root``, and ``root`` itself if it is one, the newest first.

    Args:
        root: A folder, such as ``elastune-out``.
        now: The time, in seconds since 1970.

    Raises:
        UserError: If ``root`` is no folder that can be read.
    """
    try:
        inside = sorted(path for path in root.iterdir() if path.is_dir())
    except OSError as error:
        fix = "name a folder that holds output folders, or run something first"
        raise UserError("elastune ls lists a folder", f"{root}: {error.strerror}", fix) from None
    found = [_folder(path, now) for path in (root, *inside) if (path / JOURNAL).is_file()]
    return tuple(sorted(found, key=lambda each: each.age_s))


def _folder(out: Path, now: float) -> OutputFolder:
    path = out / JOURNAL
    pid, age_s = writer_of(path), max(0.0, now - path.stat().st_mtime)
    try:
        entries = read(path)
    except UserError:
        return OutputFolder(out, "other", "unreadable", None, age_s, "", pid)
    study, run = gather_study(entries), gather_run(entries)
    started_at = entries[0].at if entries else None
    if study is not None:
        kind = "frontier" if study.is_frontier else "tune"
        state = _state(pid, None if study.finished is None else study.finished.reason, failed=False)
        return OutputFolder(out, kind, state, started_at, age_s, _best_of_study(study), pid)
    if run is not None:
        state = _state(pid, None if run.finished is None else run.finished.stopped, failed=_failed_last(entries, run))
        return OutputFolder(out, "run", state, started_at, age_s, _best_of_run(run), pid)
    return OutputFolder(
        out, "other", _state(pid, "complete" if entries else None, failed=False), started_at, age_s, "", pid
    )


def _state(pid: int | None, ending: str | None, *, failed: bool) -> State:
    """``ending``: how it ended; None if it has not."""
    if pid is not None:
        return "running"
    if failed:
        return "failed"
    return "unfinished" if ending is None else "stopped" if ending in STOPPED else "finished"


def _failed_last(entries: Sequence[Entry], run: RunOverview) -> bool:
    return run.failed is not None and run.finished is None and run.failed in [entry.record for entry in entries[-3:]]


def _best_of_run(run: RunOverview) -> str:
    metrics = run.finished.metrics if run.finished else run.reports[-1].metrics if run.reports else {}
    return ", ".join(f"{plain(name, 30)} {number(value)}" for name, value in list(metrics.items())[:1])


def _best_of_study(study: StudyOverview) -> str:
    frontier = study.frontier
    if frontier is not None and frontier.pick is not None:
        pick = frontier.rows[frontier.pick]
        return f"{plain(frontier.quality, 30)} {number(pick.quality)} on {pick.workers}"
    for name, direction in list(study.objectives.items())[:1]:
        values = [(value, trial.trial) for trial in study.trials if (value := trial.value(name)) is not None]
        if values:
            value, trial = (max if direction == "max" else min)(values)
            return f"{plain(name, 30)} {number(value)} (trial {trial})"
    return ""


def folders_table(folders: Sequence[OutputFolder]) -> Table:
    """One row for each folder."""
    rows = tuple(
        (plain(each.out, 300), each.kind, each.state, duration(each.age_s), each.best or "–") for each in folders
    )
    return Table("Output folders", ("folder", "what", "state", "last record", "best"), rows, frozenset({3}))
