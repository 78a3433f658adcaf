"""A copy of the study in Optuna's own storage, for ``optuna-dashboard``. The journal is the truth; this is rebuilt."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import RandomSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from elastune.core.errors import UserError
from elastune.search.samplers.optuna_study import NAME, new_study, quiet
from elastune.search.space.objective import Objective
from elastune.search.space.space import Sample


@dataclass(frozen=True)
class Shown:
    """A finished trial as the dashboard shows it; without ``values`` it failed, and ``notes`` say why."""

    values: Sequence[float] | None
    constraints: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Past:
    """A trial of an earlier session, and when it ran (seconds since the epoch)."""

    number: int
    sample: Sample
    shown: Shown
    started_at: float
    finished_at: float


class Mirror:
    """The study's copy at ``path``: replaced as a whole on opening, then kept up with ``start`` and ``finish``.

    Raises ``UserError`` where it cannot be written.
    """

    def __init__(self, path: Path, objectives: Sequence[Objective], past: Iterable[Past] = ()) -> None:
        self._path = Path(path)
        self._running: dict[int, optuna.Trial] = {}
        self._estimates: dict[int, dict[str, float]] = {}
        with self._writing():
            _write_whole(self._path, objectives, past)
            self._copy = _Copy(self._path)
            self._storage = JournalStorage(self._copy)
            self._study = optuna.load_study(study_name=NAME, storage=self._storage, sampler=RandomSampler(seed=0))
            self._id = self._storage.get_study_id_from_name(NAME)

    def start(self, number: int, sample: Sample) -> None:
        """Show a trial as running."""
        with self._writing():
            shown = create_trial(
                state=TrialState.RUNNING,
                params=sample.params,
                distributions=sample.distributions,
                user_attrs=_notes(number, sample),
            )  # where ``ask`` would look through all trials for one that waits
            self._running[number] = optuna.Trial(self._study, self._storage.create_new_trial(self._id, shown))

    def estimate(self, number: int, values: Mapping[str, float]) -> None:
        """Show, with a trial that is not over, what it is expected to reach."""
        if self._estimates.get(number) != values:
            self._estimates[number] = dict(values)
            with self._writing():
                self._running[number].set_user_attr("estimate", dict(values))

    def finish(self, number: int, shown: Shown) -> None:
        """Show a running trial's end."""
        trial = self._running.pop(number)
        self._estimates.pop(number, None)
        with self._writing():
            for name, note in shown.notes.items():
                trial.set_user_attr(name, note)
            for name, violation in shown.constraints.items():
                trial.set_constraint(name, violation)
            if shown.values is None:
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._study.tell(trial, list(shown.values))

    def close(self) -> None:
        """Show what still runs as failed."""
        for number in list(self._running):
            self.finish(number, Shown(None, notes={"reason": "the study ended first"}))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with quiet():
                yield
                self._copy.flush()
        except OSError as error:
            rule = "the study's Optuna copy must be writable"
            raise UserError(rule, f"{self._path}: {error.strerror}", "free space, or choose another folder") from error


class _Lines(BaseJournalBackend):
    """Optuna's journal in memory: one write at the end instead of a lock and an fsync for each trial."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self.logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.logs.extend(json.loads(json.dumps(logs)))


class _Copy(BaseJournalBackend):
    """Optuna's journal in a file, for its only writer: without the lock, the fsync and the reading back that cost
    Optuna's own backend milliseconds a line. What a crash takes from it is rebuilt from the study's journal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._news = [json.loads(line) for line in path.read_bytes().splitlines()]
        self._read = 0
        self._unwritten: list[str] = []

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        self._news = self._news[log_number_from - self._read :]
        self._read = log_number_from
        return self._news

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = [json.dumps(log, separators=(",", ":")) + "\n" for log in logs]
        self._news.extend(map(json.loads, lines))
        self._unwritten.extend(lines)

    def flush(self) -> None:
        """Write what was appended, at once, so that others find whole lines."""
        with open(self._path, "ab", buffering=0) as file:
            file.write("".join(self._unwritten).encode())
        self._unwritten.clear()


def _write_whole(path: Path, objectives: Sequence[Objective], past: Iterable[Past]) -> None:
    lines = _Lines()
    study = new_study(objectives, JournalStorage(lines))
    study.set_metric_names([o.name for o in objectives])
    for each in past:
        study.add_trial(_frozen(each))
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(path.name + ".new")
    whole.write_text("".join(json.dumps(log, separators=(",", ":")) + "\n" for log in lines.logs))
    os.replace(whole, path)
    path.with_name(path.name + ".lock").unlink(missing_ok=True)  # left by a killed writer: the next would wait for it


def _frozen(past: Past) -> FrozenTrial:
    shown = past.shown
    trial = create_trial(
        state=TrialState.FAIL if shown.values is None else TrialState.COMPLETE,
        values=shown.values,
        params=past.sample.params,
        distributions=past.sample.distributions,
        user_attrs={**_notes(past.number, past.sample), **shown.notes},
        constraints=dict(shown.constraints),
    )
    trial.datetime_start = datetime.fromtimestamp(past.started_at)
    trial.datetime_complete = datetime.fromtimestamp(past.finished_at)
    return trial


def _notes(number: int, sample: Sample) -> dict[str, Any]:
    return {"trial": number, "config": sample.values}
