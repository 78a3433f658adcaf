"""Means of weights: of those alone that began with the same ones, equal to plain sums, never worse than the best."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs.assets import build, points
from torch import nn

import elastune
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.folds import Training, fold, training_in, training_of
from elastune.core.journal.records import Entry, StudyStarted, TrialStarted, TrialStartedFrom
from elastune.core.run import Program, RunSpec, StartFrom
from elastune.parallel.mechanisms.tensor_storage import whole
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.checkpoints.start_from import start_from
from elastune.tuning.reuse.kept_models import library
from elastune.tuning.reuse.soup import ancestor, estimate_batch_norm, fresh_statistics
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

ASSETS = Path(__file__).parents[2] / "programs" / "assets.py"
NORM = {"norm": True, "epochs": 1}


@pytest.fixture(scope="module")
def family(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four trials with BatchNorm that began with one run's weights."""
    parent, out = (tmp_path_factory.mktemp("family") / name for name in ("parent", "out"))
    run_job(RunSpec(Program(ASSETS), parent, dict(NORM)), cluster=cluster)
    begins = StartFrom(parent)
    tune(
        StudyRequest(
            Program(ASSETS),
            out,
            sampler="random",
            trials=4,
            workers=2,
            keep="all",
            config=dict(NORM),
            start_from=begins,
        ),
        space=lambda trial: {"lr": trial.suggest_float("lr", 0.001, 0.1, log=True)},
        cluster=cluster,
    )
    return out


def accuracy(model: nn.Module) -> float:
    x, y = points(100, seed=1).tensors
    return float((model(x).argmax(1) == y).double().mean())


def batches() -> list[torch.Tensor]:
    return list(points(200, seed=0).tensors[0].split(40))


def mean_of(study: Path, trials: list[int]) -> nn.Module:
    """The plain way."""
    known = {one.trial: one for one in library(study).candidates}
    states = [{n: whole(t) for n, t in known[trial].weights().items()} for trial in trials]
    model = build({**known[trials[0]].config})
    model.load_state_dict({name: sum(s[name].double() for s in states) / len(states) for name in states[0]})
    if len(trials) > 1:
        estimate_batch_norm(model, batches())
    return model.eval()


def test_a_uniform_soup_is_the_mean(family: Path) -> None:
    found = elastune.soup(family, build, accuracy, how="uniform", batches=batches)
    assert sorted(found.trials) == [0, 1, 2, 3]
    plain = mean_of(family, list(found.trials)).state_dict()
    for name, tensor in found.model.state_dict().items():
        assert torch.allclose(tensor, plain[name]), name


def test_a_loaded_study_makes_a_soup(family: Path) -> None:
    made = elastune.Study.load(family).soup(how="uniform")
    assert sorted(made.soup.trials) == [0, 1, 2, 3]


def test_a_greedy_soup_adds_what_does_no_harm(family: Path) -> None:
    found = elastune.soup(family, build, accuracy, batches=batches)
    singles = {trial: accuracy(mean_of(family, [trial])) for trial in range(4)}
    assert found.singles == singles
    assert found.score >= max(singles.values())
    assert found.score == accuracy(found.model)
    order = sorted(singles, key=lambda trial: (-singles[trial], trial))
    chosen, best = order[:1], singles[order[0]]
    for trial in order[1:]:
        if (tried := accuracy(mean_of(family, [*chosen, trial]))) >= best:
            chosen, best = [*chosen, trial], tried
    assert (list(found.trials), found.score) == (chosen, best)


def test_a_soup_is_a_source_of_weights(family: Path, tmp_path: Path) -> None:
    found = elastune.soup(family, build, accuracy, batches=batches)
    file, other = found.save(tmp_path / "soup.safetensors"), build({**library(family).candidates[0].config, "seed": 9})
    assert start_from(other, StartFrom(file)).fresh == {}
    assert accuracy(other.eval()) == found.score
    with pytest.raises(UserError, match="a folder that is there"):
        found.save(tmp_path / "none" / "soup.safetensors")


def test_models_that_began_apart_are_not_averaged(kept_study: Path) -> None:
    with pytest.raises(UserError, match="began with initial values of their own"):
        elastune.soup(kept_study, build, accuracy)
    with pytest.raises(UserError, match="the mean of several trials"):
        elastune.soup(kept_study, build, accuracy, trials=[2])


def offspring(parent: Path, out: Path, cluster: LocalCluster, seeds: list[int], **more: Any) -> Path:
    """Two trials that take ``parent``'s weights, with these initial values for the rest."""
    config = {"epochs": 1, **more.pop("config", {})}

    def space(trial: Any) -> dict[str, Any]:
        nth = trial.suggest_categorical("nth", [0, 1])
        return {"seed": seeds[nth], "lr": 0.01 * (1 + nth)}

    asked = StudyRequest(Program(ASSETS), out, sampler="grid", trials=2, workers=2, keep="all", config=config, **more)
    tune(asked, space=space, cluster=cluster)
    return out


@pytest.fixture(scope="module")
def plain(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without BatchNorm, to begin with."""
    out = tmp_path_factory.mktemp("plain") / "parent"
    run_job(RunSpec(Program(ASSETS), out, {"epochs": 1}), cluster=cluster)
    return out


def test_a_family_with_heads_of_their_own_is_not_averaged(plain: Path, cluster: LocalCluster, tmp_path: Path) -> None:
    begins = StartFrom(plain, fresh=("2.*",))
    out = offspring(plain, tmp_path / "out", cluster, [3, 4], start_from=begins)
    with pytest.raises(UserError, match=r"began with 2\.weight of their own") as error:
        elastune.soup(out, build, accuracy)
    assert "train that first" in str(error.value)
    out = offspring(plain, tmp_path / "alike", cluster, [3, 3], start_from=begins)
    assert elastune.soup(out, build, accuracy, how="uniform").ancestor.startswith(str(plain)), "fresh, and yet the same"


def test_trials_that_take_weights_by_themselves_are_a_family(
    plain: Path, cluster: LocalCluster, tmp_path: Path
) -> None:
    out = offspring(plain, tmp_path / "out", cluster, [3, 4], config={"source": str(plain)})
    found = elastune.soup(out, build, accuracy, how="uniform")
    assert (sorted(found.trials), found.ancestor.startswith(str(plain))) == ([0, 1], True)
    apart = offspring(plain, tmp_path / "apart", cluster, [3, 4], config={"source": str(plain), "fresh": ["0.*"]})
    with pytest.raises(UserError, match=r"began with 0\.weight of their own"):
        elastune.soup(apart, build, accuracy)


def test_a_study_from_before_trials_told_what_they_took(family: Path) -> None:
    """Nothing that was to be fresh: one family. Else nobody knows."""
    entries = [entry for entry in read(family / "journal.jsonl") if not isinstance(entry.record, TrialStartedFrom)]
    assert "parent" in ancestor(fold(entries), entries, [0, 1])
    for entry in entries:
        if isinstance(entry.record, StudyStarted):
            entry.record.settings["start_from"]["fresh"] = ["3.*"]
    with pytest.raises(UserError, match=r"began with 3\.\* of their own"):
        ancestor(fold(entries), entries, [0, 1])


def test_what_was_begun_with_is_in_the_training_of_what_came_of_it(family: Path) -> None:
    entries = read(family / "journal.jsonl")
    table = fold(entries)
    (told,) = table.trials[0].initial_weights
    before = training_in(Path(told.source))
    assert before is not None
    assert (told.worker_seconds, before.unrecorded) == (before.worker_seconds, ())
    assert before.worker_seconds > 0
    own = [table.trials[trial].worker_seconds for trial in (0, 1)]
    assert training_of(entries, table, [0, 1]) == Training(sum(own) + before.worker_seconds), "the parent's once"
    child = training_in(family / "trials" / "00001")
    assert child == Training(own[1] + before.worker_seconds)


def test_statistics_of_batches_are_needed(family: Path) -> None:
    with pytest.raises(UserError, match="estimated anew"):
        elastune.soup(family, build, accuracy)
    with pytest.raises(UserError, match="at least one batch"):
        elastune.soup(family, build, accuracy, batches=list)


@pytest.mark.parametrize("options", [{"how": "thick"}, {"direction": "up"}, {"trials": [17]}, {"trials": []}])
def test_what_cannot_be_asked_is_refused(family: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        elastune.soup(family, build, accuracy, batches=batches, **options)


@pytest.mark.parametrize("how", ["greedy", "uniform"])
def test_a_score_that_is_no_number_chooses_nothing(family: Path, how: str) -> None:
    with pytest.raises(UserError, match="every trial's is not"):
        elastune.soup(family, build, lambda model: float("nan"), how=how, batches=batches)


def test_a_trial_whose_score_is_no_number_is_left_out(family: Path) -> None:
    scores = iter([0.5, float("nan"), 0.4, 0.3])
    found = elastune.soup(family, build, lambda model: next(scores, 1.0), direction="min", batches=batches)
    assert 1 not in found.trials
    assert math.isnan(found.singles[1])


def test_models_of_other_shapes_are_refused(family: Path) -> None:
    with pytest.raises(UserError, match="tensor for tensor"):
        elastune.soup(family, lambda config: build({**config, "width": 5}), accuracy, batches=batches)


def test_statistics_become_those_of_the_batches() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    x = 3 + 2 * torch.randn(400, 3)
    estimate_batch_norm(model, x.split(100))
    parts = x.split(100)
    assert torch.allclose(model[0].running_mean, torch.stack([part.mean(0) for part in parts]).mean(0))
    assert torch.allclose(model[0].running_var, torch.stack([part.var(0) for part in parts]).mean(0))
    assert (model[0].momentum, model[0].training) == (0.1, False)


def test_children_of_one_trial_are_a_family() -> None:
    started = [
        StudyStarted({}),
        TrialStarted(0, {}, {}, seed=0),
        TrialStarted(1, {}, {}, seed=0, parent=0),
        TrialStarted(2, {}, {}, seed=0, parent=1),
        TrialStarted(3, {}, {}, seed=0),
        TrialStarted(4, {}, {}, seed=0, parent=4),
    ]
    entries = [Entry(0.0, record) for record in started]
    table = fold(entries)
    assert ancestor(table, entries, [1, 2]) == "trial 0"
    for trials in ([2, 3], [3, 4]):
        with pytest.raises(UserError, match="where training began with the same ones"):
            ancestor(table, entries, trials)


def test_the_command_judges_by_the_program(family: Path, tmp_path: Path, command_here: Callable[..., Any]) -> None:
    file = tmp_path / "soup.safetensors"
    told = command_here("soup", family, "--out", file, "--json").json
    assert told["score"] == elastune.soup(family, build, accuracy, batches=training_parts).score
    assert told["score"] >= max(one["score"] for one in told["singles"])
    model = build({**NORM, "width": 8, "seed": 0})
    start_from(model, StartFrom(file))
    assert accuracy(model.eval()) == told["score"]
    x, y = points(100, seed=2).tensors
    with torch.no_grad():
        assert told["test"]["soup"] == float((model(x).argmax(1) == y).double().mean())
    said = command_here("soup", family, "--how", "uniform", "--trials", "2,0", "--test", "test_unknown").out
    assert "uniform soup of 2 of 2 trials" in said
    assert "test: the program knows no such data" in said


def training_parts() -> list[torch.Tensor]:
    return list(points(200, seed=0).tensors[0].split(16))


@pytest.mark.parametrize(
    "options",
    [
        ("--how", "thick"),
        ("--data", "test"),
        ("--statistics", "test"),
        ("--test", "validation"),
        ("--data", "unknown"),
        ("--statistics", "unknown"),
        ("--objective", "mse"),
        ("--trials", "9"),
        ("--out", "/nowhere/at/all/s.safetensors"),
    ],
)
def test_wrong_soups_are_told_in_one_line(
    family: Path, options: tuple[str, ...], command_here: Callable[..., Any]
) -> None:
    said = command_here("soup", family, *options)
    assert (said.code, said.err.count("\n")) == (2, 1)


def test_a_study_of_strangers_makes_no_soup(kept_study: Path, command_here: Callable[..., Any]) -> None:
    assert "began with initial values of their own" in command_here("soup", kept_study).line


def test_statistics_are_estimated_whatever_mode_the_program_sets() -> None:
    x = 3 + 2 * torch.randn(400, 3)
    plain, told = (nn.Sequential(nn.BatchNorm1d(3)) for _ in range(2))
    estimate_batch_norm(plain, x.split(100))
    with fresh_statistics(told):
        told.eval()
        for part in x.split(100):
            told(part)
    assert torch.equal(plain[0].running_var, told[0].running_var)
    assert not told[0].training
