"""What studies leave for others survives kill -9 of the controller and of a worker: the same artifacts, bit by bit."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs.classes import build, points
from tests.soaked import soaked

import elastune
from elastune.core.journal.files import read
from elastune.core.journal.folds import fold
from elastune.core.journal.records import ArtifactKept, TrialFinished, TrialReported, TrialStarted
from elastune.core.run import ExecutionSettings, Program, StartFrom
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.checkpoints.tree import fingerprint
from elastune.tuning.reuse.new_members import train_members
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

PROGRAMS = Path(__file__).parent.parent / "programs"
TREE = [[0, 2], [1, 3]]


@pytest.fixture(scope="module")
def sources(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gate for parts to begin with, and views to stack, which nobody has disturbed."""
    root = tmp_path_factory.mktemp("sources")
    ordinary: dict[str, Any] = {"workers": 2, "keep": "all", "sampler": "grid"}
    gate = StudyRequest(Program(PROGRAMS / "classes.py"), root / "gate", trials=1, **ordinary)
    tune(gate, space=lambda trial: {"group": -1}, cluster=cluster)
    tune(StudyRequest(Program(PROGRAMS / "views.py"), root / "views", trials=2, **ordinary), cluster=cluster)
    return root


def asked(case: str, out: Path, sources: Path) -> StudyRequest:
    """Two trials, one after another, of two workers."""
    ordinary: dict[str, Any] = {
        "trials": 2,
        "workers": 2,
        "keep": "all",
        "execution": ExecutionSettings(workers=2),
        "sampler": "grid",
    }
    if case == "predictions":
        return StudyRequest(Program(PROGRAMS / "assets.py"), out, **ordinary | {"sampler": "random"})
    if case == "parts":
        begins = StartFrom(sources / "gate" / "trials" / "00000", fresh=("2.*",))
        return StudyRequest(Program(PROGRAMS / "classes.py"), out, start_from=begins, **ordinary)
    config = {"parts": str(sources / "views")}
    return StudyRequest(Program(PROGRAMS / "stacked.py"), out, config=config, **ordinary)


def heads(trial: Any) -> dict[str, Any]:
    """The space of the stacked ones: how long the head is trained."""
    return {"epochs": trial.suggest_categorical("epochs", [2, 4])}


def artifacts(out: Path) -> dict[int, tuple[str, dict[str, str]]]:
    kept = fold(read(out / "journal.jsonl")).artifacts
    return {number: (one.sha256, one.predictions) for number, one in kept.items()}


def told(out: Path, kind: Any) -> int:
    journal = out / "journal.jsonl"
    return sum(isinstance(e.record, kind) for e in read(journal)) if journal.exists() else 0


@pytest.mark.parametrize("case", ["parts", *soaked("predictions", "stacked")])
def test_artifacts_are_those_of_a_study_that_nobody_disturbed(
    case: str, sources: Path, cluster: LocalCluster, tmp_path: Path, controller, until, all_gone
) -> None:
    space = heads if case == "stacked" else None
    whole = tune(asked(case, tmp_path / "whole", sources), space=space, cluster=cluster)
    assert len(whole.kept) == 2

    out, go, killed = tmp_path / "out", tmp_path / "go", tmp_path / "killed"
    request = asked(case, out, sources)
    request = replace(request, config={**request.config, "until": str(go), "killed": str(killed)})
    running = controller(lambda: tune(request, space=space))
    until(lambda: killed.exists() and told(out, TrialReported))
    family = running.family()
    running.signal(signal.SIGKILL)
    assert running.end() == -9
    all_gone(family)
    assert told(out, TrialFinished) < 2, "something was left to do"
    go.touch()
    tune(replace(request, resume=True), space=space, cluster=cluster)
    assert artifacts(out) == artifacts(tmp_path / "whole")
    assert told(out, ArtifactKept) == 2
    if case == "predictions":
        assert all(set(names) == {"validation", "test"} for _, names in artifacts(out).values())
    if case == "parts":
        models = [
            elastune.join(sources / "gate", parts, build, elastune.class_tree(TREE)) for parts in (out, whole.out)
        ]
        assert len({fingerprint(model.state_dict()) for model in models}) == 1
        x, y = points(200, 5).tensors
        assert float((models[0](x).argmax(1) == y).double().mean()) > 0.9
        assert torch.equal(models[0](x), models[1](x))


@pytest.mark.soak
def test_members_that_were_cut_off_go_on(cluster: LocalCluster, tmp_path: Path, controller, until, all_gone) -> None:
    """Those of views, of two workers each; the same call again makes of them what an undisturbed one does."""
    vary = {"inputs": ["first", "second"]}

    def searched(name: str, go: Path | str, killed: Path | str) -> Path:
        request = StudyRequest(Program(PROGRAMS / "shown.py"), tmp_path / name, trials=1, workers=2, sampler="random")
        config = {"until": str(go), "killed": str(killed)}
        tune(replace(request, execution=ExecutionSettings(workers=2), config=config, keep="best"), cluster=cluster)
        return request.out

    whole = searched("whole", "", "")
    train_members(whole, vary, cluster=cluster)
    go, killed = tmp_path / "go", tmp_path / "killed"
    go.touch()
    killed.touch()
    out = searched("out", go, killed)
    go.unlink()
    killed.unlink()
    running = controller(lambda: train_members(out, vary))
    until(lambda: killed.exists() and told(out, TrialStarted) == 2)
    family = running.family()
    running.signal(signal.SIGKILL)
    assert running.end() == -9
    all_gone(family)
    assert told(out, TrialFinished) == 1, "something was left to do"
    go.touch()
    result = train_members(out, vary, cluster=cluster)
    assert [trial.config["inputs"] for trial in result.trials[1:]] == [["first"], ["second"]]
    assert artifacts(out) == artifacts(whole)
    assert told(out, TrialStarted) == 3
    assert len(artifacts(out)) == 3
    train_members(out, vary, cluster=cluster)
    assert told(out, TrialStarted) == 3, "nothing is lacking"


@pytest.mark.soak
def test_a_tree_that_was_cut_off_goes_on(cluster: LocalCluster, tmp_path: Path, controller, until, all_gone) -> None:
    """In its middle: the root is trained, a node below it runs and has lost a worker."""
    tree, file = elastune.class_tree([[[0, 1], [2, 3]], [4], [5]]), PROGRAMS / "nodes.py"
    out, go, killed = tmp_path / "out", tmp_path / "go", tmp_path / "killed"
    ordinary: dict[str, Any] = {"workers": 2, "execution": ExecutionSettings(workers=2), "fresh": ["2.*"]}
    whole = elastune.train_tree(file, tree, tmp_path / "whole", config={"epochs": 2}, cluster=cluster, **ordinary)
    assert [trial.config["node"] for trial in whole.trials[:2]] == ["", "0"]
    assert len(whole.kept) == 4

    def trained(**more: Any) -> Any:
        config = {"epochs": 2, "until": str(go), "killed": str(killed)}
        return elastune.train_tree(file, tree, out, config=config, **ordinary, **more)

    running = controller(lambda: trained())
    until(lambda: killed.exists() and told(out, TrialStarted) == 2)
    family = running.family()
    running.signal(signal.SIGKILL)
    assert running.end() == -9
    all_gone(family)
    assert told(out, TrialFinished) == 1, "the root is trained, all else is left to do"
    go.touch()
    run_result = trained(cluster=cluster)
    assert all(trial.state == "complete" for trial in run_result.trials)
    assert told(out, TrialStarted) == 4

    def by_node(study: Any) -> dict[str, str]:
        kept = {number: sha for number, (sha, _) in artifacts(study.out).items()}
        return {trial.config["node"]: kept[trial.number] for trial in study.trials}

    assert by_node(run_result) == by_node(whole)
