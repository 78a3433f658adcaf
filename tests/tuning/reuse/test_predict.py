"""Kept trials are asked about data sets after the search: what they say is what the session would have kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs.assets import build, points

import elastune
from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter, read
from elastune.core.journal.folds import fold
from elastune.core.journal.records import (
    ArtifactKept,
    Entry,
    PredictionsAdded,
    StudyFinished,
    TrialFinished,
    TrialStarted,
)
from elastune.train.predictions import file_of
from elastune.tuning.reuse.kept_models import fill, library, weights_of
from elastune.tuning.reuse.predictions import ModelHooks

PROGRAM = (Path(__file__).parents[2] / "programs" / "assets.py").read_text()


@pytest.fixture
def study(kept_study: Path, tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return Path(shutil.copytree(kept_study, tmp_path / "study"))


def program(tmp_path: Path, body: str) -> Path:
    """A file with other hooks."""
    file = tmp_path / "other.py"
    file.write_text(f"{PROGRAM}\n\n{body}\n")
    return file


def test_what_is_asked_later_is_what_the_session_kept(study: Path) -> None:
    before = {one.trial: one.predictions("validation") for one in library(study).candidates}
    loaded = elastune.Study.load(study).predict(["validation"], again=True)
    assert [(one.trial, one.rows) for one in loaded] == [(number, 100) for number in range(6)]
    for one in library(study).candidates:
        now = one.predictions("validation")  # by the digest that the journal has now
        assert torch.equal(now["targets"], before[one.trial]["targets"])
        assert torch.allclose(now["outputs"], before[one.trial]["outputs"], atol=1e-6)


def test_new_data_can_judge_an_ensemble(study: Path, command_here: Callable[..., Any]) -> None:
    seconds = elastune.Study.load(study).seconds
    result = command_here("predict", study, "--data", "test_later", "--json")
    assert [one["rows"] for one in result.json["predictions"]] == [30] * 6
    again = command_here("predict", study, "--data", "test_later")
    assert again.out.count("is there already") == 6
    x, y = points(30, seed=3).tensors
    one = library(study).candidates[2]
    model = build(one.config)
    fill(model, weights_of(one), "of trial 2")
    assert torch.allclose(one.read("test_later")["outputs"], model(x))
    assert torch.equal(one.read("test_later")["targets"], y)
    loaded = elastune.Study.load(study).ensemble(members=3, test="test_later")
    assert loaded.test is not None
    assert (loaded.test.data, loaded.test.rows) == ("test_later", 30)
    assert loaded.to_json() == elastune.ensemble(study, members=3, test="test_later").to_json()
    assert elastune.Study.load(study).seconds == seconds, "it takes none of the study's time"
    assert one.artifact.size == sum(file.stat().st_size for file in one.folder.rglob("*") if file.is_file())


def test_only_the_trials_that_are_named_are_asked(study: Path) -> None:
    assert [one.trial for one in elastune.predict(study, ["test_later"], trials=[4, 1])] == [4, 1]
    assert [one.trial for one in library(study).candidates if "test_later" in one.artifact.predictions] == [1, 4]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data", "unknown"), "knows the data set"),
        (("--data", "No Name!"), "small letters"),
        (("--data", "test_later", "--trials", "77"), "choose among"),
        (("--data", "test_later", "--trials", "x"), "--trials 1,4,7"),
        (("--data", "test_later", "--program", "/no/such.py"), "existing Python file"),
    ],
)
def test_wrong_questions_are_told_in_one_line(
    study: Path, options: tuple[str, ...], words: str, command_here: Callable[..., Any]
) -> None:
    result = command_here("predict", study, *options)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert words in result.err


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("predict = None", "has predict (got"),
        ("def predict(model, name): return 1", "gives outputs and targets"),
        ("def predict(model, name): return torch.zeros(3, 3), torch.zeros(2)", "a row for each sample"),
        ("def predict(model, name): raise RuntimeError('no disk')", "RuntimeError: no disk (other.py:"),
        ("def predict(model, name): raise SystemExit(3)", "sys.exit(3)"),
        ("def build(config): return nn.Linear(2, 2)", "tensor for tensor"),
        ("def build(config): return 'model'", "torch.nn.Module"),
    ],
)
def test_hooks_that_cannot_be_used_are_refused(study: Path, tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        elastune.predict(study, ["test_later"], program=program(tmp_path, body))
    assert words in str(error.value)
    assert not file_of(study / "trials" / "00000", "test_later").exists()


def test_a_file_with_hooks_alone_will_do(study: Path, tmp_path: Path) -> None:
    file = tmp_path / "hooks.py"
    file.write_text("from tests.programs.assets import build, predict\n")
    assert elastune.predict(study, ["test_later"], trials=[3], program=file)[0].rows == 30


def test_outputs_that_are_no_numbers_are_told_and_left_out(study: Path, tmp_path: Path) -> None:
    file = program(tmp_path, "def predict(model, name): return torch.full((3, 3), torch.nan), torch.zeros(3).long()")
    prediction = elastune.predict(study, ["test_later"], trials=[0], program=file)
    assert [(one.rows, one.reason) for one in prediction] == [(0, "the model's outputs are not finite")]


def test_a_program_that_trains_otherwise_by_now_is_not_taken_for_the_study_s(study: Path, tmp_path: Path) -> None:
    journal, changed = study / "journal.jsonl", tmp_path / "assets.py"
    changed.write_text(PROGRAM.replace("nn.Tanh()", "nn.ReLU()"))
    original = str(Path(__file__).parents[2] / "programs" / "assets.py")
    journal.write_text(journal.read_text().replace(original, str(changed)))
    with pytest.raises(UserError, match="has changed"):
        elastune.predict(study, ["test_later"])


def test_nobody_is_asked_while_the_study_runs_or_beyond_its_bound(study: Path) -> None:
    journal = study / "journal.jsonl"
    with JournalWriter(journal), pytest.raises(UserError, match="one writer"):
        elastune.predict(study, ["test_later"])
    size = sum(one.artifact.size for one in library(study).candidates)
    journal.write_text(journal.read_text().replace('"keep_bytes":null', f'"keep_bytes":{size + 100}'))
    with pytest.raises(UserError, match="--keep-size"):
        elastune.predict(study, ["test_later"])


def test_what_is_asked_again_takes_the_place_of_what_was_there(study: Path) -> None:
    """In a study that is as large as it may be."""
    elastune.predict(study, ["test_later"])
    size, journal = sum(one.artifact.size for one in library(study).candidates), study / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"keep_bytes":null', f'"keep_bytes":{size}'))
    assert [one.rows for one in elastune.predict(study, ["validation"], again=True)] == [100] * 6
    assert sum(one.artifact.size for one in library(study).candidates) == size


def test_what_is_told_later_takes_no_time_of_the_study() -> None:
    records = [
        TrialStarted(0, {}, {}, seed=0),
        TrialFinished(0, "complete"),
        ArtifactKept(0, 1, "trials/00000/checkpoints/step-0000000001", "x", size=5),
        StudyFinished("complete", 3.0),
    ]
    entries = [Entry(float(at), record) for at, record in enumerate(records)]
    late = [Entry(1e6, PredictionsAdded(0, "test", 3, 9, "y")), Entry(1e6, PredictionsAdded(7, "test", 3, 9, "y"))]
    table = fold([*entries, *late])
    assert table.seconds == fold(entries).seconds == 3.0
    assert table.artifacts == {0: ArtifactKept(0, 1, records[2].path, "x", size=9, predictions={"test": "y"})}


def test_hooks_run_without_gradients(tmp_path: Path) -> None:
    seen = []
    hooks = ModelHooks(tmp_path, build, lambda model, name: seen.append(torch.is_grad_enabled()))
    assert hooks.predictions(build({"seed": 0, "width": 3, "norm": False}), "x") is None
    assert seen == [False]


def test_the_journal_can_be_read_as_it_stands(study: Path) -> None:
    elastune.predict(study, ["test_later"], trials=[0])
    last = read(study / "journal.jsonl")[-1].record
    assert isinstance(last, PredictionsAdded)
    assert json.loads((study / "journal.jsonl").read_text().splitlines()[-1])["kind"] == "predictions_added"
