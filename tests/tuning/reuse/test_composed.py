"""Joined and stacked models as points on the front of a study that was trained for the whole problem."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.programs.nodes import build, points
from tests.programs.views import build as build_view
from tests.programs.views import view

import elastune
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.folds import fold, training_of_studies
from elastune.core.journal.records import AssetMade
from elastune.core.run import Program, StartFrom
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.reuse.class_tree import class_tree
from elastune.tuning.reuse.composed_models import JoinedModel, StackedParts
from elastune.tuning.reuse.saved_models import KEY, write_model_file
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

PROGRAMS = Path(__file__).parents[2] / "programs"
NODES = Program(PROGRAMS / "nodes.py")
LISTS = "[[[0, 1], [2]], [[3], [4, 5]]]"
TREE = class_tree(json.loads(LISTS))
FLAT = [[0], [1], [2], [3], [4], [5]]


@pytest.fixture(scope="module")
def made(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Studies: "flat", "tree", "views", and "heads" over these."""
    root = tmp_path_factory.mktemp("made")
    ordinary: dict[str, Any] = {"workers": 2, "keep": "all", "sampler": "grid"}
    flat = StudyRequest(NODES, root / "flat", trials=2, config={"tree": FLAT}, **ordinary)
    tune(flat, space=lambda trial: {"lr": trial.suggest_categorical("lr", [0.1, 0.3])}, cluster=cluster)
    elastune.train_tree(NODES.path, TREE, root / "tree", fresh=["2.*"], workers=2, cluster=cluster)
    tune(StudyRequest(Program(PROGRAMS / "views.py"), root / "views", trials=2, **ordinary), cluster=cluster)
    config = {"parts": str(root / "views")}
    heads = StudyRequest(Program(PROGRAMS / "stacked.py"), root / "heads", trials=1, config=config, **ordinary)
    tune(heads, space=lambda trial: {"epochs": trial.suggest_categorical("epochs", [4])}, cluster=cluster)
    return root


def seconds(out: Path) -> dict[int, float]:
    return {number: life.worker_seconds for number, life in fold(read(out / "journal.jsonl")).trials.items()}


def test_a_joined_model_is_a_point_beside_flat_ones(
    made: Path, tmp_path: Path, command_here: Callable[..., Any]
) -> None:
    file, text = tmp_path / "joined.safetensors", json.dumps(TREE.to_json())
    asked = ("join", made / "tree", "--front", made / "flat", "--tree", text)
    said = command_here(*asked, "--out", file, "--json").json
    assert (said["form"], said["method"], len(said["source_trials"])) == ("joined", "tree of 3 levels", 5)
    model = elastune.load_composed(file, build)
    assert isinstance(model, JoinedModel)
    for name, seed in (("validation", 1), ("test", 2)):
        x, y = points(120, seed).tensors
        with torch.no_grad():
            right = float((model(x).argmax(1) == y).double().mean())
        assert right == pytest.approx(said["score"] if name == "validation" else said["test"]["model"])
    results = [e.record for e in read(made / "flat" / "journal.jsonl") if isinstance(e.record, AssetMade)][-1]
    assert results.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert sorted(part.trial for part in results.parts) == [0, 1, 2, 3, 4]
    assert results.parts_s == pytest.approx(sum(seconds(made / "tree").values())), (
        "each once, though one began with others"
    )
    flat = {trial.number: trial.values["accuracy"] for trial in elastune.Study.load(made / "flat").complete}
    assert {one["trial"]: pytest.approx(one["score"]) for one in said["singles"]} == flat

    report = command_here("report", made / "flat", "--pick", "accuracy=0.5", "--weights", "parameters=1", "--json")
    points_told = report.json["assets"]["points"]
    assert [one["form"] for one in points_told] == ["trial", "trial", "joined"]
    (joined,) = [one for one in points_told if one["form"] == "joined"]
    assert joined["values"]["training_s"] == pytest.approx(results.parts_s)
    assert joined["parts"] == [f"tree {part.trial}" for part in results.parts]
    shown = command_here("report", made / "flat", "--pick", "training_s=1000").out
    assert "joined tree of 3 levels" in shown
    file.write_bytes(b"other")
    (changed,) = [p for p in elastune.Study.load(made / "flat").assets.points if p.form == "joined"]  # type: ignore[union-attr]
    assert changed.trouble == "changed"


def test_a_stacked_model_counts_its_parts_and_its_head(
    made: Path, tmp_path: Path, command_here: Callable[..., Any]
) -> None:
    file = tmp_path / "stacked.safetensors"
    result = command_here("join", made / "heads", "--front", made / "heads", "--out", file)
    assert result.code == 0, result.err
    assert "stacked (head) of 3 trials: views 0, views 1, heads 0" in result.out
    results = [e.record for e in read(made / "heads" / "journal.jsonl") if isinstance(e.record, AssetMade)][-1]
    whole = sum(seconds(made / "views").values()) + seconds(made / "heads")[0]
    assert results.parts_s == pytest.approx(whole)
    assert results.score > 0.95 < (results.test or 0)
    model = elastune.load_composed(file, build_view, view)
    assert isinstance(model, StackedParts)
    kept = elastune.composed_of([made / "heads"])
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x), kept(x))
    assert "stacked" in command_here("report", made / "heads").out


def test_a_source_that_others_began_with_is_counted_once(made: Path, cluster: LocalCluster, tmp_path: Path) -> None:
    """Two trials that began with one of another study, which is a part as well."""
    source = made / "flat" / "trials" / "00000"
    request = StudyRequest(NODES, tmp_path / "out", config={"tree": FLAT}, start_from=StartFrom(source), trials=2)
    space = lambda trial: {"lr": trial.suggest_categorical("lr", [0.1, 0.2])}  # noqa: E731
    tune(StudyRequest(**{**vars(request), "sampler": "grid", "keep": "all"}), space=space, cluster=cluster)
    own, first = seconds(tmp_path / "out"), seconds(made / "flat")[0]
    assert training_of_studies([(tmp_path / "out", 0), (tmp_path / "out", 1)]).worker_seconds == pytest.approx(
        sum(own.values()) + first
    )
    both = training_of_studies([(tmp_path / "out", 0), (made / "flat", 0), (made / "flat", 0)])
    assert both.worker_seconds == pytest.approx(own[0] + first)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("tree", "--tree", "x"), "a list of groups of classes"),
        (("tree", "--tree", LISTS, "--data", "test"), "nothing is chosen by data"),
        (("tree", "--tree", LISTS, "--test", "other"), "have a name that begins with 'test'"),
        (("tree", "flat"), "2 studies, no tree"),
        (("flat",), "gives what stacked_parts makes"),
        (("flat", "--tree", "[[0, 1], [2, 3, 4, 5]]"), "none for the gate"),
        (("tree", "--tree", "[[[1, 0], [2]], [[3], [4, 5]]]"), "none for group 0.0"),
        (("tree", "--tree", "[[[3], [4, 5]], [[0, 1], [2]]]"), "none for the gate"),
        (("tree", "--tree", "[[[0, 1], [2]], [[3], [4], [5]]]"), "none for group 1 in"),
        (("tree", "--tree", LISTS, "--out", "."), "written to a file in a folder"),
        (("tree", "--tree", LISTS, "--out", "nowhere/joined"), "written to a file in a folder"),
    ],
)
def test_what_makes_no_model_is_told_in_one_line(
    made: Path, options: tuple[str, ...], words: str, command_here: Callable[..., Any]
) -> None:
    named = [made / one if (made / one).is_dir() else one for one in options]
    assert words in command_here("join", *named, "--front", made / "flat").line


def test_a_file_of_something_else_is_refused(made: Path, tmp_path: Path) -> None:
    file = tmp_path / "joined"
    elastune.save_composed(elastune.composed_of([made / "tree"], TREE), file)
    with safe_open(file, "pt") as opened:
        content, tensors = json.loads(opened.metadata()[KEY]), {n: opened.get_tensor(n) for n in opened.keys()}  # noqa: SIM118

    def told(changes: dict[str, Any], words: str) -> None:
        write_model_file(tmp_path / "other", {**content, **changes}, tensors)
        with pytest.raises(UserError, match=words):
            elastune.load_composed(tmp_path / "other", build)

    told({"format": 3}, "format")
    told({"tree": [[0], [1]]}, "5 parts of 1 nodes")
    told({"tree": [[0]]}, "a tree of classes")
    told({"tree": None}, "a joined model has a tree and no head")
    told({"form": "stacked"}, "a stacked model has a head and no tree")
    told({"form": "stacked", "tree": None, "head": [10**9, 10**9]}, "no head of 1000000000 inputs")
    told({"parts": []}, "parts")
    told({"more": 1}, "more")
    with pytest.raises(UserError, match="tensor for tensor"):
        elastune.load_composed(file, lambda config: torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match="gives a torch"):
        elastune.load_composed(file, lambda config: None)  # type: ignore[arg-type, return-value]
    (tmp_path / "other").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="written"):
        elastune.load_composed(tmp_path / "other", build)
    with pytest.raises(UserError, match="made of trials"):
        elastune.judge_model(torch.nn.Linear(1, 1), made / "flat")  # type: ignore[arg-type]
