"""A study whose program, space or data have changed is refused, or keeps its earlier trials apart from later ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.studies import Telling

from elastune.cli import main
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.folds import fold
from elastune.core.journal.records import (
    ChangesAccepted,
    DataContext,
    Entry,
    Record,
    RunContext,
    RunFailed,
    RunFinished,
    StudyStarted,
    TrialFinished,
)
from elastune.core.run import Program
from elastune.report.explain import explain
from elastune.report.overviews import front_trials, gather_study
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.data.fingerprint import OTHER_DATA
from elastune.train.program.load import load
from elastune.train.program.source import EDITED
from elastune.train.program.space import Space
from elastune.tuning.frontier.trainings import Trainings
from elastune.tuning.simulate.run import SurrogateModel, simulate
from elastune.tuning.study.budget import program_error
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.results import Study
from elastune.tuning.study.resume import common_data, space_differences, summarize_space
from elastune.tuning.study.run import checked, tune
from elastune.tuning.study.validate import check_same_study

PROGRAM = """
PEAK = 0.3
config = {"x": 0.5, "kind": "", "epochs": 1}
objectives = {"accuracy": "max"}

def space(trial):
    return {"x": trial.suggest_float("x", 0.0, 1.0), "kind": "plain"}

def surrogate(config, workers):
    return [(10.0, {"accuracy": 1.0 - abs(config["x"] - PEAK)})]
"""


def asked(folder: Path, **more: Any) -> StudyRequest:
    path = folder / "program.py"
    if not path.exists():
        path.write_text(PROGRAM)
    return StudyRequest(Program(path), folder / "out", **{"sampler": "random", "trials": 6, "workers": 1, **more})


def searched(request: StudyRequest) -> Study:
    surrogate = load(request.program).surrogate
    assert surrogate is not None
    return simulate(request, SurrogateModel(surrogate)).study


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "program.py").read_text()
    assert text.count(old) == 1
    (folder / "program.py").write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("PEAK = 0.3", "PEAK = 0.9", "program.py, line 2, in PEAK"),
        ("1.0 - abs", "2.0 - abs", "program.py, line 10, in surrogate"),
        ("0.0, 1.0", "0.0, 0.5", "space: x is 0 to 0.5, was 0 to 1"),
        ('"plain"', '"other"', "space: it returns another kind"),
    ],
)
def test_a_change_is_refused_and_nothing_is_written(tmp_path: Path, old: str, new: str, message: str) -> None:
    searched(asked(tmp_path))
    kept = (tmp_path / "out" / "journal.jsonl").read_bytes()
    edit(tmp_path, old, new)
    with pytest.raises(UserError, match="a study goes on with the program that it was begun with") as refused:
        searched(asked(tmp_path, resume=True, trials=9))
    assert message in str(refused.value)
    assert "--accept-changes" in refused.value.fix
    assert (tmp_path / "out" / "journal.jsonl").read_bytes() == kept


def test_layout_and_comments_are_no_change_and_a_study_goes_on_alike(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = searched(asked(tmp_path / "whole", trials=9))
    searched(asked(tmp_path))
    edit(tmp_path, "PEAK = 0.3", "# where it is best\nPEAK  = 0.3")
    edit(tmp_path, "def space(trial):", 'def space(trial):\n    """What there is."""')
    resumed = searched(asked(tmp_path, resume=True, trials=9))
    assert [trial.values for trial in resumed.trials] == [trial.values for trial in whole.trials]
    assert resumed.since == 0


@pytest.mark.parametrize("sampler", ["random", "tpe", "genetic"])
def test_accepted_changes_keep_trials_apart_unless_asked(
    tmp_path: Path, sampler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    searched(asked(tmp_path, sampler=sampler))
    edit(tmp_path, "1.0 - abs", "0.5 - abs")  # worse than any before
    edit(tmp_path, 'trial.suggest_float("x", 0.0, 1.0)', 'trial.suggest_categorical("x", [0.1, 0.3])')
    result = searched(asked(tmp_path, sampler=sampler, resume=True, accept_changes=True, trials=9))
    assert [trial.number for trial in result.trials] == list(range(9))
    assert result.since == 6
    assert {trial.number for trial in result.front()} <= {6, 7, 8}
    assert result.pick().trial.number >= 6
    entries = read(tmp_path / "out" / "journal.jsonl")
    story = gather_study(entries)
    assert story is not None
    assert min(front_trials(story)) >= 6
    assert [e.record.first_trial for e in entries if isinstance(e.record, ChangesAccepted)] == [6]
    whole = Study.load(tmp_path / "out", across_changes=True)
    assert whole.pick().trial.number < 6
    text = str(explain(result))
    assert "From trial 6 on" in text
    assert "Front and pick are of the trials since; 6 trials began before" in text
    again = searched(asked(tmp_path, sampler=sampler, resume=True, trials=10))
    assert (again.since, len(again.trials)) == (6, 10), "accepted is accepted"
    if sampler == "random":
        assert main(["report", str(tmp_path / "out")]) == 0
        assert "changed from trial 6 on" in capsys.readouterr().out
        assert main(["report", str(tmp_path / "out"), "--across-changes"]) == 0
        assert f"pick    trial {whole.pick().trial.number}" in capsys.readouterr().out


def test_a_study_without_a_result_has_nothing_to_mix(tmp_path: Path) -> None:
    searched(asked(tmp_path))
    path = tmp_path / "out" / "journal.jsonl"
    path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")
    edit(tmp_path, "PEAK = 0.3", "PEAK = 0.9")
    assert searched(asked(tmp_path, resume=True)).since == 0


def test_spaces_are_compared_by_what_they_ask_for_and_return() -> None:
    def two(trial: Any) -> dict[str, Any]:
        results = {"a": trial.suggest_int("a", 1, 8, log=True), "b": trial.suggest_categorical("b", ["x", "y"])}
        return {**results, "c": 1} if results["b"] == "x" else {**results, "d": trial.suggest_float("d", 0.0, 1.0)}

    def seen(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
        return summarize_space(lambda trial: change(two(trial)), 0)

    same: Space = two
    assert space_differences(summarize_space(same, 0), seen(dict)) == []
    assert space_differences(summarize_space(same, 0), seen(lambda results: {**results, "a": results["a"] + 1})) == [
        "space: it returns another a"
    ]
    count = iter(range(10_000))
    restless = seen(lambda results: {**results, "at": next(count)})
    assert space_differences(summarize_space(same, 0), restless) == [], "what differs by itself cannot be compared"
    assert space_differences({}, restless) == []


def finished(samples: int) -> TrialFinished:
    context = RunContext(DataContext(samples, "abc", "float32[2]"), 10, "cpu", "", 1)
    return TrialFinished(0, "complete", run=RunFinished("", 1, 1, 1, 1.0, {}, context=context))


def test_a_study_expects_the_data_that_all_its_trials_had() -> None:
    def told(*samples: int) -> Any:
        study = Telling()
        for number, count in enumerate(samples):
            study.start(number, lr=0.1).tell(replace(finished(count), trial=number))
        return common_data(fold(study.entries))

    assert told(100, 100) == asdict(DataContext(100, "abc", "float32[2]"))
    assert told(100) is None, "its settings may decide it"
    assert told(100, 50) is None


@pytest.mark.parametrize("rule", [EDITED, OTHER_DATA])
def test_what_changed_meanwhile_is_no_result_of_a_trial(rule: str) -> None:
    class Event:
        job = 7
        outcome = RunFailed("user_error", str(UserError(rule, "mine.py, line 3, in train", "undo it")), 0)

    result = program_error(Event())  # type: ignore[arg-type]
    assert result is not None
    assert (result.rule, result.value) == (rule, "trial 7: mine.py, line 3, in train")
    Event.outcome = RunFailed("user_error", "something else", 0)
    assert program_error(Event()) is None  # type: ignore[arg-type]


def test_a_frontier_counts_no_training_of_before_a_change() -> None:
    study = Telling().start(0, lr=0.1).tell(finished(10)).start(1, lr=0.2).tell(replace(finished(10), trial=1))
    assert len(Trainings(fold(study.entries)).done) == 2
    study.tell(ChangesAccepted(["x"], first_trial=1))
    left = Trainings(fold(study.entries))
    assert [training.trial for training in left.done.values()] == [1]
    assert [spent.training and spent.training.trial for spent in left.searched] == [1]


TRAINED = """
import torch
from torch import nn

config = {"lr": 0.1}
objectives = {"loss": "min"}

def space(trial):
    return {"lr": trial.suggest_float("lr", 0.01, 0.1)}

def train(session):
    model = nn.Linear(2, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=session.config["lr"]))
    for _ in session.epochs(1):
        for x in session.batches(torch.ones(8, 2), 4):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    session.report(loss=1.0)
"""


def test_a_study_whose_program_is_edited_meanwhile_ends_and_goes_on_once_that_is_undone(
    tmp_path: Path, cluster: LocalCluster
) -> None:
    (tmp_path / "program.py").write_text(TRAINED)

    def edit_after_first(record: Record) -> None:
        if isinstance(record, TrialFinished) and record.trial == 0:
            (tmp_path / "program.py").write_text(TRAINED.replace("Linear(2, 1)", "Linear(2, 1, bias=False)"))

    with pytest.raises(UserError, match=f"{EDITED} .*program.py, line 12, in train"):
        tune(asked(tmp_path, trials=3), cluster=cluster, observe=edit_after_first)
    ended = [e.record for e in read(tmp_path / "out" / "journal.jsonl") if isinstance(e.record, TrialFinished)]
    assert [(each.trial, each.state) for each in ended] == [(0, "complete")]
    (tmp_path / "program.py").write_text(TRAINED)
    tuned = tune(asked(tmp_path, trials=3, resume=True), cluster=cluster)
    assert [(trial.number, trial.state) for trial in tuned.trials] == [(n, "complete") for n in range(3)]


def test_a_script_resumes_a_study_with_the_same_values_of_its_own_arguments(tmp_path: Path) -> None:
    settings = checked(asked(tmp_path, simulated=True)).plan.settings
    begun = {**settings, "arguments": ["--lr", "0.1"], "defaults": {"lr": 0.1, "resume": False}}
    entries = [Entry(0.0, StudyStarted(begun))]
    same = {**settings, "arguments": ["--resume", "--lr=0.1"], "defaults": {"lr": 0.1, "resume": True}}
    check_same_study(same, entries, "there")
    with pytest.raises(UserError, match=r"setting lr it was begun with \(got 0.2, begun with 0.1\): start the script"):
        check_same_study({**same, "defaults": {"lr": 0.2, "resume": True}}, entries, "there")
