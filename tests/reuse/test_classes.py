"""Groups of classes, given or learnt; a gate and its parts, trained as ordinary studies, as one model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.programs.classes import build, points

import elastune
from elastune.cluster.local import LocalCluster
from elastune.core.errors import UserError
from elastune.core.run import Program
from elastune.core.start_from import StartFrom
from elastune.journal.reader import read
from elastune.journal.records import StudyStarted
from elastune.reuse.candidates import library
from elastune.reuse.class_tree import class_tree, confusions, learnt_tree
from elastune.reuse.joined import JoinedModel
from elastune.study.request import StudyRequest
from elastune.study.run import tune

PROGRAM = Program(Path(__file__).parent.parent / "programs" / "classes.py")
TREE = class_tree([[0, 2], [1, 3]])


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


@pytest.mark.parametrize(
    "groups", [[], [[0, 1]], [[0], []], [[0], [0]], [[0], [2]], [[0], [True]], [["0"], [1]], "01", 3, [0, 1], None]
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
    for wrong in (1, 5, 0, True, "2"):
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
    with pytest.raises(UserError, match="none for group 2"):
        elastune.join(gate, parts, build, class_tree([[0], [1], [2, 3]]))
