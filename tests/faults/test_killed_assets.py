"""What studies leave for others survives kill -9 of the controller and of a worker: the same artifacts, bit by bit."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs.classes import build, points

import elastune
from elastune.cluster.local import LocalCluster
from elastune.core.run import Means, Program
from elastune.core.start_from import StartFrom
from elastune.journal.reader import read
from elastune.journal.records import ArtifactKept, TrialFinished, TrialReported
from elastune.journal.trials import fold
from elastune.study.request import StudyRequest
from elastune.study.run import tune
from elastune.train.checkpoints.tree import fingerprint

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
    ordinary: dict[str, Any] = {"trials": 2, "workers": 2, "keep": "all", "means": Means(workers=2), "sampler": "grid"}
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


@pytest.mark.parametrize("case", ["predictions", "parts", "stacked"])
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
