"""Groups of classes, given or learnt; a gate and its parts, trained as ordinary studies, as one model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.programs.classes import build, points
from tests.programs.nodes import build as build_node
from tests.programs.nodes import points as node_points

import elastune
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.folds import fold
from elastune.core.journal.records import StudyStarted
from elastune.core.run import Program, StartFrom
from elastune.report.overviews import front_trials, gather_study
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.reuse.class_tree import class_tree, confusions, learnt_tree
from elastune.tuning.reuse.composed_models import JoinedModel
from elastune.tuning.reuse.kept_models import library
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

PROGRAM = Program(Path(__file__).parents[2] / "programs" / "classes.py")
TREE = class_tree([[0, 2], [1, 3]])
NODES = Path(__file__).parents[2] / "programs" / "nodes.py"
NODE_TREE = class_tree([[[0, 1], [2]], [[3], [4, 5]]])


def test_labels_by_group_and_within_it() -> None:
    y = torch.tensor([0, 1, 2, 3, 3, 0])
    assert TREE.coarse(y).tolist() == [0, 1, 0, 1, 1, 0]
    assert TREE.within(y).tolist() == [0, 0, 1, 1, 1, 0]
    assert TREE.rows(y, 1).tolist() == [1, 3, 4]
    assert class_tree(TREE.to_json()) == TREE


def test_joined_probabilities_are_those_of_the_chain_rule() -> None:
    random = torch.Generator().manual_seed(0)
    gate, *parts = (torch.rand(5, 2, generator=random).softmax(-1) for _ in range(3))
    said = TREE.joined(gate, parts)
    for one, (group, place) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        assert torch.equal(said[:, one], gate[:, group] * parts[group][:, place])
    assert torch.allclose(said.sum(-1), torch.ones(5))
    with pytest.raises(UserError, match="each part its own classes"):
        TREE.joined(gate, parts[:1])


DEEP = class_tree([[[0, 4], [2]], [[1, 3], [5]]])


def test_a_deeper_tree_has_nodes_by_their_ways() -> None:
    y = torch.tensor([0, 1, 2, 3, 4, 5])
    assert DEEP.levels() == [[""], ["0", "1"], ["0.0", "1.0"]]
    assert [DEEP.outputs(node) for node in DEEP.nodes()] == [2] * 5
    assert DEEP.labels(y, "").tolist() == DEEP.coarse(y).tolist() == [0, 1, 0, 1, 0, 1]
    assert DEEP.labels(y, "0").tolist() == [0, -1, 1, -1, 0, -1]
    assert DEEP.labels(y, "1.0").tolist() == [-1, 0, -1, 1, -1, -1]
    assert DEEP.within(y).tolist() == [0, 0, 1, 0, 0, 1]
    assert DEEP.rows(y, "1").tolist() == [1, 3, 5]
    assert DEEP.rows(y, "1.0").tolist() == [1, 3]
    assert class_tree(DEEP.to_json()) == DEEP
    for wrong in ("2", "0.0.0.0", "0.2", "x", -1):
        with pytest.raises(UserError, match="use 0, 1, 0.0, 1.0"):
            DEEP.labels(y, wrong)


def test_probabilities_of_a_deeper_tree_are_products_along_the_way() -> None:
    random = torch.Generator().manual_seed(0)
    said = {node: torch.rand(5, 2, generator=random).softmax(-1) for node in DEEP.nodes()}
    found = DEEP.chained(said)
    assert torch.allclose(found.sum(-1), torch.ones(5))
    assert torch.equal(found[:, 2], said[""][:, 0] * said["0"][:, 1])
    assert torch.equal(found[:, 3], said[""][:, 1] * said["1"][:, 0] * said["1.0"][:, 1])
    with pytest.raises(UserError, match="the model of group 1.0 gives 2 numbers"):
        DEEP.chained({node: one for node, one in said.items() if node != "1.0"})


@pytest.mark.parametrize(
    "groups",
    [
        *([], [[0, 1]], [[0], []], [[0], [0]], [[0], [2]], [[0], [True]], [["0"], [1]], "01", 3, [0, 1], None),
        *([[[0, 1]], [2]], [[0, [1]], [2]], [[[0], [1]], [[1], [2]]], [[[0], []], [1]]),
    ],
)
def test_what_is_no_tree_is_refused(groups: Any) -> None:
    with pytest.raises(UserError, match="a tree of classes"):
        class_tree(groups)


def test_what_is_confused_comes_together() -> None:
    """Classes 0, 3 and 4 are taken for one another, and so are 1 and 2, less often."""
    confused = np.full((5, 5), 0.01)
    for pairs, share in (((0, 3, 4), 0.3), ((1, 2), 0.2)):
        for one in pairs:
            for other in pairs:
                confused[one, other] = share
    assert sorted(learnt_tree(confused, 2).groups) == [(0, 3, 4), (1, 2)]
    assert sorted(learnt_tree(confused, 3).groups) == [(0, 3, 4), (1,), (2,)]
    assert learnt_tree(confused, [2, 3]).to_json() == [[0, 3, 4], [[1], [2]]]
    for wrong in (1, 5, 0, True, "2", [], [3, 2], [2, 2], [2, 5], [2, 3.0]):
        with pytest.raises(UserError, match="two groups"):
            learnt_tree(confused, wrong)  # type: ignore[arg-type]


def test_confusions_are_means_over_the_samples_of_a_class() -> None:
    said = np.array([[0.5, 0.5, 0], [0.9, 0.1, 0], [0, 1, 0]])
    assert np.allclose(confusions(said, np.array([0, 0, 1])), [[0.7, 0.3, 0], [0, 1, 0], [0, 0, 0]])


def test_the_command_learns_from_kept_predictions(kept_study: Path, command_here: Callable[..., Any]) -> None:
    told = command_here("classes", kept_study, "--groups", "2", "--json").json
    tree = class_tree(told["tree"])
    assert sorted(map(len, tree.groups)) == [1, 2]
    one = next(one for one in library(kept_study).candidates if one.trial == told["trial"])
    found = one.predictions("validation")
    said = found["outputs"].softmax(-1)
    right = [sum(said[at, c] for c in tree.groups[tree.coarse(y)]) for at, y in enumerate(found["targets"])]
    assert told["between"] == pytest.approx(1 - float(sum(right)) / len(right), abs=1e-6)
    hit = said[torch.arange(100), found["targets"]].mean()
    assert told["between"] + told["within"] == pytest.approx(1 - float(hit), abs=1e-6)
    deeper = command_here("classes", kept_study, "--groups", "2,2")
    assert "more than on the one above" in deeper.line
    assert "whole numbers" in command_here("classes", kept_study, "--groups", "two").line
    assert "--set tree='[[" in command_here("classes", kept_study, "--groups", "2", "--trial", "1").out


@pytest.mark.parametrize("options", [("--groups", "1"), ("--groups", "3"), ("--groups", "2", "--data", "test"), ()])
def test_wrong_questions_are_told_in_one_line(
    kept_study: Path, options: tuple[str, ...], command_here: Callable[..., Any]
) -> None:
    said = command_here("classes", kept_study, *options)
    assert (said.code, said.err.count("\n")) == (2, 1)


def test_a_gate_and_parts_trained_from_it_tell_all_classes(cluster: LocalCluster, tmp_path: Path) -> None:
    gate, parts = tmp_path / "gate", tmp_path / "parts"
    ordinary: dict[str, Any] = {"workers": 2, "keep": "all"}
    tune(StudyRequest(PROGRAM, gate, trials=1, **ordinary), space=lambda trial: {"group": -1}, cluster=cluster)
    begins = StartFrom(gate / "trials" / "00000", fresh=("2.*",))
    tune(StudyRequest(PROGRAM, parts, trials=2, sampler="grid", start_from=begins, **ordinary), cluster=cluster)
    assert sorted(one.config["group"] for one in library(parts).candidates) == [0, 1]
    told = next(e.record for e in read(parts / "journal.jsonl") if isinstance(e.record, StudyStarted))
    assert told.settings["start_from"]["fresh"] == ["2.*"]
    model = elastune.join(gate, parts, build, TREE)
    assert isinstance(model, JoinedModel)
    x, y = points(200, 5).tensors
    with torch.no_grad():
        said = model(x)
    assert torch.allclose(said.sum(1), torch.ones(200))
    assert float((said.argmax(1) == y).double().mean()) > 0.9
    with pytest.raises(UserError, match="none for the gate"):
        elastune.join(gate, parts, build, class_tree([[0], [1], [2, 3]]))


@pytest.fixture(scope="module")
def deep(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of three levels, trained as one study. Nothing may be changed in it."""
    out = tmp_path_factory.mktemp("deep") / "out"
    elastune.train_tree(NODES, NODE_TREE, out, fresh=["2.*"], workers=2, cluster=cluster)
    return out


def test_a_tree_of_three_levels_is_one_study(deep: Path, command_here: Callable[..., Any]) -> None:
    """Each node began with the weights of the one above, its head alone anew, and once that one had ended."""
    table = fold(read(deep / "journal.jsonl"))
    numbers = {life.started.config["node"]: number for number, life in table.trials.items()}
    assert set(numbers) == {"", "0", "1", "0.0", "1.1"}
    for node, number in numbers.items():
        begun = table.trials[number].initial_weights
        if node == "":
            assert not begun
            continue
        parent = numbers[node.rpartition(".")[0]]
        assert [Path(one.source) for one in begun] == [(deep / "trials" / f"{parent:05d}").resolve()]
        assert set(begun[0].fresh) == {"2.weight", "2.bias"}
        assert begun[0].sha256 == table.artifacts[parent].seal
        assert table.trials[number].started_at >= table.trials[parent].last_at
    model = elastune.join(deep, deep, build_node, NODE_TREE)
    x, y = node_points(400, 5).tensors
    with torch.no_grad():
        said = model(x)
    assert torch.allclose(said.sum(1), torch.ones(400))
    assert float((said.argmax(1) == y).double().mean()) > 0.9
    asked = (
        "tree",
        NODES,
        "--tree",
        json.dumps(NODE_TREE.to_json()),
        "--fresh",
        "2.*",
        "--workers",
        "2",
        "--out",
        deep,
    )
    assert set(front_trials(gather_study(read(deep / "journal.jsonl")))) == {
        trial.number for trial in elastune.Study.load(deep).front()
    }, "the table shows what is picked from"
    assert "--resume to go on" in command_here(*asked).line
    again = command_here(*asked, "--resume", "--json").json
    assert again["trials"] == {"complete": 5}, "nothing is trained twice"


def test_what_is_below_a_node_that_failed_is_not_begun(cluster: LocalCluster, tmp_path: Path) -> None:
    found = elastune.train_tree(
        NODES, NODE_TREE, tmp_path / "out", config={"fails": "1"}, fresh=["2.*"], workers=2, cluster=cluster
    )
    states = {trial.config["node"]: trial.state for trial in found.trials}
    assert states == {"": "complete", "0": "complete", "1": "infeasible", "0.0": "complete"}
    with pytest.raises(UserError, match="none for group 1 in"):
        elastune.join(found, found, build_node, NODE_TREE)


def test_a_program_that_knows_no_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no node in that of"):
        elastune.train_tree(PROGRAM.path, TREE, tmp_path / "out")
