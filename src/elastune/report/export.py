"""The trials of a study for other programs: as CSV, as JSON, and as a file of Optuna's.

``optuna-dashboard FILE`` opens the file of Optuna's. It is a snapshot: the study never reads it.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from elastune.core.formatting import spreadsheet_cell
from elastune.core.journal.files import read
from elastune.core.journal.folds import TrialSummary, fold
from elastune.runtime.job.output import JOURNAL
from elastune.train.program.space import from_json
from elastune.tuning.search.history import new_study, quiet
from elastune.tuning.study.results import Study
from elastune.tuning.study.trials import GROUPS, PLAIN, Trial, check_params, flat_row

STAMPS = ("started_at", "ended_at")


def to_csv(study: Study) -> str:
    """One line for each trial, with the columns of ``flat_row``. Missing values are empty, lists are JSON.

    Texts that a spreadsheet would take for a formula get a ' in front. Control characters become escapes such as
    ``\\x1b``. Times are UTC, ISO 8601.
    """
    rows = [flat_row(trial) for trial in study.trials]
    names = dict.fromkeys(name for row in rows for name in row)
    kept = [*PLAIN, *(n for group in GROUPS for n in names if n.startswith(f"{group}.")), "reason"]
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow([spreadsheet_cell(name) for name in kept])
    for row in rows:
        writer.writerow([spreadsheet_cell(_stamp(row[name]) if name in STAMPS else row.get(name)) for name in kept])
    return file.getvalue()


def to_json(study: Study) -> str:
    """{kind: "trials", objectives, trials: [{number, state, ..., params, config, execution, values, metrics, reason}]}.

    Strict JSON: a number that is not finite is null. Times are UTC, ISO 8601.
    """
    objectives = {o.name: o.direction for o in study.objectives}
    data = {"kind": "trials", "objectives": objectives, "trials": [_nested(trial) for trial in study.trials]}
    return json.dumps(_strict(data), indent=1, allow_nan=False) + "\n"


def _nested(trial: Trial) -> dict[str, Any]:
    plain = {name: getattr(trial, name) for name in PLAIN}
    plain |= {name: _stamp(plain[name]) for name in STAMPS}
    return {**plain, **{group: getattr(trial, group) for group in GROUPS}, "reason": trial.reason}


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value


def to_optuna(out: Path) -> bytes:
    """The study in folder ``out`` as the content of an Optuna journal file; its study is called "elastune".

    Complete trials, and trials that broke a constraint, have their values. Paused trials count as pruned, trials
    without values as failed. With one objective, reports become intermediate values. Optuna supports no more, so with
    several objectives they become the user attribute "reports". The user attribute "trial" is the trial's number.
    """
    entries = read(out / JOURNAL)
    objectives = Study.of(out, entries).objectives
    lives = [life for _, life in sorted(fold(entries).trials.items())]
    check_params(life.started for life in lives)
    lines = _Lines()
    with quiet():
        study = new_study(objectives, JournalStorage(lines))
        study.set_metric_names([objective.name for objective in objectives])
        for life in lives:
            study.add_trial(_trial(life, [objective.name for objective in objectives]))
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines.logs).encode()


class _Lines(BaseJournalBackend):
    """Optuna's journal in memory: its own file takes a lock and an fsync for each trial."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self.logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.logs.extend(json.loads(json.dumps(logs)))


def _trial(life: TrialSummary, objectives: Sequence[str]) -> FrozenTrial:
    started, ended = life.started, life.finished
    notes: dict[str, Any] = {
        "trial": life.number,
        "phase": started.phase,
        "config": started.config,
        "execution": started.execution,
    }
    state, values = {"running": TrialState.RUNNING, "paused": TrialState.PRUNED}.get(life.state, TrialState.FAIL), None
    if ended is not None:
        notes |= {"state": ended.state, **_finite(ended.metrics)}
        broken = any(violation > 0 for violation in ended.violations.values())
        if set(objectives) <= set(_finite(ended.values)) and (ended.state == "complete" or broken):
            state, values = TrialState.COMPLETE, [ended.values[name] for name in objectives]
    if reason := getattr(ended or life.pause, "reason", ""):
        notes["reason"] = reason
    reports = [(report.epoch, _finite({**report.metrics, "seconds": report.seconds})) for report, _ in life.reports]
    curve = {}
    if len(objectives) == 1:
        curve = {epoch: row[objectives[0]] for epoch, row in reports if objectives[0] in row}
    elif reports:
        notes["reports"] = [{"epoch": epoch, **row} for epoch, row in reports]
    trial = create_trial(
        state=state,
        values=values,
        params=started.params,
        distributions=from_json(started.distributions),
        user_attrs=notes,
        intermediate_values=curve,
        constraints=_finite(ended.violations) if ended is not None else {},
    )
    trial.datetime_start = datetime.fromtimestamp(life.started_at)
    trial.datetime_complete = datetime.fromtimestamp(life.last_at) if state.is_finished() else None
    return trial


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if math.isfinite(number)}
