"""Two objectives with early stopping: a curve that falls with every epoch, and the time that training takes."""

from __future__ import annotations

import os

import optuna
import optunahub

package = optunahub.load_module("samplers/elastune")
EPOCHS = 27

study = optuna.create_study(directions=["minimize", "minimize"], sampler=package.Sampler(seed=1))
study.set_metric_names(["error", "seconds"])
pruner = package.Pruner(study, epochs=EPOCHS)


def objective(trial: optuna.Trial) -> tuple[float, float]:
    lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    width = trial.suggest_int("width", 8, 512, log=True)
    for epoch in range(EPOCHS):
        error = (lr - 0.03) ** 2 + 1 / (1 + epoch) + 1 / width
        seconds = width * (epoch + 1) / 100
        pruner.report(trial, (error, seconds), epoch)
        if pruner.should_prune(trial):
            raise optuna.TrialPruned
    return error, seconds


study.optimize(objective, n_trials=int(os.environ.get("TRIALS", "30")))
for trial in study.best_trials:
    print(trial.number, trial.params, trial.values)
print(sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials), "trials were stopped early")
