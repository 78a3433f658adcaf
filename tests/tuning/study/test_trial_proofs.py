"""A study proves the first step once for each kind of loss, notes it, and ends at a certain mistake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import (
    ChangesAccepted,
    Proved,
    RunFailed,
    TrialFinished,
    TrialPaused,
    TrialProved,
    TrialStarted,
)
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.train.proof.first_step import APART, MISTAKES, SUMMED
from elastune.tuning.study.budget import program_error
from elastune.tuning.study.experiment import TrialProofs, kind_of
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

PROGRAM = """
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

config = {"lr": 0.1, "reduction": "mean"}
objectives = {"loss": "min"}
X = torch.arange(160.0).reshape(40, 4).sin()
DATA = TensorDataset(X, (X.sum(1) > 0).long())

def space(trial):
    return {"lr": trial.suggest_float("lr", 0.1, 0.2)}

def train(session):
    model = torch.nn.Linear(4, 2)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=session.config["lr"]))
    for _ in session.epochs(1):
        for x, y in session.batches(DATA, 8):
            loss = F.cross_entropy(model(x), y, reduction=session.config["reduction"])
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        session.report(loss=loss.item())
"""
EXACT = ExecutionSettings(num_slots=2)
FIRST = Proved("first_step", "mean", 0.05)


def asked(folder: Path, **more: Any) -> StudyRequest:
    path = folder / "program.py"
    path.write_text(PROGRAM)
    settings = {"sampler": "random", "trials": 2, "workers": 1, "execution": EXACT, **more}
    return StudyRequest(Program(path), folder / "out", **settings)


def spec(execution: ExecutionSettings = EXACT, **config: Any) -> RunSpec:
    return RunSpec(Program(Path("none.py")), Path("out"), config, execution=execution)


def started(trial: int, workers: int = 1, **config: Any) -> TrialStarted:
    return TrialStarted(trial, config, {"workers": workers}, 0)


# --- in the study ---


def test_one_trial_proves_for_all_also_after_a_resume(tmp_path: Path) -> None:
    tune(asked(tmp_path))
    tune(asked(tmp_path, trials=3, resume=True))
    records = [entry.record for entry in read(tmp_path / "out" / "journal.jsonl")]
    assert sum(isinstance(each, TrialFinished) for each in records) == 3
    (proved,) = [each for each in records if isinstance(each, TrialProved)]
    assert (proved.trial, proved.proof.proof) == (0, "first_step")


@pytest.mark.soak
def test_a_sum_ends_a_study_and_unchecked_goes_on(tmp_path: Path) -> None:
    summed = {"reduction": "sum"}
    with pytest.raises(UserError, match=rf"{SUMMED} \(got trial 0: program.py:19: twice .*--unchecked"):
        tune(asked(tmp_path, config=summed))
    records = [entry.record for entry in read(tmp_path / "out" / "journal.jsonl")]
    assert not any(isinstance(each, TrialFinished) for each in records), "the mistake is no result of a trial"
    study = tune(asked(tmp_path, config=summed, trials=1, resume=True, unchecked=True))
    assert [trial.state for trial in study.trials] == ["complete"]


@pytest.mark.parametrize("rule", [SUMMED, APART])
def test_a_mistake_of_the_program_is_no_result_of_a_trial(rule: str) -> None:
    class Event:
        job = 3
        outcome = RunFailed("user_error", str(UserError(rule, "mine.py:4", MISTAKES[rule])), 0)

    error = program_error(Event())  # type: ignore[arg-type]
    assert error is not None
    assert error.parts[:3] == (rule, "trial 3: mine.py:4", MISTAKES[rule])


# --- which trial proves ---


def test_a_trial_is_asked_once_and_another_where_it_proved_nothing() -> None:
    proofs = TrialProofs()
    assert proofs.wanted(0, spec(lr=0.1))
    proofs.observe(started(0, lr=0.1))
    assert not proofs.wanted(1, spec(lr=0.2)), "trial 0 is at it"
    proofs.observe(TrialFinished(0, "infeasible"))
    assert proofs.wanted(2, spec(lr=0.2))
    proofs.observe(started(2, lr=0.2))
    proofs.observe(TrialPaused(2, 0, 0.0, 0.0))
    assert proofs.wanted(3, spec(lr=0.3))
    proofs.observe(started(3, lr=0.3))
    proofs.observe(TrialProved(3, FIRST))
    proofs.observe(TrialFinished(3, "complete"))
    assert not proofs.wanted(4, spec(lr=0.4))
    proofs.observe(ChangesAccepted(["program.py, line 3, in train"], first_trial=5))
    assert proofs.wanted(5, spec(lr=0.4)), "it is another program"


def test_a_text_or_a_switch_may_choose_another_loss_and_several_workers_say_more() -> None:
    proofs = TrialProofs()
    proofs.observe(started(0, lr=0.1, loss="focal", smooth=False))  # the journal of an earlier controller
    proofs.observe(TrialProved(0, FIRST))
    two = replace(EXACT, workers=2)
    assert not proofs.wanted(1, spec(lr=0.2, loss="focal", smooth=False))
    for number, other in enumerate(({"loss": "mean", "smooth": False}, {"loss": "focal", "smooth": True}), start=2):
        assert proofs.wanted(number, spec(lr=0.2, **other))
    assert proofs.wanted(4, spec(two, lr=0.2, loss="focal", smooth=False))
    proofs.observe(started(4, workers=2, loss="plain"))
    proofs.observe(TrialProved(4, FIRST))
    assert kind_of({"a": {"b": [1, "x"]}}, 1) == kind_of({"a": {"b": [2.5, "x"]}}, 1)
    assert kind_of({"a": {"b": [1, "x"]}}, 1) != kind_of({"a": {"b": [1, "y"]}}, 1)
    assert kind_of({"a": None}, 1) != kind_of({"a": 1}, 1)


def test_a_trial_whose_batches_nobody_shares_proves_nothing() -> None:
    alone, fast = ExecutionSettings(), ExecutionSettings(mode="fast")
    assert [spec(each).shares_batches for each in (alone, fast, replace(fast, num_slots=4))] == [False, False, False]
    assert [spec(each).shares_batches for each in (EXACT, replace(fast, workers=2))] == [True, True]
    assert replace(spec(fast), elastic=Elastic(1, 4)).shares_batches
    assert not TrialProofs().wanted(0, spec(alone))
    assert not TrialProofs(unchecked=True).wanted(0, spec())
