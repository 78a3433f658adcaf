"""A study as a file of Optuna's, which ``optuna-dashboard FILE`` opens. A snapshot: the study never reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from elastune.job.output_dir import JOURNAL
from elastune.journal.reader import read
from elastune.journal.trials import TrialLife, fold
from elastune.search.samplers.optuna_study import new_study, quiet
from elastune.search.space.space import from_json
from elastune.study.results.study import Study
from elastune.study.results.trials import check_params


def to_optuna(out: Path) -> bytes:
    """The study in folder ``out`` as the content of an Optuna journal file; its study is called "elastune".

    Complete trials, and those that broke a constraint, have their values; trials that are paused count as pruned, those
    without values as failed. Reports are intermediate values where there is one objective, which is all that Optuna
    knows, and else a user attribute "reports". The number of a trial is its user attribute "trial".
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


def _trial(life: TrialLife, objectives: Sequence[str]) -> FrozenTrial:
    started, ended = life.started, life.finished
    notes: dict[str, Any] = {
        "trial": life.number,
        "phase": started.phase,
        "config": started.config,
        "means": started.means,
    }
    state, values = {"running": TrialState.RUNNING, "paused": TrialState.PRUNED}.get(life.state, TrialState.FAIL), None
    if ended is not None:
        notes |= {"state": ended.state, **_finite(ended.metrics)}
        broken = any(violation > 0 for violation in ended.violations.values())
        if set(objectives) <= set(_finite(ended.values)) and (ended.state == "complete" or broken):
            state, values = TrialState.COMPLETE, [ended.values[name] for name in objectives]
    if reason := getattr(ended or life.pause, "reason", ""):
        notes["reason"] = reason
    known = [(report.epoch, _finite({**report.metrics, "seconds": report.seconds})) for report, _ in life.reports]
    curve = {}
    if len(objectives) == 1:
        curve = {epoch: row[objectives[0]] for epoch, row in known if objectives[0] in row}
    elif known:
        notes["reports"] = [{"epoch": epoch, **row} for epoch, row in known]
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
