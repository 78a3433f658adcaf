"""Members of an ensemble that differ in what they are shown: trained where they are lacking, told by each view."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.programs.shown import build, points

import elastune
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import TrialStarted
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.reuse.ensemble import contributions
from elastune.tuning.reuse.predictions import SCORES, Judged, Task
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

PROGRAM = Path(__file__).parents[2] / "programs" / "shown.py"
SHOWN = ["first", "second", "first+second"]


@pytest.fixture(scope="module")
def searched(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trials that were shown everything, of which one is kept. Nothing may be changed in it."""
    out = tmp_path_factory.mktemp("searched") / "out"
    asked = StudyRequest(Program(PROGRAM), out, sampler="random", trials=2, workers=2, keep="best", patience=9)
    tune(asked, cluster=cluster)
    return out


@pytest.fixture
def study(searched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(searched, tmp_path / "study"))


def begun(out: Path, phase: str) -> list[TrialStarted]:
    told = [entry.record for entry in read(out / "journal.jsonl")]
    return [one for one in told if isinstance(one, TrialStarted) and one.phase == phase]


def test_what_is_lacking_is_trained_once_and_told_by_view(
    study: Path, cluster: LocalCluster, tmp_path: Path, command_here: Callable[..., Any]
) -> None:
    asked = ("ensemble", study, "--vary", f"inputs={','.join(SHOWN)}", "--each", "2", "--method", "uniform", "--json")
    told = command_here(*asked).json
    trained = begun(study, "member")
    assert [one.config["inputs"] for one in trained] == [["first"]] * 2 + [["second"]] * 2 + [["first", "second"]] * 2
    tried = {one.config["lr"] for one in begun(study, "search")}
    assert {one.config["lr"] for one in trained} == tried
    assert len(elastune.Study.load(study).kept) == 7, "whatever --keep the search had"
    assert told["by"] == "inputs"
    worth = {one["value"]: one["contribution"]["left_out"] for one in told["settings"]}
    assert set(worth) == {"first", "second", "noise"}, "the one that the search has kept was shown all"
    needs = {one["value"]: len(one["trials"]) for one in told["settings"]}
    assert needs == {"first": 5, "second": 5, "noise": 1}
    assert worth["first"] > 0.1 < worth["second"]
    assert abs(worth["noise"]) < 0.1
    said = command_here(*asked[:-1]).out
    assert len(begun(study, "member")) == 6, "they are there"
    assert "inputs first: left out +" in said

    model = elastune.load_ensemble(elastune.save_ensemble(elastune.ensemble(study), tmp_path / "e"), build)
    assert model(points(5, 1).tensors[0]).shape == (5, 4)
    resumed = tune(
        StudyRequest(Program(PROGRAM), study, sampler="random", trials=3, workers=2, resume=True), cluster=cluster
    )
    assert sorted(trial.number for trial in resumed.trials if trial.phase == "search") == [0, 1, 8]


def test_one_that_failed_is_told_and_not_tried_again(
    cluster: LocalCluster, tmp_path: Path, command_here: Callable[..., Any]
) -> None:
    asked = StudyRequest(Program(PROGRAM), tmp_path / "out", sampler="random", trials=1, keep="all")
    config: dict[str, Any] = {"fails": "second"}
    tune(replace(asked, config=config), space=lambda trial: {"inputs": ["first", "noise"]}, cluster=cluster)
    for _ in range(2):
        said = command_here("ensemble", asked.out, "--vary", "inputs=first,second")
        assert said.code == 0
        assert "trial 2 (inputs=['second']) failed: " in said.err
        assert "as it was asked to" in said.err
        assert len(begun(asked.out, "member")) == 2
        assert "inputs first: left out" in said.out
    assert "failed" not in command_here("ensemble", asked.out, "--vary", "inputs=first,noise").err, "of other values"


def test_workers_flow_among_them(study: Path, cluster: LocalCluster) -> None:
    """Nobody else wants them."""
    found = elastune.train_members(study, {"seed": [0, 1]}, workers=2, trial_workers=(1, 2), cluster=cluster)
    (trained,) = begun(study, "member")
    assert trained.config["seed"] == 1, "one with seed 0 was kept"
    assert trained.config["inputs"] == ["first", "second", "noise"]
    assert max(span.workers for span in found.spans if span.trial == trained.trial) == 2


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        ("inputs=first,third", "a view is one that the program names.*'third'.*use first, second, noise"),
        ("inputs=first", "differ in two values.*such as inputs=temperature,pressure"),
        ("inputs=first,first", "differ in two values"),
        ("inputs=first,", "a view is one that the program names"),
        ("inputs=first+first,second", "a list of views, each once"),
        ("inputs", "--vary is SETTING=VALUE,VALUE"),
        ("shown=first,second", "a setting in the program's config.*'shown'.*name one of epochs, fails, inputs"),
        ("seed=1", "differ in two values"),
        (f"seed={','.join(map(str, range(1001)))}", "at most 1000 combinations"),
    ],
)
def test_what_cannot_vary_is_told_in_one_line(
    searched: Path, vary: str, words: str, command_here: Callable[..., Any]
) -> None:
    assert re.search(words, command_here("ensemble", searched, "--vary", vary).line)


def test_options_of_training_are_of_what_varies(searched: Path, command_here: Callable[..., Any]) -> None:
    for more in (("--workers", "2"), ("--each", "2"), ("--cluster", "slurm")):
        assert "no --vary" in command_here("ensemble", searched, *more).line
    assert "at least 1" in command_here("ensemble", searched, "--vary", "seed=1,2", "--each", "0").line


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--members", "0"), "at least 1"),
        (("--objective", "speed"), "a known score"),
        (("--inference-budget", "0x"), "a positive number of times"),
        (("--data", "test"), "nothing is chosen by data"),
        (("--test", "validation"), "data that judge a choice"),
        (("--method", "best"), "a known method"),
        (("--out", "nowhere/ensemble"), "a folder that is there"),
        (("--workers", "0"), "at least 1"),
    ],
)
def test_nothing_is_trained_for_a_choice_that_cannot_be_made(
    study: Path, more: tuple[str, ...], words: str, command_here: Callable[..., Any]
) -> None:
    assert words in command_here("ensemble", study, "--vary", "inputs=first,second", *more).line
    assert not begun(study, "member")


def test_a_program_without_views_is_told_how_to_name_them(tmp_path: Path, cluster: LocalCluster) -> None:
    """And so is one that is not what the study was begun with."""
    file = tmp_path / "shown.py"
    text = PROGRAM.read_text().replace("views = {", "named = {").replace("list(views)", '["first"]')
    file.write_text(text.replace("elastune.InputView(views", "elastune.InputView(named"))
    asked = StudyRequest(Program(file), tmp_path / "out", sampler="random", trials=1, keep="all")
    tune(asked, cluster=cluster)
    with pytest.raises(UserError, match=r"names its views.*none in .*shown.py.*such as views = \{"):
        elastune.train_members(asked.out, {"inputs": ["first", "second"]})
    file.write_text(text + "\nWIDTH = 3\n")
    with pytest.raises(UserError, match="has changed"):
        elastune.train_members(asked.out, {"inputs": ["first", "second"]})


def test_a_simulated_study_trains_nothing() -> None:
    with pytest.raises(UserError, match="not simulated"):
        StudyRequest.of_settings({"kind": "tune", "simulated": True}, Path("out"))


def test_a_request_is_what_the_journal_says_it_was(searched: Path) -> None:
    told = read(searched / "journal.jsonl")[0].record
    found = StudyRequest.of_settings(told.settings, searched)  # type: ignore[union-attr]
    asked = StudyRequest(
        Program(PROGRAM), searched, objectives={"accuracy": "max"}, sampler="random", trials=2, workers=2
    )
    assert found == replace(asked, keep="best", patience=9, resume=True)


def test_a_view_lets_its_columns_through() -> None:
    views = {"a": [0, 1], "b": [3]}
    x = torch.arange(8.0).reshape(2, 4)
    view = elastune.InputView(views, ["b", "a"])
    assert view.width == 3
    assert torch.equal(view(x), x[:, [3, 0, 1]])
    assert not view.state_dict()
    assert torch.equal(elastune.InputView({"top": [0], "bottom": [1]}, ["top"], dim=0)(x), x[:1])


@pytest.mark.parametrize(
    ("views", "shown"),
    [
        (None, ["a"]),
        ({}, ["a"]),
        ({"a": []}, ["a"]),
        ({"a": [-1]}, ["a"]),
        ({"a": [True]}, ["a"]),
        ({"a,b": [0]}, ["a,b"]),
        ({1: [0]}, [1]),
        ({"a": "01"}, ["a"]),
        ({"a": [0]}, []),
        ({"a": [0]}, "a"),
        ({"a": [0]}, ["a", "a"]),
        ({"a": [0]}, ["b"]),
        ({"a": [0]}, [["a"]]),
    ],
)
def test_what_is_no_view_is_refused(views: Any, shown: Any) -> None:
    with pytest.raises(UserError, match="view"):
        elastune.InputView(views, shown)


def test_a_member_is_there_once_all_that_it_needs_is() -> None:
    """One member needs both players, the other the second alone; the first one is right, the other never is."""
    right = np.array([0, 1] * 10)
    good = np.eye(2)[right]
    judged = Judged(Task("classification", "probabilities", 2), np.stack([good, 1 - good]), right)
    first, second = contributions(judged, np.array([0.9, 0.1]), SCORES["accuracy"], players=[[0], [0, 1]])
    assert (first.left_out, second.left_out) == (1.0, 0.5)
    # Orders: first, second: 0 (nobody is there), then 0.5; second, first: -0.5 (the wrong one), then 1.
    assert (first.shapley, second.shapley) == (0.5, 0.0)
