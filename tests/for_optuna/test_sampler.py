"""``elastune.optuna.Sampler`` proposes what ``elastune tune`` proposes, wherever the trials are kept."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState, create_trial
from tests.for_optuna.scripts import EPOCHS, STORAGES, at, new_study, optimize, space

import elastune.optuna
from elastune.core.journal.records import TrialFinished
from elastune.tuning.search.constraint import parse_constraints
from elastune.tuning.search.history import quiet
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.suggester import Suggester

NAMED = {"error": "min", "seconds": "min"}
FAILED, RUNNING = (2,), (3, 5)
DRAWN, TRIALS = 4, 8  # what a test has time for


@pytest.fixture(autouse=True)
def few_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastune.tuning.search.gaussian.DRAWN", DRAWN)


def result(params: dict[str, Any], objectives: int) -> tuple[float, ...]:
    return at(params, EPOCHS - 1)[:objectives]


def proposals(study: optuna.Study, n: int, objectives: int = 2) -> list[dict[str, Any]]:
    """What is proposed in ``n`` trials, of which some fail and some go on."""
    found = []
    for _ in range(n):
        trial = study.ask()
        found.append(space(trial))
        with quiet():
            if trial.number in FAILED:
                study.tell(trial, state=TrialState.FAIL)
            elif trial.number not in RUNNING:
                study.tell(trial, result(found[-1], objectives))
    return found


@cache
def of_tune(objectives: int = 2) -> list[dict[str, Any]]:
    """The same trials in a study of ``elastune tune``."""
    named = dict(list(NAMED.items())[:objectives])
    suggester = Suggester(space, parse_objectives(named), seed=3)
    found = []
    for _ in range(TRIALS):
        suggestion = suggester.ask()
        assert suggestion is not None
        found.append(suggestion.values)
        if suggestion.number in FAILED:
            suggester.tell(suggestion.number, TrialFinished(suggestion.number, "infeasible"))
        elif suggestion.number not in RUNNING:
            values = dict(zip(named, result(suggestion.values, objectives), strict=True))
            suggester.tell(suggestion.number, TrialFinished(suggestion.number, "complete", values=values))
    return found


@pytest.mark.parametrize("objectives", [1, 2])
def test_it_proposes_as_tune_does(objectives: int) -> None:
    assert proposals(new_study(objectives=objectives), TRIALS, objectives) == of_tune(objectives)


def test_it_learns_from_constraints_as_tune_does() -> None:
    text = "used <= 20"
    suggester = Suggester(space, parse_objectives(NAMED), parse_constraints([text]), seed=3)
    study = new_study()
    for _ in range(6):
        trial, suggestion = study.ask(), suggester.ask()
        assert suggestion is not None
        assert space(trial) == suggestion.values
        used = float(suggestion.values["width"])
        values = dict(zip(NAMED, result(suggestion.values, 2), strict=True))
        trial.set_constraint(text, used - 20)
        with quiet():
            study.tell(trial, list(values.values()))
        finished = TrialFinished(suggestion.number, "complete", values=values, metrics={**values, "used": used})
        suggester.tell(suggestion.number, finished)
    assert suggestion.values != of_tune()[5]


@pytest.mark.parametrize("storage", ["rdb", "journal"])
def test_a_resumed_study_goes_on_as_it_would_have(storage: str, tmp_path: Path) -> None:
    first = proposals(new_study(STORAGES[storage](tmp_path)), 6)
    assert first + proposals(new_study(STORAGES[storage](tmp_path)), 2) == of_tune()


def test_a_trial_of_another_process_counts_while_it_runs(tmp_path: Path) -> None:
    """Numbers 3 and 5 are asked for elsewhere, and never told."""
    here, there = (new_study(STORAGES["rdb"](tmp_path)) for _ in range(2))
    found: list[dict[str, Any]] = []
    for number in range(TRIALS):
        found += proposals(there if number in RUNNING else here, 1)
    assert found == of_tune()


def test_threads_know_of_each_others_proposals() -> None:
    study = new_study()
    proposals(study, 6)
    trials = [study.ask() for _ in range(2)]
    for trial in trials:
        _ = trial.relative_params  # proposed, and not yet asked for: as by threads at once
    assert len({repr(space(trial)) for trial in trials}) == 2


def test_a_trial_that_the_user_enqueued_has_its_parameters() -> None:
    study = new_study()
    study.enqueue_trial({"lr": 0.1, "width": 7})
    optimize(study, lambda trial: result(space(trial), 2), 5)
    assert study.trials[0].params["lr"] == 0.1
    assert study.trials[0].params["width"] == 7
    assert study.trials[0].params["kind"] in ("plain", "gated")
    assert all(trial.state == TrialState.COMPLETE for trial in study.trials)


def test_pruned_trials_count_by_their_estimates() -> None:
    """By the estimate that a pruner has kept, else by the last value, and without any as failures."""
    distributions = {"x": optuna.distributions.FloatDistribution(0, 1)}

    def proposed(state: TrialState, **kept: Any) -> float:
        study = optuna.create_study(sampler=elastune.optuna.Sampler(seed=1))
        for x in range(6):
            study.add_trial(create_trial(value=(x / 6 - 0.5) ** 2, params={"x": x / 6}, distributions=distributions))
        study.add_trial(create_trial(state=state, params={"x": 0.9}, distributions=distributions, **kept))
        return study.ask(distributions).params["x"]

    with quiet():
        good = proposed(TrialState.COMPLETE, value=-1.0)
        estimate = {"elastune:estimate": [-1.0]}
        assert proposed(TrialState.PRUNED, user_attrs=estimate, value=5.0) == good
        assert proposed(TrialState.PRUNED, value=-1.0) == good
        assert proposed(TrialState.PRUNED) == proposed(TrialState.FAIL) != good
        assert proposed(TrialState.COMPLETE, value=float("inf")) == proposed(TrialState.FAIL)


def test_without_a_seed_studies_differ() -> None:
    first, second = (optuna.create_study(sampler=elastune.optuna.Sampler()) for _ in range(2))
    assert space(first.ask()) != space(second.ask())


def test_it_can_be_pickled_in_the_middle_of_a_trial() -> None:
    study = new_study()
    proposals(study, 6)
    space(study.ask())
    study.sampler = pickle.loads(pickle.dumps(study.sampler))
    other = new_study()
    proposals(other, 6)
    space(other.ask())
    assert space(study.ask()) == space(other.ask())


def test_neither_the_import_nor_the_pruner_needs_torch() -> None:
    script = """
import sys
from functools import cache
sys.modules["torch"] = None
import optuna
import elastune
sampler = elastune.optuna.Sampler(seed=1)
assert elastune.optuna.Pruner and sampler
study = optuna.create_study(directions=["minimize"] * 2, sampler=optuna.samplers.TPESampler(seed=1))
pruner = elastune.optuna.Pruner(study, epochs=4)
def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    for epoch in range(4):
        pruner.report(trial, (x, 1 - x), epoch)
        if pruner.should_prune(trial):
            raise optuna.TrialPruned
    return x, 1 - x
study.optimize(objective, n_trials=8)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_private_names_of_optuna_are_imported_in_one_file() -> None:
    package = Path(elastune.optuna.__file__).parents[1]
    private = re.compile(r"^\s*(from|import) optuna(\.\w+)*\._|^\s*from optuna[\w.]* import .*\b_[a-z]", re.MULTILINE)
    found = {str(file.relative_to(package)) for file in package.rglob("*.py") if private.search(file.read_text())}
    assert found == {"tuning/search/gaussian.py"}
