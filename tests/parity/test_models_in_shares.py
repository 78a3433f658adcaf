"""Kinds of models under mechanisms that divide a replica: exact to the bit, fast to rounding in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.soaked import soaked

from elastune.core.journal.records import RunFinished
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.recipes.datasets import digits
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.checkpoints.export import export_run

PROGRAMS = Path(__file__).parent / "programs"
BOUND = 1e-6


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of digits as large as LeNet takes them."""
    result, labels = digits().train[:300]
    result = torch.nn.functional.interpolate(result.view(-1, 1, 8, 8), size=(28, 28))
    file = tmp_path_factory.mktemp("images") / "images"
    save_file({"images": result.contiguous(), "labels": labels.contiguous()}, file)
    return str(file)


def spec(out: Path, program: str, config: dict[str, Any], steps: int, **execution: Any) -> RunSpec:
    """Clipped by the session; a checkpoint at the end."""
    results = {**config, "own_clip": False}
    return RunSpec(
        Program(PROGRAMS / program),
        out,
        config=results,
        seed=3,
        execution=ExecutionSettings(**{"num_slots": 4, **execution}),
        max_steps=steps,
    )


@pytest.mark.parametrize("model", ["cnn", "transformer", *soaked("gru")])
def test_exact_bits_of_one_worker(cluster: LocalCluster, tmp_path: Path, images: str, model: str) -> None:
    """LeNet with BatchNorm and dropout, its last batch a smaller one; a GPT with tied words; a GRU of three layers."""
    program, config = {
        "cnn": ("lenet.py", {"samples": images, "batch_size": 70, "optimizer": "adamw"}),
        "transformer": ("transformer.py", {}),
        "gru": ("transformer.py", {"layer": "gru"}),
    }[model]

    def trained(mechanism: str, workers: int) -> RunFinished:
        run_spec = spec(tmp_path / mechanism, program, config, 5, mechanism=mechanism, workers=workers)
        return run_job(run_spec, cluster=cluster)

    results = {each: trained(each, workers) for each, workers in (("replicated", 1), ("zero", 3), ("sharded", 3))}
    assert len({each.sha256 for each in results.values()}) == 1, results


def test_fast_is_plain_up_to_rounding_in_double_precision(cluster: LocalCluster, tmp_path: Path, images: str) -> None:
    """LeNet without what sees how a batch is cut (BatchNorm, dropout)."""
    config = {"samples": images, "plain": True, "double": True}

    def weights(name: str, **execution: Any) -> dict[str, torch.Tensor]:
        run_job(spec(tmp_path / name, "lenet.py", config, 6, **execution), cluster=cluster)
        export_run(tmp_path / name, None, tmp_path / f"{name}.safetensors")
        return load_file(tmp_path / f"{name}.safetensors")

    plain = weights("plain", workers=1)
    assert plain["conv1.weight"].dtype == torch.float64
    for name, execution in {
        "zero": {"mesh": Mesh(shard=3), "mechanism": "zero"},
        "sharded": {"mesh": Mesh(shard=3), "mechanism": "sharded"},
        "pipeline": {"mesh": Mesh(data=2, pipeline=2)},
    }.items():
        result = weights(name, mode="fast", **execution)
        assert result.keys() == plain.keys()
        gaps = {key: float((result[key] - value).norm() / value.norm()) for key, value in plain.items()}
        assert max(gaps.values()) < BOUND, (name, gaps)
        assert max(gaps.values()) > 0, f"{name} has run in exact mode"
