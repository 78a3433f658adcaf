"""A script of Optuna's user: a space, learning curves, and an objective that reports them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

import elastune.optuna
from elastune.tuning.search.history import quiet

EPOCHS = 9
Values = tuple[float, ...]
STORAGES: dict[str, Callable[[Path], BaseStorage]] = {
    "memory": lambda folder: InMemoryStorage(),
    "rdb": lambda folder: RDBStorage(f"sqlite:///{folder / 'study.db'}"),
    "journal": lambda folder: JournalStorage(JournalFileBackend(str(folder / "study.log"))),
}


def space(trial: Any) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
        "width": trial.suggest_int("width", 1, 64),
        "kind": trial.suggest_categorical("kind", ["plain", "gated"]),
    }


def at(params: dict[str, Any], epoch: int) -> Values:
    """Error and seconds once ``epoch`` has ended; the first is 0."""
    error = abs(math.log10(params["lr"]) + 2) / 4 + 1 / (epoch + 2) + 0.3 / params["width"] ** 0.5
    return error + 0.1 * (params["kind"] == "plain"), params["width"] * (epoch + 1) / 10


def new_study(storage: BaseStorage | None = None, objectives: int = 2, seed: int = 3) -> optuna.Study:
    """The study "mine" of ``storage``, with a new sampler."""
    with quiet():
        study = optuna.create_study(
            study_name="mine",
            storage=storage,
            directions=["minimize"] * objectives,
            sampler=elastune.optuna.Sampler(seed=seed),
            load_if_exists=True,
        )
        study.set_metric_names(["error", "seconds"][:objectives])
    return study


def objective_of(pruner: elastune.optuna.Pruner, objectives: int = 2) -> Callable[[optuna.Trial], Any]:
    def objective(trial: optuna.Trial) -> Any:
        params = space(trial)
        for epoch in range(EPOCHS):
            values = at(params, epoch)[:objectives]
            pruner.report(trial, values, epoch)
            if pruner.should_prune(trial):
                raise optuna.TrialPruned
        return values

    return objective


def optimize(study: optuna.Study, objective: Callable[[optuna.Trial], Any], n: int, **options: Any) -> None:
    with quiet():
        study.optimize(objective, n_trials=n, **options)
