"""Parts of views of their own under a head: it trains like any model, and its parts stay as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs.views import build, points, view

import elastune
from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.checkpoints.checkpoint import load_newest
from elastune.tuning.reuse.kept_models import library, tensors_of, weights_of
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

PROGRAMS = Path(__file__).parents[2] / "programs"


@pytest.fixture(scope="module")
def parts(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of one trial a view."""
    out = tmp_path_factory.mktemp("parts") / "out"
    request = StudyRequest(Program(PROGRAMS / "views.py"), out, sampler="grid", trials=2, workers=2, keep="all")
    tune(request, cluster=cluster)
    return out


def test_a_head_learns_what_no_part_can_tell(parts: Path, cluster: LocalCluster, tmp_path: Path) -> None:
    def trained(name: str, workers: int, **more: Any) -> str:
        spec = RunSpec(
            Program(PROGRAMS / "stacked.py"),
            tmp_path / name,
            {"parts": str(parts)},
            execution=ExecutionSettings(workers, num_slots=4),
            **more,
        )
        return run_job(spec, cluster=cluster).sha256

    whole = trained("one", 1)
    trained("two", 2, epochs=2)
    assert trained("two", 2, epochs=4, resume=True) == whole
    newest = load_newest(tmp_path / "one" / "checkpoints")
    assert newest is not None
    model = elastune.stacked_parts(parts, build, outputs=4, example=torch.zeros(1, 2), view=view)
    model.load_state_dict(newest[1].states["model"])
    x, y = points(200, 5).tensors
    with torch.no_grad():
        alone = [float((part(view(c, x)).argmax(1) == y).double().mean()) for part, c in both(model)]
        together = float((model(x).argmax(1) == y).double().mean())
    assert max(alone) < 0.7 < 0.95 < together
    for part, one in zip(model.parts, library(parts).candidates, strict=True):
        kept = weights_of(one)
        assert all(torch.equal(tensor, kept[name]) for name, tensor in tensors_of(part).items())


def both(model: Any) -> list[tuple[Any, dict[str, Any]]]:
    return list(zip(model.parts, [{"inputs": "first"}, {"inputs": "second"}], strict=True))


def test_the_head_alone_trains(parts: Path) -> None:
    model = elastune.stacked_parts(parts, build, outputs=3, example=torch.zeros(2, 2), trials=[1], view=view).train()
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]
    assert (model.training, model.parts[0][1].training) == (True, False)
    assert model(torch.zeros(5, 2)).shape == (5, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"outputs": 0}, "whole number of outputs"),
        ({"example": torch.zeros(1, 7), "view": lambda config, x: x}, "parts take the example"),
        ({"trials": [9]}, "choose among"),
    ],
)
def test_what_cannot_be_stacked_is_refused(parts: Path, options: dict[str, Any], words: str) -> None:
    asked = {"outputs": 4, "example": torch.zeros(1, 2), "view": view, **options}
    with pytest.raises(UserError, match=words):
        elastune.stacked_parts(parts, build, **asked)
