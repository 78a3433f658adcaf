"""A study as Optuna reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from tests.support.studies import SETTINGS, SPACE, Telling, stopping_study

from elastune.core.journal.records import TrialFinished
from elastune.report.export import to_optuna

ONE = {**SETTINGS, "objectives": {"accuracy": "max"}}


def opened(journal: Telling, folder: Path) -> optuna.Study:
    journal.write(folder / "out")
    (folder / "study.log").write_bytes(to_optuna(folder / "out"))
    return optuna.load_study(
        study_name="elastune", storage=JournalStorage(JournalFileBackend(str(folder / "study.log")))
    )


def shown(trial: optuna.trial.FrozenTrial) -> tuple[TrialState, Any, str]:
    return trial.state, trial.values, trial.user_attrs.get("reason", "")


def test_every_state_of_a_trial(tmp_path: Path) -> None:
    journal = Telling().start(0, lr=0.1, optimizer="sgd", momentum=0.9).wait(60).complete(0, 0.9, 10.0)
    journal.start(1, lr=0.2, optimizer="adam").wait(5).report(1, 1, 5.0, accuracy=0.5).pause(1, 1, 5.0, "rank 2 of 2")
    journal.start(2, lr=0.3).wait(1).fail(2, "diverged")
    journal.start(3, lr=0.4).wait(2).report(3, 1, 2.0, accuracy=0.4)
    journal.start(4, lr=0.5).wait(3)
    broken = {"cost <= 1": 0.5, "accuracy >= 0.1": -0.7}
    journal.tell(TrialFinished(4, "infeasible", {"accuracy": 0.8, "seconds": 3.0}, {"memory": 7.0}, broken, 3.0))
    study = opened(journal, tmp_path)
    assert [direction.name for direction in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert study.metric_names == ["accuracy", "seconds"]
    assert [shown(trial) for trial in study.trials] == [
        (TrialState.COMPLETE, [0.9, 10.0], ""),
        (TrialState.PRUNED, None, "rank 2 of 2"),
        (TrialState.FAIL, None, "diverged"),
        (TrialState.RUNNING, None, ""),
        (TrialState.COMPLETE, [0.8, 3.0], ""),
    ]
    first, paused, *_, last = study.trials
    assert first.params == {"lr": 0.1, "optimizer": "sgd", "momentum": 0.9}
    assert first.distributions == {name: SPACE[name] for name in ("lr", "optimizer", "momentum")}
    assert first.duration is not None
    assert first.duration.total_seconds() == 60
    assert paused.user_attrs["reports"] == [{"epoch": 1, "accuracy": 0.5, "seconds": 5.0}]
    assert (last.constraints, last.user_attrs["memory"]) == (broken, 7.0)
    assert [trial.number for trial in study.best_trials] == [0]


def test_reports_of_one_objective_are_intermediate_values(tmp_path: Path) -> None:
    journal = Telling(ONE).start(0, lr=0.1)
    for epoch in (1, 2, 3):
        journal.wait(1).report(0, epoch, float(epoch), accuracy=0.2 * epoch)
    study = opened(journal.complete(0, 0.8, 4.0), tmp_path)
    assert study.trials[0].intermediate_values == pytest.approx({1: 0.2, 2: 0.4, 3: 0.6})
    assert study.best_value == 0.8
    assert "reports" not in study.trials[0].user_attrs


def test_a_trial_that_was_started_again_counts_once_and_numbers_with_gaps_are_told(tmp_path: Path) -> None:
    journal = Telling().start(3, lr=0.1).wait(9).report(3, 1, 9.0, accuracy=0.1)
    journal.start(3, lr=0.1).wait(4).complete(3, 0.7, 4.0).start(1, lr=0.2).wait(1).complete(1, 0.6, 1.0)
    trials = opened(journal, tmp_path).trials
    assert [(trial.user_attrs["trial"], trial.values) for trial in trials] == [(1, [0.6, 1.0]), (3, [0.7, 4.0])]
    assert "reports" not in trials[1].user_attrs


def test_a_whole_study_has_the_same_front(tmp_path: Path) -> None:
    result = stopping_study(40)
    ended = {e.record.trial: e.record for e in result.entries if isinstance(e.record, TrialFinished)}
    study = opened(result, tmp_path)
    assert len(study.trials) == 40
    for trial in study.trials:
        record = ended.get(trial.number)
        if record is not None and record.state == "complete":
            assert trial.values == [record.values["accuracy"], record.values["seconds"]]
        else:
            assert trial.values is None
