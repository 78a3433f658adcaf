"""Studies on simulated workers: the driver of real ones, thousands of trials in seconds, and recorded trials."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.cost import ANY, Paid, Prices
from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter, read
from elastune.core.journal.records import (
    Entry,
    Record,
    StudyStarted,
    TimesFitted,
    TrialFinished,
    TrialPaused,
    TrialReported,
    TrialStarted,
)
from elastune.core.run import ExecutionSettings, Program
from elastune.train.program.load import load
from elastune.tuning.simulate.cluster import WorkerFailures
from elastune.tuning.simulate.run import Simulation, SurrogateModel, simulate
from elastune.tuning.simulate.trial_model import RecordedModel, parse_scaling
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.results import Study
from elastune.tuning.study.run import tune
from elastune.tuning.study.validate import check

SURROGATE = """
import math

config = {"lr": 0.1, "kind": "a", "batch_size": 100}
objectives = {"error": "min", "seconds": "min"}

def space(trial):
    return {"lr": trial.suggest_float("lr", 1e-3, 1.0, log=True), "kind": trial.suggest_categorical("kind", ["a", "b"])}

def surrogate(config, workers):
    if config["kind"] == "raises":
        raise ArithmeticError("no luck")
    slow = 2.0 if config["kind"] == "a" else 1.0
    error = abs(math.log10(config["lr"]) + 2) + (0.0 if config["kind"] == "a" else 0.5)
    return [(10.0 * slow / workers, {"error": error + 1 / epoch}) for epoch in range(1, 6)]
"""


def request_of(program: Program, out: Path, **changes: Any) -> StudyRequest:
    request = StudyRequest(program, out, sampler="random", trials=12, workers=4)
    return replace(request, **changes)


def simulated(request: StudyRequest, **more: Any) -> Simulation:
    surrogate = load(request.program).surrogate
    assert surrogate is not None
    return simulate(request, SurrogateModel(surrogate, start_s=1.0, resize_pause_s=0.5), **more)


@pytest.fixture
def made_up(program) -> Program:
    return program(SURROGATE)


def records(out: Path) -> list[Record]:
    return [entry.record for entry in read(out / "journal.jsonl")]


def test_a_simulated_study_is_a_study_with_virtual_times(made_up: Program, tmp_path: Path) -> None:
    result = simulated(request_of(made_up, tmp_path / "out"))
    assert result.study == Study.load(tmp_path / "out")
    assert len(result.study.complete) == 12
    for trial in result.study.trials:
        assert trial.values["seconds"] == (100.0 if trial.config["kind"] == "a" else 50.0)
        assert trial.seconds == trial.values["seconds"] + 1.0, "starting counts, though not as training"
    stamps = [entry.at for entry in read(tmp_path / "out" / "journal.jsonl")]
    assert stamps == sorted(stamps)
    assert (stamps[0], stamps[-1]) == (0.0, result.seconds)
    assert result.seconds > 150.0 > result.real_seconds
    busy = sum(trial.seconds for trial in result.study.trials)
    assert result.used == pytest.approx(busy / (4 * result.seconds))


def test_a_grid_needs_no_budget_and_ends_with_its_last_configuration(made_up: Program, tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {
            "kind": trial.suggest_categorical("kind", ["a", "b"]),
            "lr": trial.suggest_categorical("lr", [0.1, 0.2]),
        }

    plain_request = request_of(made_up, tmp_path / "out", sampler="grid", trials=None)
    result = simulated(plain_request, space=space)
    assert len(result.study.complete) == 4
    assert result.study.ending == "the space is exhausted"
    for changes in ({"sampler": "random"}, {"stopping": "pbt:population=2"}):
        with pytest.raises(UserError, match="a study needs a budget"):
            check(replace(plain_request, out=tmp_path / "other", **changes), space)


def test_constraints_of_the_programs_file_count_beside_those_of_the_call(program, tmp_path: Path) -> None:
    bounded = program(f"{SURROGATE}\nconstraints = ['seconds <= 60', 'lr <= 0.5']\n")
    plain_request = request_of(bounded, tmp_path / "out", constraints=("error <= 1",))
    study = simulated(plain_request).study
    assert all(trial.config["lr"] <= 0.5 for trial in study.trials), "settings that break it are not tried"
    slow = [trial for trial in study.trials if trial.config["kind"] == "a"]
    assert slow
    assert all("breaks seconds <= 60 (by 40)" in trial.reason for trial in slow)
    assert {trial.config["kind"] for trial in study.complete} == {"b"}
    assert all(trial.values["error"] <= 1 for trial in study.complete)
    (started, *_) = [each for each in records(tmp_path / "out") if isinstance(each, StudyStarted)]
    assert started.settings["constraints"] == ["seconds <= 60", "lr <= 0.5", "error <= 1"]
    assert len(simulated(replace(plain_request, resume=True, trials=13)).study.trials) == 13, (
        "a resumed study has the same"
    )
    bounded.path.write_text(SURROGATE)
    with pytest.raises(UserError, match="resumes with the constraints it was begun with"):
        simulated(replace(plain_request, resume=True, trials=14))


def test_the_same_request_gives_the_same_journal(made_up: Program, tmp_path: Path) -> None:
    def journal(name: str, **changes: Any) -> str:
        out = tmp_path / name
        simulated(request_of(made_up, out, **changes), losses=WorkerFailures(200.0, 1))
        return (out / "journal.jsonl").read_text().replace(str(out), "OUT")

    shared = {"stopping": "asha", "trial_workers": (1, 3)}
    assert journal("a", **shared) == journal("b", **shared)
    assert journal("c", **shared, seed=1) != journal("a2", **shared)


def test_a_budget_of_simulated_time_ends_the_study_at_its_second(made_up: Program, tmp_path: Path) -> None:
    result = simulated(request_of(made_up, tmp_path / "out", trials=None, budget_s=1000.0))
    assert result.seconds <= 1000.0
    assert result.seconds > 850.0
    assert result.real_seconds < 60.0


def test_a_trial_that_takes_too_long_is_ended_at_that_moment(made_up: Program, tmp_path: Path) -> None:
    result = simulated(request_of(made_up, tmp_path / "out", trial_timeout_s=75.5))
    reasons = {(t.config["kind"], t.state, t.seconds) for t in result.study.trials}
    assert reasons == {("a", "infeasible", 75.5), ("b", "complete", 51.0)}


def test_a_thousand_trials_on_256_workers_take_seconds(made_up: Program, tmp_path: Path) -> None:
    begun = time.process_time()
    result = simulated(request_of(made_up, tmp_path / "out", trials=1000, workers=256))
    assert len(result.study.complete) == 1000
    assert time.process_time() - begun < 20.0, "about 3 where nothing else runs"


def test_pausing_and_sharing_change_when_trials_end_and_not_what_they_find(made_up: Program, tmp_path: Path) -> None:
    def ends(name: str, **changes: Any) -> dict[int, TrialFinished]:
        simulated(request_of(made_up, tmp_path / name, workers=8, trials=16, **changes))
        return {r.trial: r for r in records(tmp_path / name) if isinstance(r, TrialFinished)}

    plain, shared = ends("plain"), ends("shared", stopping="asha", trial_workers=(1, 4))
    assert any(isinstance(record, TrialPaused) for record in records(tmp_path / "shared"))
    assert shared
    assert {n: end.run and end.run.sha256 for n, end in shared.items()} == {
        n: end.run and end.run.sha256 for n, end in plain.items() if n in shared
    }


def test_a_controller_that_died_goes_on_where_its_clock_stood(made_up: Program, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    ended = 0

    def observe(record: Record) -> None:
        nonlocal ended
        ended += isinstance(record, TrialFinished)
        if ended == 5:
            raise Killed

    plain_request = request_of(made_up, tmp_path / "out")
    with pytest.raises(Killed):
        simulated(plain_request, observe=observe)
    before = read(tmp_path / "out" / "journal.jsonl")[-1].at
    result = simulated(replace(plain_request, resume=True))
    assert len(result.study.complete) == 12
    stamps = [entry.at for entry in read(tmp_path / "out" / "journal.jsonl")]
    assert stamps == sorted(stamps)
    assert stamps[-1] == before + result.seconds


def test_a_simulation_is_not_mixed_with_trained_trials(made_up: Program, tmp_path: Path) -> None:
    simulated(request_of(made_up, tmp_path / "simulated", trials=2))
    with JournalWriter(tmp_path / "trained" / "journal.jsonl") as journal:
        for record in records(tmp_path / "simulated"):
            begun = isinstance(record, StudyStarted)
            journal.write(replace(record, settings={**record.settings, "simulated": False}) if begun else record)
    with pytest.raises(UserError, match="goes on with simulated trials only"):
        simulated(request_of(made_up, tmp_path / "trained", trials=4, resume=True))
    both = Program(tmp_path / "both.py")
    both.path.write_text(made_up.path.read_text() + "\n\ndef train(session):\n    pass\n")
    simulated(request_of(both, tmp_path / "first", trials=2))
    with pytest.raises(UserError, match="goes on with trained trials only"):
        tune(request_of(both, tmp_path / "first", trials=4, resume=True))
    with pytest.raises(UserError, match="a program that is trained must define train"):
        tune(request_of(made_up, tmp_path / "second", trials=4))


def test_a_population_is_not_simulated(made_up: Program, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="children begin with their parents' weights"):
        simulated(request_of(made_up, tmp_path / "out", stopping="pbt:every=2"))


def test_a_program_that_can_only_be_simulated_cannot_be_trained(made_up: Program, program) -> None:
    with pytest.raises(UserError, match=r"must define train\(session\)"):
        load(made_up).train(None)
    with pytest.raises(UserError, match=r"must define train\(session\)"):
        load(program("config = {}", "nothing.py"))
    with pytest.raises(UserError, match="surrogate must be a function"):
        load(program("surrogate = 3", "number.py"))


@pytest.mark.parametrize(
    ("results", "rule"),
    [
        ([], "1 to 100000 epochs"),
        ([(1.0, {"error": 1.0}, 3)], "seconds and metrics"),
        ([1.0], "seconds and metrics"),
        ([(-1.0, {"error": 1.0})], "0 or more"),
        ([(math.inf, {"error": 1.0})], "0 or more"),
    ],
)
def test_what_a_surrogate_tells_is_checked(results: list[Any], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        SurrogateModel(lambda config, workers: results).epochs({}, None)


def test_a_surrogate_has_as_many_epochs_as_it_tells_of() -> None:
    model = SurrogateModel(lambda config, workers: ((2.0 / workers, {"error": e}) for e in (3.0, 2.0, 1.0)))
    assert (model.epochs({}, None), model.epochs({}, 2)) == (3, 2)
    assert (model.epoch_s({}, 4, 1), model.metrics({}, 0, 3)) == (0.5, {"error": 1.0})
    assert (model.batch({"batch_size": 32}), model.batch({"batch_size": True})) == (32, 100)
    with pytest.raises(UserError, match="tells of 3 epochs"):
        model.epochs({}, 4)


def test_recorded_trials_come_again(made_up: Program, tmp_path: Path) -> None:
    first = simulated(
        request_of(
            made_up, tmp_path / "first", workers=2, trials=8, execution=ExecutionSettings(workers=2, mode="fast")
        )
    )
    model = RecordedModel(tmp_path / "first", "amdahl:0.5", start_s=1.0)
    again = simulate(request_of(made_up, tmp_path / "again", workers=1, trials=8), model)
    assert [t.config for t in again.study.trials] == [t.config for t in first.study.trials]
    for old, new in zip(first.study.trials, again.study.trials, strict=True):
        assert new.values["error"] == old.values["error"]
        assert new.values["seconds"] == pytest.approx(old.values["seconds"] / 0.75), "half of the work is not shared"
    assert set(model.distances) == {0.0}
    for part in ("the nearest of 8 recorded trials", "amdahl:0.5 scaling", "distance 0 in the median"):
        assert part in again.source

    near = first.study.trials[0]
    off = {**near.config, "lr": near.config["lr"] * 1.0001}
    assert model.metrics(off, 0, 5)["error"] == near.values["error"]
    assert model.distances[-1] > 0
    with pytest.raises(UserError, match="has 5 epochs"):
        model.epochs(off, 6)


def test_what_was_recorded_may_have_gaps(made_up: Program, tmp_path: Path) -> None:
    source = tmp_path / "source"
    simulated(request_of(made_up, source, trials=2, workers=1))
    (tmp_path / "gaps").mkdir()
    with JournalWriter(tmp_path / "gaps" / "journal.jsonl") as journal:
        for record in records(source):
            if not (isinstance(record, TrialReported) and record.report.epoch in (2, 3)):
                journal.write(record)
    whole, gaps = RecordedModel(source), RecordedModel(tmp_path / "gaps")
    config = next(r.config for r in records(source) if isinstance(r, TrialStarted))
    assert gaps.epochs(config, None) == 5
    assert [gaps.epoch_s(config, 1, e) for e in range(1, 6)] == [whole.epoch_s(config, 1, e) for e in range(1, 6)]
    assert gaps.metrics(config, 0, 3) == whole.metrics(config, 0, 1)
    assert gaps.metrics(config, 0, 4) == whole.metrics(config, 0, 4)

    (tmp_path / "none").mkdir()
    with JournalWriter(tmp_path / "none" / "journal.jsonl") as journal:
        journal.write(records(source)[0])
    with pytest.raises(UserError, match="ended and reported"):
        RecordedModel(tmp_path / "none")


def test_scalings() -> None:
    fitted = [Entry(0.0, TimesFitted(0.0, 0.001, 0.0, 0.0, 0, [1]))]
    assert parse_scaling("linear")({}, 2, 8) == 0.25
    assert parse_scaling("amdahl:0")({}, 2, 8) == 0.25
    assert parse_scaling("amdahl:1")({}, 2, 8) == 1.0
    assert parse_scaling("amdahl:0.2")({}, 1, 4) == pytest.approx(0.4)
    assert parse_scaling("fitted", fitted)({"batch_size": 10}, 1, 4) == pytest.approx(0.3)
    with pytest.raises(UserError, match="batch size"):
        parse_scaling("fitted", fitted)({}, 1, 4)
    for wrong in ("", "amdahl", "amdahl:2", "amdahl:nan", "linear:1", "fitted", "quadratic"):
        with pytest.raises(UserError):
            parse_scaling(wrong)


@pytest.mark.parametrize("trials", [1, 3])
def test_a_study_at_prices_of_hosts_pays_for_all_that_its_trials_had(
    made_up: Program, tmp_path: Path, trials: int
) -> None:
    """Trials of one worker on a cluster of two: what nobody uses is paid for by those that run."""
    prices = Prices({ANY: ((0.0, 3600.0), (60.0, 7200.0))})
    plain_request = request_of(made_up, tmp_path / "out", workers=2, trials=trials, prices=prices)
    plain_request = replace(
        plain_request, objectives={"error": "min", "cost": "min"}, execution=ExecutionSettings(mode="fast", workers=1)
    )
    result = simulated(plain_request).study.complete
    begun, ended = result[0].started_at, max(trial.ended_at for trial in result)
    assert all(trial.values["cost"] == trial.metrics["cost"] for trial in result)
    recorded = records(tmp_path / "out")
    costs = [record.cost for record in recorded if isinstance(record, TrialFinished)]
    assert costs == [trial.values["cost"] for trial in result]
    whole = prices.cost(Paid(ANY, 2, 0.0, ended - begun))
    assert sum(trial.values["cost"] for trial in result) == pytest.approx(whole), "starting is paid for, too"
    assert trials > 1 or ended - begun == result[0].metrics["seconds"] + 1.0
    reported = [record.cost for record in recorded if isinstance(record, TrialReported) and record.trial == 0]
    assert reported == sorted(reported)
    assert 0 < reported[0] < reported[-1] <= result[0].values["cost"] or result[0].number
    (started,) = (record for record in recorded if isinstance(record, StudyStarted))
    assert started.settings["prices"] == prices.digest
    with pytest.raises(UserError, match="prices it was begun with"):
        simulated(replace(plain_request, resume=True, prices=Prices.constant(1.0)))


def test_paused_trials_and_those_of_a_controller_before_keep_their_costs(made_up: Program, tmp_path: Path) -> None:
    """Each trial's cost at its end is what all of its times have cost, whoever counted them."""
    prices = Prices.constant(3600.0)
    plain_request = request_of(made_up, tmp_path / "out", workers=1, trials=9, prices=prices, stopping="asha:eta=3")
    plain_request = replace(
        plain_request, objectives={"error": "min", "cost": "min"}, execution=ExecutionSettings(mode="fast", workers=1)
    )
    simulated(replace(plain_request, trials=5))
    simulated(replace(plain_request, resume=True))
    recorded = records(tmp_path / "out")
    paused = {r.trial: r for r in recorded if isinstance(r, TrialPaused)}
    whole = [r for r in recorded if isinstance(r, TrialFinished) and r.trial in paused]
    assert whole, "some went on"
    for record in (*paused.values(), *whole):
        of_trial = [r for r in recorded if isinstance(r, TrialPaused) and r.trial == record.trial]
        seconds = sum(r.seconds for r in of_trial) if isinstance(record, TrialPaused) else record.seconds
        assert record.cost == pytest.approx(seconds), "one worker, a dollar a second, nobody idle"
