"""A study read back from its journal: paused trials, its own clock, time to a tuned model, rows and frames."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.studies import SETTINGS, Telling, stopping_study

from elastune.core.errors import UserError
from elastune.core.journal.folds import fold
from elastune.core.journal.records import StudyStarted, TrialStarted
from elastune.tuning.study.results import Study
from elastune.tuning.study.trials import flat_row


def study(told: Telling) -> Study:
    return Study.of(Path("out"), told.entries)


def test_a_paused_trial_shows_its_last_report_and_is_never_on_the_front() -> None:
    journal = Telling().start(0, lr=0.1).wait(10).report(0, 1, 9.0, 2.0, accuracy=0.99, loss=0.3)
    journal.pause(0, 1, 10.0, "rank 2 of 3 at epoch 1").start(1, lr=0.2).wait(40).complete(1, 0.9, 40.0).finish()
    study_result = study(journal)
    assert [(trial.number, trial.state) for trial in study_result.trials] == [(1, "complete"), (0, "paused")]
    assert [trial.number for trial in study_result.complete] == [trial.number for trial in study_result.front()] == [1]
    paused = study_result.trials[1]
    assert paused.values == {"accuracy": 0.99, "seconds": 9.0}
    assert paused.metrics == {"accuracy": 0.99, "loss": 0.3, "seconds": 9.0, "cost": pytest.approx(2 * 2 * 9 / 3600)}
    assert (paused.epochs, paused.seconds, paused.worker_seconds) == (1, 10.0, 10.0)
    assert paused.reason == "rank 2 of 3 at epoch 1"
    assert not paused.cut_off
    assert study_result.ending == "40 trials"


def test_what_goes_on_is_neither_paused_nor_over_until_it_ends() -> None:
    journal = Telling().start(0, lr=0.1).wait(5).report(0, 1, 5.0, accuracy=0.5).pause(0, 1, 5.0)
    assert [trial.state for trial in study(journal).trials] == ["paused"]
    journal.wait(100).resume(0)
    assert study(journal).trials == ()
    journal.wait(5).report(0, 2, 10.0, accuracy=0.6).pause(0, 2, 5.0, "again")
    (paused,) = study(journal).trials
    assert (paused.epochs, paused.seconds, paused.reason) == (2, 10.0, "again"), "both times that it ran"
    journal.resume(0).wait(10).complete(0, 0.8, 20.0, 20.0)
    (done,) = study(journal).trials
    assert (done.state, done.seconds, done.worker_seconds) == ("complete", 20.0, 20.0)
    journal.start(0, lr=0.1)
    assert study(journal).trials == (), "started afresh, it forgets"


def test_a_trial_that_never_reported_can_pause() -> None:
    (paused,) = study(Telling().start(0, lr=0.1).wait(1).pause(0, 0, 1.0, cut_off=True)).trials
    assert (paused.values, paused.metrics, paused.epochs, paused.cut_off) == ({}, {}, 0, True)


def test_time_between_controllers_does_not_count_but_their_work_does() -> None:
    journal = Telling().start(0, lr=0.1).wait(30).fail(0, "diverged")  # 30 s of the first controller
    journal.wait(86_400).tell(StudyStarted(dict(SETTINGS), resumed=True))  # a day later the second
    journal.wait(2).start(1, lr=0.2).wait(10).complete(1, 0.9, 10.0).start(2, lr=0.3).wait(20).complete(2, 0.99, 20.0)
    assert fold(journal.entries).seconds == pytest.approx(62.0)
    study_result = study(journal)
    assert study_result.seconds == pytest.approx(62.0)
    assert [trial.ended_s for trial in study_result.trials] == pytest.approx([30.0, 42.0, 62.0])
    assert study_result.time_to(accuracy=0.9) == pytest.approx(42.0)
    assert study_result.time_to(accuracy=0.95) == pytest.approx(62.0)
    assert study_result.time_to(accuracy=0.9, seconds=10.0) == pytest.approx(42.0)
    assert study_result.time_to(accuracy=0.95, seconds=10.0) is None
    assert study_result.time_to(accuracy=1.0) is None
    assert fold([]).seconds == 0.0


def test_time_to_needs_known_targets() -> None:
    study_result = study(Telling())
    with pytest.raises(UserError, match="name objectives only.*beauty.*known: accuracy, seconds"):
        study_result.time_to(beauty=1.0)
    with pytest.raises(UserError, match="needs a target"):
        study_result.time_to()


def test_the_command_leaves_out_what_is_not_set() -> None:
    journal = Telling().start(0, lr=0.1, optimizer="adam").wait(1).complete(0, 0.9, 1.0)
    assert "=null" not in study(journal).pick().command
    assert "--set optimizer=adam" in study(journal).pick().command
    settings = {**SETTINGS, "defaults": {**SETTINGS["defaults"], "momentum": 0.9}}
    journal = Telling(settings).start(0, lr=0.1, optimizer="adam").wait(1).complete(0, 0.9, 1.0)
    assert "--set momentum=null" in study(journal).pick().command, "or the program's 0.9 would slip in"
    settings = {name: value for name, value in SETTINGS.items() if name != "defaults"}
    journal = Telling(settings).start(0, lr=0.1).wait(1).complete(0, 0.9, 1.0)
    assert "--set name=null" in study(journal).pick().command, "what nobody recorded nobody knows"


def test_the_command_names_what_is_nested_with_a_dot() -> None:
    nested = {"optim": {"lr": 0.1, "warmup": None}, "empty": {}}
    journal = Telling({**SETTINGS, "defaults": nested}).start(0, lr=0.1).wait(1)
    journal.entries[-1].record.config.clear()
    journal.entries[-1].record.config.update({"optim": {"lr": 0.5, "warmup": None}, "empty": {}})
    command = study(journal.complete(0, 0.9, 1.0)).pick().command
    assert "--set optim.lr=0.5 --epochs" in command, "and nothing of what is not set"


def test_a_subset_says_how_much_it_covers() -> None:
    journal = Telling()
    for number, (accuracy, seconds) in enumerate([(0.9, 10.0), (0.95, 20.0), (0.951, 40.0), (0.8, 50.0)]):
        journal.start(number, lr=0.1).wait(1).complete(number, accuracy, seconds)
    study_result = study(journal)
    chosen = study_result.subset(3)
    shares = [study_result.covered(chosen[:k]) for k in (1, 2, 3)]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[2] == pytest.approx(1.0)


def test_rows_hold_everything_by_name() -> None:
    journal = Telling().start(3, parent=1, seed=7, lr=0.25).wait(8).report(3, 4, 8.0, accuracy=0.5)
    (trial,) = study(journal.complete(3, 0.5, 8.0)).trials
    row = flat_row(trial)
    expected = {
        "number": 3,
        "state": "complete",
        "seed": 7,
        "parent": 1,
        "epochs": 4,
        "seconds": 8.0,
        "worker_seconds": 8.0,
        "params.lr": 0.25,
        "config.lr": 0.25,
        "config.momentum": None,
        "execution.workers": 1,
        "values.accuracy": 0.5,
        "metrics.cost": pytest.approx(2 * 8 / 3600),
        "reason": "",
    }
    assert {name: row[name] for name in expected} == expected
    assert row["ended_at"] - row["started_at"] == pytest.approx(8.0)


def test_a_frame_needs_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="a frame needs pandas.*pip install pandas"):
        study(stopping_study(4)).frame()


def test_a_frame_has_a_row_a_trial_and_stamps_for_times() -> None:
    study_result = study(stopping_study(6))
    frame = study_result.frame()
    assert list(frame["number"]) == [trial.number for trial in study_result.trials]
    assert str(frame["started_at"].dt.tz) == "UTC"
    stamps = [at.timestamp() for at in frame["started_at"]]
    assert stamps == pytest.approx([trial.started_at for trial in study_result.trials], rel=0, abs=1e-4)
    assert list(frame["state"]) == [trial.state for trial in study_result.trials]


def test_a_study_that_stops_early_is_read_as_it_was_told() -> None:
    result = stopping_study(40)
    study_result = study(result)
    states = {state: sum(trial.state == state for trial in study_result.trials) for state in ("complete", "paused")}
    assert states["complete"] > 15
    assert states["paused"] > 5
    used = sum(trial.worker_seconds for trial in study_result.trials)
    assert 0.8 < used / sum(span.worker_seconds for span in study_result.spans) <= 1.01
    assert {trial.number for trial in study_result.front()} <= {
        t.number for t in study_result.trials if t.state == "complete"
    }


@pytest.mark.parametrize(
    ("mode", "message"), [("fast", "had 1 and 2 workers, which show in the result"), ("exact", "")]
)
def test_a_pick_says_where_its_command_gives_another_result(mode: str, message: str) -> None:
    journal = Telling().start(0, lr=0.1).wait(5).pause(0, 1, 5.0).resume(0, workers=2).wait(5).complete(0, 0.9, 10.0)
    started = next(i for i, entry in enumerate(journal.entries) if isinstance(entry.record, TrialStarted))
    record = journal.entries[started].record
    assert isinstance(record, TrialStarted)
    moved = replace(record, execution={**record.execution, "mode": mode})
    journal.entries[started] = replace(journal.entries[started], record=moved)
    caveat = study(journal.finish()).pick().caveat
    assert message in caveat
    assert bool(caveat) is bool(message)


def test_a_pick_is_trained_under_the_bound_of_divergence_of_its_study() -> None:
    journal = Telling().start(0, lr=0.1).wait(5).complete(0, 0.9, 10.0)
    assert "--divergence" not in study(journal).pick().command
    begun = journal.entries[0].record
    assert isinstance(begun, StudyStarted)
    journal.entries[0] = replace(
        journal.entries[0], record=replace(begun, settings={**begun.settings, "divergence": None})
    )
    assert "--divergence off" in study(journal).pick().command
