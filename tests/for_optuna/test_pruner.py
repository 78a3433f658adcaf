"""``elastune.optuna.Pruner`` stops the trials that ``elastune tune`` pauses, in every process of a study."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from tests.for_optuna.scripts import EPOCHS, STORAGES, at, new_study, objective_of, optimize, space

from elastune.core.errors import UserError
from elastune.core.journal.records import TrialFinished
from elastune.optuna import Pruner, with_estimates
from elastune.tuning.search.history import quiet
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.registry import make_schedule
from elastune.tuning.search.schedule import IntermediateResult
from elastune.tuning.search.suggester import Suggester

NAMED = {"error": "min", "seconds": "min"}


def drawn_study(storage: Any = None, objectives: int = 2) -> optuna.Study:
    """A study whose proposals take no time."""
    study = new_study(storage, objectives)
    study.sampler = optuna.samplers.RandomSampler(seed=5)
    return study


def fates(study: optuna.Study) -> list[tuple[TrialState, Any]]:
    return [(trial.state, trial.user_attrs.get("elastune:estimate")) for trial in study.trials]


def of_tune(n: int, objectives: int, params: list[dict[str, Any]] | None = None) -> list[tuple[dict[str, Any], bool]]:
    """For each of ``n`` trials of ``elastune tune --stopping asha`` what it tried, and whether it paused for good.

    Early in a study a rung has fewer trials than ``eta``. ``elastune tune`` pauses these, and promotes the best of them
    once others have come; here that one goes on at once. ``params``: what is tried, in place of proposals.
    """
    named = dict(list(NAMED.items())[:objectives])
    known = parse_objectives(named)
    suggester, schedule = Suggester(space, known, seed=3), make_schedule("asha", known)
    rungs: dict[int, list[tuple[float, ...]]] = {1: [], 3: []}
    found = []
    for number in range(n):
        if params is None:
            suggester.expect({trial: (values, 0.0) for trial, values in schedule.estimates().items()})
            suggestion = suggester.ask()
            assert suggestion is not None
            tried = suggestion.values
        else:
            tried = params[number]
        schedule.started(number, tried)
        reason = ""
        for epoch in range(1, EPOCHS + 1):
            values = at(tried, epoch - 1)[:objectives]
            reason = schedule.reported(IntermediateResult(number, epoch, EPOCHS, values))
            if epoch in rungs:
                earlier, rungs[epoch] = rungs[epoch], [*rungs[epoch], values]
                beaten = any(all(a <= b for a, b in zip(each, values, strict=True)) for each in earlier)
                if reason and len(earlier) < 2 and (not earlier or (not beaten and dominates(values, earlier))):
                    schedule.paused(number, epoch)
                    schedule.resumed(number)
                    reason = ""
            if reason:
                schedule.paused(number, epoch)
                break
        else:
            schedule.ended(number, values)
            if params is None:
                named_values = dict(zip(named, values, strict=True))
                suggester.tell(number, TrialFinished(number, "complete", values=named_values))
        found.append((tried, bool(reason)))
    return found


def dominates(values: tuple[float, ...], others: list[tuple[float, ...]]) -> bool:
    return all(all(a <= b for a, b in zip(values, each, strict=True)) for each in others)


@pytest.mark.parametrize("objectives", [1, 2])
def test_it_stops_whom_tune_pauses(objectives: int) -> None:
    study = drawn_study(objectives=objectives)
    optimize(study, objective_of(Pruner(study, epochs=EPOCHS), objectives), 60)
    stopped = [trial.state == TrialState.PRUNED for trial in study.trials]
    assert stopped == [paused for _, paused in of_tune(60, objectives, [trial.params for trial in study.trials])]
    assert 5 < sum(stopped) < 55


def test_sampler_and_pruner_together_try_and_stop_what_tune_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposals rest on the forecasts of stopped trials, as they are when a trial is asked for."""
    monkeypatch.setattr("elastune.tuning.search.gaussian.DRAWN", 14)
    study = new_study()
    optimize(study, objective_of(Pruner(study, epochs=EPOCHS)), 17)
    expected = of_tune(17, 2)
    assert [trial.params for trial in study.trials] == [params for params, _ in expected]
    assert [trial.state == TrialState.PRUNED for trial in study.trials] == [paused for _, paused in expected]
    assert any(paused for _, paused in expected[:14]), "else there are no forecasts"


@pytest.mark.parametrize("storage", STORAGES)
def test_another_process_judges_by_the_same_events(storage: str, tmp_path: Path) -> None:
    """So does a resumed study: of two pruners one has seen all as it came, and one reads it from the storage."""
    place = STORAGES[storage](tmp_path)
    study = drawn_study(place)
    here = Pruner(study, epochs=EPOCHS)
    optimize(study, objective_of(here), 6)
    again = place if storage == "memory" else STORAGES[storage](tmp_path)
    there = Pruner(drawn_study(again), epochs=EPOCHS)
    assert there.estimates() == here.estimates() != {}
    assert list(there.estimates()) == [trial.number for trial in study.trials if trial.state == TrialState.PRUNED]
    other = drawn_study(again)
    optimize(other, objective_of(there), 2)
    optimize(study, objective_of(here), 2)
    alone = drawn_study()
    for trial in study.trials:
        alone.enqueue_trial(trial.params)
    optimize(alone, objective_of(Pruner(alone, epochs=EPOCHS)), 10)
    assert fates(alone) == fates(study)


def test_a_stopped_trial_keeps_its_estimate_and_the_reason() -> None:
    study = drawn_study()
    optimize(study, objective_of(Pruner(study, epochs=EPOCHS)), 30)
    stopped = [trial for trial in study.trials if trial.state == TrialState.PRUNED]
    for trial in stopped:
        error, seconds = trial.user_attrs["elastune:estimate"]
        truth = at(trial.params, EPOCHS - 1)
        assert error == pytest.approx(truth[0], abs=0.5)
        assert seconds == pytest.approx(truth[1], rel=0.2), "time goes on as it began"
        assert "not among the best 1/3" in trial.user_attrs["elastune:reason"]
    complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert len(stopped) + len(complete) == 30
    assert not any("elastune:estimate" in trial.user_attrs for trial in complete)


def test_plots_tell_estimates_from_results() -> None:
    study = drawn_study()
    optimize(study, objective_of(Pruner(study, epochs=EPOCHS)), 20)
    stopped = sum(trial.state == TrialState.PRUNED for trial in study.trials)
    with quiet():
        figure = optuna.visualization.plot_pareto_front(with_estimates(study))
        plain = optuna.visualization.plot_pareto_front(study)
    grey = sum(len(trace.x) for trace in figure.data if "Infeasible" in trace.hovertemplate)
    assert grey == stopped > 0
    assert sum(len(trace.x) for trace in figure.data) == 20
    assert sum(len(trace.x) for trace in plain.data) == 20 - stopped
    assert figure.layout.xaxis.title.text == "error"


def test_one_objective_has_optunas_curves_too() -> None:
    study = drawn_study(objectives=1)
    optimize(study, objective_of(Pruner(study, epochs=EPOCHS), 1), 8)
    for trial in study.trials:
        expected = {epoch: at(trial.params, epoch)[0] for epoch in range(len(trial.intermediate_values))}
        assert trial.intermediate_values == expected
    assert {len(trial.intermediate_values) for trial in study.trials} >= {1, EPOCHS}


def test_without_epochs_the_first_complete_trial_says_how_many_there_are() -> None:
    named, learnt = drawn_study(), drawn_study()
    optimize(named, objective_of(Pruner(named, epochs=EPOCHS)), 15)
    optimize(learnt, objective_of(Pruner(learnt)), 15)
    assert fates(learnt) == fates(named)


def test_threads_share_a_pruner() -> None:
    study = drawn_study()
    optimize(study, objective_of(Pruner(study, epochs=EPOCHS)), 40, n_jobs=4)
    assert {state for state, _ in fates(study)} == {TrialState.COMPLETE, TrialState.PRUNED}


def test_a_trial_that_goes_on_elsewhere_comes_to_its_next_rung() -> None:
    """Its own process decides; another one, which would have stopped it, hears its further reports."""
    study = drawn_study()
    optimize(study, objective_of(Pruner(study, epochs=EPOCHS)), 3)
    other = Pruner(study, epochs=EPOCHS)
    trial = study.ask()
    worst = {"lr": 1.0, "width": 64, "kind": "plain"}
    for epoch in range(EPOCHS):
        Pruner(study, epochs=EPOCHS).report(trial, at(worst, epoch), epoch)
        other.estimates()
    assert other.estimates()[trial.number] == pytest.approx(at(worst, EPOCHS - 1), rel=1e-6)
    assert other._schedule._trials[trial.number].rung == 1, "the second rung, at epoch 3"


def test_a_diverged_trial_is_stopped_and_has_no_estimate() -> None:
    study = drawn_study()
    pruner = Pruner(study, epochs=EPOCHS)
    optimize(study, objective_of(pruner), 6)
    trial = study.ask()
    pruner.report(trial, (math.nan, 1.0), 0)
    assert pruner.should_prune(trial)
    study.tell(trial, state=TrialState.PRUNED)
    assert "elastune:estimate" not in study.trials[-1].user_attrs
    assert trial.number not in pruner.estimates()


def test_a_broken_constraint_ranks_last() -> None:
    study = drawn_study()
    pruner = Pruner(study, epochs=EPOCHS)
    optimize(study, objective_of(pruner), 6)
    best = (-1.0, 0.0)
    for violation, stops in ((-1.0, False), (1.0, True)):
        trial = study.ask()
        trial.set_constraint("memory", violation)
        pruner.report(trial, best, 0)
        assert pruner.should_prune(trial) == stops


def test_a_second_report_of_a_step_is_ignored() -> None:
    study = drawn_study()
    pruner = Pruner(study, epochs=EPOCHS)
    trial = study.ask()
    pruner.report(trial, (0.5, 1.0), 0)
    pruner.report(trial, (0.1, 9.0), 0)
    assert pruner.estimates()[trial.number] == pytest.approx((0.5, 9.0)), "9 epochs of 1 s"


def test_a_failed_trial_is_no_rival() -> None:
    study = drawn_study()
    pruner = Pruner(study, epochs=EPOCHS)
    trial = study.ask()
    pruner.report(trial, (0.0, 0.0), 0)
    study.tell(trial, state=TrialState.FAIL)
    assert pruner.estimates() == {}


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda pruner, trial: pruner.report(trial, 0.5, 0), "a number for each of 2 objectives"),
        (lambda pruner, trial: pruner.report(trial, (0.5, 1.0, 2.0), 0), "a number for each of 2 objectives"),
        (lambda pruner, trial: pruner.report(trial, ("a", None), 0), "a number for each of 2 objectives"),
        (lambda pruner, trial: pruner.report(trial, "12", 0), "a number for each of 2 objectives"),
        (lambda pruner, trial: pruner.report(trial, (0.5, 1.0), -1), "from 0 to 8"),
        (lambda pruner, trial: pruner.report(trial, (0.5, 1.0), 1.5), "from 0 to 8"),
        (lambda pruner, trial: pruner.report(trial, (0.5, 1.0), 100), "from 0 to 8"),
        (lambda pruner, trial: pruner.report(optuna.create_study().ask(), 0.5, 0), "its own study's trials"),
        (lambda pruner, trial: Pruner(trial.study, epochs=0), "a whole number from 1 on"),
        (lambda pruner, trial: Pruner(trial.study, epochs="9"), "a whole number from 1 on"),
        (lambda pruner, trial: Pruner(trial.study, eta=1), "eta of a pruner"),
        (lambda pruner, trial: Pruner(trial.study, min_resource=0), "min_resource of a pruner"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call: Callable[[Pruner, optuna.Trial], Any], rule: str) -> None:
    study = drawn_study()
    pruner, trial = Pruner(study, epochs=EPOCHS), study.ask()
    with quiet(), pytest.raises(UserError) as refusal:
        call(pruner, trial)
    assert rule in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert study.trials[0].system_attrs == {}
