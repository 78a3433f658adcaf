"""From a study to one file and one module: what was chosen is what was written, and rubbish is told in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.programs.assets import build, points

import elastune
from elastune.core.errors import UserError
from elastune.core.journal.records import ArtifactKept
from elastune.train.predictions import file_of
from elastune.tuning.reuse.ensemble import parse_times
from elastune.tuning.reuse.kept_models import SealedTest, SealedTestError, library
from elastune.tuning.reuse.saved_models import KEY, write_model_file


@pytest.fixture
def study(kept_study: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(kept_study, tmp_path / "study"))


def test_what_was_kept_is_in_the_journal(kept_study: Path) -> None:
    result = library(kept_study)
    assert [one.trial for one in result.candidates] == list(range(6))
    for one in result.candidates:
        assert sorted(one.artifact.predictions) == ["test", "validation"]
        assert one.artifact.size > file_of(one.folder, "test").stat().st_size


@pytest.mark.parametrize("method", ["greedy", "stacking", "uniform"])
def test_the_file_says_what_the_predictions_say(kept_study: Path, tmp_path: Path, method: Any) -> None:
    chosen_ensemble = elastune.ensemble(kept_study, members=4, method=method)
    assert sum(member.weight for member in chosen_ensemble.members) == pytest.approx(1)
    assert len(chosen_ensemble.members) <= 4
    model = elastune.load_ensemble(elastune.save_ensemble(chosen_ensemble, tmp_path / "e.safetensors"), build)
    x, y = points(100, seed=1).tensors
    with torch.no_grad():
        said = model(x)
        uncertainty_of = model.uncertainty_of(x)
    assert float((said.argmax(1) == y).double().mean()) == pytest.approx(chosen_ensemble.score)
    assert torch.allclose(uncertainty_of.outputs, said)
    assert float(uncertainty_of.aleatoric.mean()) == pytest.approx(chosen_ensemble.uncertainty.aleatoric, rel=1e-4)
    assert float(uncertainty_of.epistemic.mean()) == pytest.approx(chosen_ensemble.uncertainty.epistemic, abs=1e-5)
    assert chosen_ensemble.test is not None
    with torch.no_grad():
        unseen = points(100, seed=2)
        assert float((model(unseen.tensors[0]).argmax(1) == unseen.tensors[1]).double().mean()) == pytest.approx(
            chosen_ensemble.test.ensemble
        )


def test_what_members_of_a_setting_contribute_is_told(kept_study: Path, command_here: Callable[..., Any]) -> None:
    result = command_here("ensemble", kept_study, "--method", "uniform", "--by", "seed", "--json").json
    assert result["by"] == "seed"
    configs = {member["trial"]: member["config"]["seed"] for member in result["members"]}
    assert {trial: one["value"] for one in result["settings"] for trial in one["trials"]} == configs
    whole = sum(one["contribution"]["shapley"] for one in result["settings"])
    assert whole == pytest.approx(sum(member["contribution"]["shapley"] for member in result["members"]))
    assert "such as batch_size" in command_here("ensemble", kept_study, "--by", "inputs").line
    assert "width 8: left out" in command_here("ensemble", kept_study, "--by", "width").out


def test_greedy_is_no_worse_than_the_best_trial_where_it_chose(kept_study: Path) -> None:
    chosen_ensemble = elastune.ensemble(elastune.Study.load(kept_study))
    assert chosen_ensemble.score >= chosen_ensemble.best_single
    assert chosen_ensemble.best_single == max(t.values["accuracy"] for t in elastune.Study.load(kept_study).complete)


def test_an_inference_budget_is_kept(kept_study: Path) -> None:
    assert elastune.ensemble(kept_study, inference_budget=2.0, method="uniform").inference == 2.0
    assert len(elastune.ensemble(kept_study, inference_budget=1.0).members) == 1
    with pytest.raises(UserError, match="admits at least one model"):
        elastune.ensemble(kept_study, inference_budget=0.5)


def test_no_choice_reads_test_data(kept_study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = library(kept_study).candidates[0]
    with pytest.raises(SealedTestError):
        one.predictions("test")
    sealed = SealedTest("test")
    with pytest.raises(SealedTestError):
        sealed.of(one)
    sealed.unseal([one])
    assert len(sealed.of(one)["targets"]) == 100
    with pytest.raises(UserError, match="nothing is chosen by"):
        elastune.ensemble(kept_study, data="test")
    with pytest.raises(UserError, match="begins with 'test'"):
        elastune.ensemble(kept_study, test="validation")

    def choosing_by_test(*args: Any, **options: Any) -> np.ndarray:
        one.predictions("test")
        raise AssertionError("test data were read")

    monkeypatch.setattr("elastune.tuning.reuse.ensemble.select", choosing_by_test)
    with pytest.raises(SealedTestError):
        elastune.ensemble(kept_study)


def test_what_test_data_say_changes_no_choice(study: Path) -> None:
    before = elastune.ensemble(study)
    for one in library(study).candidates:
        file_of(one.folder, "test").unlink()
    with pytest.raises(UserError, match=r"test\.safetensors"):
        elastune.ensemble(study)
    without = elastune.ensemble(study, test="test_other")
    assert [(m.trial, m.weight) for m in without.members] == [(m.trial, m.weight) for m in before.members]
    assert without.test is None


def damaged(study: Path, how: str) -> None:
    first = library(study).candidates[0]
    file = file_of(first.folder, "validation")
    match how:
        case "predictions cut":
            file.write_bytes(file.read_bytes()[:-5])
        case "predictions gone":
            file.unlink()
        case "predictions of another model":
            shutil.copy(file_of(library(study).candidates[1].folder, "validation"), file)
        case "weights damaged":
            for tensors in first.checkpoint.glob("*.safetensors"):
                tensors.write_bytes(b"rubbish")
        case "journal leads outside":
            journal = study / "journal.jsonl"
            journal.write_text(journal.read_text().replace('"trials/00000/', '"../../etc/'))
        case "nothing kept":
            lines = (study / "journal.jsonl").read_text().splitlines()
            left = [line for line in lines if '"artifact_kept"' not in line]
            (study / "journal.jsonl").write_text("".join(f"{line}\n" for line in left))


@pytest.mark.parametrize(
    "how",
    [
        "predictions cut",
        "predictions gone",
        "predictions of another model",
        "weights damaged",
        "journal leads outside",
        "nothing kept",
    ],
)
def test_a_damaged_study_is_told_in_one_line(study: Path, how: str, command_here: Callable[..., Any]) -> None:
    damaged(study, how)
    result = command_here("ensemble", str(study))
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "options",
    [
        ("--members", "0"),
        ("--objective", "mse"),
        ("--objective", "nonsense"),
        ("--inference-budget", "x"),
        ("--inference-budget", "0x"),
        ("--data", "test"),
        ("--data", "other"),
        ("--method", "magic"),
        ("--seed", "-1"),
        ("--test", "validation"),
        ("--out", "/nowhere/at/all/e.safetensors"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    kept_study: Path, options: tuple[str, str], command_here: Callable[..., Any]
) -> None:
    result = command_here("ensemble", str(kept_study), *options)
    assert (result.code, result.err.count("\n")) == (2, 1)


def test_the_command_tells_and_writes(study: Path, tmp_path: Path, command_here: Callable[..., Any]) -> None:
    file = tmp_path / "e.safetensors"
    result = command_here("ensemble", str(study), "--members", "3", "--out", str(file))
    assert result.code == 0
    for words in ("read after the choice", "disagreement", "epistemic", "Shapley"):
        assert words in result.out
    data = json.loads(command_here("ensemble", str(study), "--members", "3", "--json").out)
    with safe_open(file, "pt") as opened:
        written = json.loads(opened.metadata()[KEY])
    assert [(m["trial"], m["weight"]) for m in data["members"]] == [
        (m["trial"], m["weight"]) for m in written["members"]
    ]


def test_rubbish_is_no_ensemble(kept_study: Path, tmp_path: Path) -> None:
    file = elastune.save_ensemble(elastune.ensemble(kept_study), tmp_path / "e.safetensors")
    with safe_open(file, "pt") as opened:
        data = json.loads(opened.metadata()[KEY])
        tensors = {name: opened.get_tensor(name) for name in list(opened.keys())}
    bad = tmp_path / "bad.safetensors"

    def refused(build: Callable[[dict[str, Any]], Any] = build) -> str:
        with pytest.raises(UserError) as error:
            elastune.load_ensemble(bad, build)
        return str(error.value)

    refused()
    bad.write_bytes(b"\xff" * 100)
    refused()
    bad.write_bytes(file.read_bytes()[:-10])
    refused()
    save_file(tensors, bad, {KEY: json.dumps(data)})  # as it was, but for the digest
    assert "an ensemble" in refused()
    for change in (
        {"members": []},
        {"width": "three"},
        {"format": 3},
        {"more": 1},
        {"members": [{**data["members"][0], "weight": 0.2}]},
        {"members": [{**data["members"][0], "weight": float("nan")}]},
    ):
        write_model_file(bad, {**data, **change}, tensors)
        refused()
    shutil.copy(file, bad)
    assert "names" not in refused(lambda config: torch.nn.Linear(2, 3))
    assert "torch.nn.Module" in refused(lambda config: "a model")


def test_a_study_tells_what_it_has_kept_and_how_much_that_is(
    kept_study: Path, command_here: Callable[..., Any]
) -> None:
    result = command_here("report", str(kept_study), "--json").json["kept"]
    assert [one["trial"] for one in result] == list(range(6))
    assert all(one["size"] > 1000 for one in result)
    assert "kept    6 trials, 6 of them with predictions: " in command_here("report", str(kept_study)).out


def test_times_are_read() -> None:
    assert [parse_times(text) for text in ("4x", "1.5x", "2")] == [4.0, 1.5, 2.0]


def test_an_artifact_says_its_size() -> None:
    assert ArtifactKept(0, 1, "trials/00000/checkpoints/step-0000000001", "x").size == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--keep", "most"),
        ("--keep", "all", "--keep-size", "much"),
        ("--keep", "all", "--keep-size", "0MB"),
        ("--keep-size", "1GB"),
        ("--keep", "front", "--stopping", "pbt"),
    ],
)
def test_a_study_that_cannot_keep_so_is_refused_before_it_begins(
    tmp_path: Path, options: tuple[str, ...], command_here: Callable[..., Any]
) -> None:
    program, out = Path(__file__).parents[2] / "programs" / "assets.py", tmp_path / "out"
    assert command_here("tune", program, "--trials", "1", "--out", out, *options).line
    assert not out.exists()


class Extra(torch.nn.Sequential):
    """Has a state that is no tensor, such as some layers of lower precision have."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        raise AssertionError("no file has one")


def test_a_state_that_is_no_tensor_is_not_in_the_file(kept_study: Path, tmp_path: Path) -> None:
    file = elastune.save_ensemble(elastune.ensemble(kept_study, members=2), tmp_path / "e.safetensors")
    plain, extra = (elastune.load_ensemble(file, made) for made in (build, lambda config: Extra(*build(config))))
    x = points(4, seed=3).tensors[0]
    assert torch.equal(plain(x), extra(x))
