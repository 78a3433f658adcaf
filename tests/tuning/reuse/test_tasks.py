"""Ensembles of regressions and of sequences, from the study to the module that answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs.tasks import IGNORED, build, sequences, values

import elastune
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.reuse.kept_models import fill, library, weights_of
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

TASKS = Path(__file__).parents[2] / "programs" / "tasks.py"


def study_of(task: str, out: Path, cluster: LocalCluster) -> Path:
    """Four trials that differ in their initial values."""
    asked = StudyRequest(Program(TASKS), out, sampler="grid", trials=4, workers=2, keep="all", config={"task": task})
    tune(asked, cluster=cluster)
    return out


def outputs_of_parts(out: Path, told: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """What each member says, by the plain way."""
    known, said = {one.trial: one for one in library(out).candidates}, []
    for member in told["members"]:
        model = build(known[member["trial"]].config)
        fill(model, weights_of(known[member["trial"]]), "a member")
        said.append(model(x))
    return torch.stack(said)


@pytest.mark.parametrize("method", ["greedy", "stacking"])
def test_values(cluster: LocalCluster, tmp_path: Path, command_here: Callable[..., Any], method: str) -> None:
    out, file = study_of("regression", tmp_path / "out", cluster), tmp_path / "e.safetensors"
    told = command_here("ensemble", out, "--method", method, "--out", file, "--json").json
    assert (told["task"], told["objective"]) == ({"kind": "regression", "output_kind": "values", "width": 2}, "mse")
    assert (told["rows"], told["candidates"]) == (100, 4)
    assert told["score"] <= told["best_single"]
    x, y = values(100, 2).tensors
    with torch.no_grad():
        model = elastune.load_ensemble(file, build)
        weights = torch.tensor([member["weight"] for member in told["members"]])
        said = outputs_of_parts(out, told, x)
        mean = (weights[:, None, None] * said).sum(0)
        assert torch.allclose(model(x), mean, atol=1e-6)
        assert told["test"]["ensemble"] == pytest.approx(float(((mean - y) ** 2).mean()), rel=1e-5)
        uncertainty_of = model.uncertainty_of(x)
    assert uncertainty_of.aleatoric is None
    assert torch.allclose(uncertainty_of.epistemic, (weights[:, None, None] * (said - mean) ** 2).sum(0), atol=1e-6)
    assert told["uncertainty"]["unit"] == "squared"


def test_tokens_of_sequences(cluster: LocalCluster, tmp_path: Path, command_here: Callable[..., Any]) -> None:
    """Padding counts for nothing."""
    out, file = study_of("sequence", tmp_path / "out", cluster), tmp_path / "e.safetensors"
    told = command_here("ensemble", out, "--objective", "log_loss", "--out", file, "--json").json
    assert told["task"] == {"kind": "classification", "output_kind": "logits", "width": 3}
    assert told["rows"] == int((sequences(100, 1).tensors[1] != IGNORED).sum())
    assert told["score"] <= told["best_single"]
    x, y = sequences(100, 2).tensors
    with torch.no_grad():
        model = elastune.load_ensemble(file, build)
        weights = torch.tensor([member["weight"] for member in told["members"]])
        mean = (weights[:, None, None, None] * outputs_of_parts(out, told, x).softmax(-1)).sum(0)
        assert model(x).shape == (100, 7, 3)
        assert torch.allclose(model(x), mean, atol=1e-6)
        right = y != IGNORED
        loss = -mean[right].gather(1, y[right][:, None]).log().mean()
    assert told["test"]["ensemble"] == pytest.approx(float(loss), rel=1e-3)
    assert model.uncertainty_of(x).epistemic.shape == (100, 7)
