"""Layers in virtual blocks through whole runs: one result for every mesh, plain PyTorch's up to rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked

from elastune.core.journal.records import RunFinished
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job

PROGRAM = Path(__file__).parent / "programs" / "layers.py"
TRUNK = PROGRAM.with_name("trunk.py")  # by a plan with a data-parallel trunk


def trained(
    cluster: LocalCluster, out: Path, execution: dict[str, Any], program: Path = PROGRAM, **config: Any
) -> RunFinished:
    spec = RunSpec(
        Program(program),
        out,
        config=config,
        execution=ExecutionSettings(**{"num_slots": 4, **execution}),
        checkpoint_every_steps=0,
    )
    return run_job(spec, cluster=cluster)


def same(cluster: LocalCluster, out: Path, meshes: list[Mesh], **config: Any) -> RunFinished:
    """The result of one worker, after a check that all meshes come to its bits."""
    wanted = trained(cluster, out / "alone", {"mechanism": "tensor"}, **config)
    for mesh in meshes:
        run_result = trained(cluster, out / str(mesh), {"mesh": mesh, "mechanism": _mechanism(mesh)}, **config)
        assert (run_result.sha256, run_result.metrics) == (wanted.sha256, wanted.metrics), mesh
    return wanted


def _mechanism(mesh: Mesh) -> str:
    return "tensor+zero" if mesh.shard > 1 else "tensor"


def test_one_result_for_every_mesh(cluster: LocalCluster, tmp_path: Path) -> None:
    """Clipped AdamW, evaluation in between; what is not divided is computed by all."""
    meshes = [Mesh(tensor=3), Mesh(data=2, tensor=2), Mesh(shard=2, tensor=2)]
    result = same(cluster, tmp_path, meshes, model="gpt", plan="tied")
    plain = trained(cluster, tmp_path / "plain", {"workers": 1}, model="gpt", plan="tied")
    assert result.metrics == pytest.approx(plain.metrics, rel=1e-4)
    assert result.sha256 != plain.sha256  # another order of additions


def test_a_cnn_and_a_plan_for_some_of_its_layers(cluster: LocalCluster, tmp_path: Path) -> None:
    result = same(cluster, tmp_path / "all", [Mesh(data=2, tensor=2)], model="cnn", plan="cnn")
    some = same(cluster, tmp_path / "some", [Mesh(data=2, tensor=2)], model="cnn", plan="fc")
    assert result.metrics == pytest.approx(some.metrics, rel=1e-3)


def test_blocks_that_lie_between_two_layers_whose_parameters_are_gathered(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """``sharded`` frees a layer when the backward pass is through with all blocks that it gave out, not with one."""
    execution = {"mesh": Mesh(shard=2, tensor=2), "mechanism": "tensor+sharded", "num_slots": 2, "virtual_tensor": 4}
    alone = {"mechanism": "tensor", "num_slots": 2}
    results = [trained(cluster, tmp_path / str(i), each, model="row") for i, each in enumerate((execution, alone))]
    assert results[0].sha256 == results[1].sha256


@pytest.mark.parametrize(
    ("program", "chosen"), [(PROGRAM, {"model": "cnn", "plan": "cnn"}), *soaked((TRUNK, {"optimizer": "sgd"}))]
)
def test_a_checkpoint_goes_on_under_another_mesh(
    cluster: LocalCluster, tmp_path: Path, program: Path, chosen: dict[str, Any]
) -> None:
    """Written in pieces by those that hold them: blocks that two workers had, then one, then three."""
    wanted = trained(cluster, tmp_path / "whole", {"mechanism": "tensor"}, program, **chosen)
    execution = [
        ExecutionSettings(mesh=Mesh(data=2, tensor=2), num_slots=4),
        ExecutionSettings(mechanism="tensor", num_slots=4),
        ExecutionSettings(mesh=Mesh(tensor=3), num_slots=4),
    ]
    for stop, mesh in zip((2, 4, None), execution, strict=True):
        spec = RunSpec(
            Program(program), tmp_path / "parts", config=chosen, execution=mesh, max_steps=stop, resume=stop != 2
        )
        finished = run_job(replace(spec, checkpoint_every_steps=1), cluster=cluster)
    assert finished.sha256 == wanted.sha256


def test_fast_mode_is_the_same_but_for_rounding(cluster: LocalCluster, tmp_path: Path) -> None:
    fast = {"mode": "fast", "mesh": Mesh(tensor=2), "num_slots": 1}
    exact = {"mechanism": "tensor", "num_slots": 1}
    results = [trained(cluster, tmp_path / str(i), execution, model="gpt") for i, execution in enumerate((fast, exact))]
    assert results[0].metrics == pytest.approx(results[1].metrics, rel=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": "gpt", "plan": "nothing"}, "a plan names modules of the model"),
        ({"model": "gpt", "plan": "half tied"}, "along the same dimension"),
        ({"model": "gpt", "optimizer": "adafactor"}, "must update each element by itself"),
    ],
)
def test_what_is_refused_at_prepare(
    cluster: LocalCluster, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobFailed, match=message):
        trained(cluster, tmp_path, {"mesh": Mesh(tensor=2)}, **config)
