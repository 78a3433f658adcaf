"""A data-parallel trunk around divided layers through whole runs: the result of the plan without it, on every mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked

from elastune.core.journal.records import RunFinished
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job

PROGRAM = Path(__file__).parent / "programs" / "trunk.py"


def trained(cluster: LocalCluster, out: Path, execution: dict[str, Any], **config: Any) -> RunFinished:
    spec = RunSpec(
        Program(PROGRAM),
        out,
        config=config,
        execution=ExecutionSettings(**{"num_slots": 4, **execution}),
        checkpoint_every_steps=0,
    )
    return run_job(spec, cluster=cluster)


@pytest.fixture(scope="module")
def wanted(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> RunFinished:
    """One worker, by the plan without a data-parallel trunk."""
    return trained(cluster, tmp_path_factory.mktemp("wanted") / "out", {"mechanism": "tensor"}, trunk=False)


@pytest.mark.parametrize(
    "mesh", [Mesh(tensor=3), Mesh(shard=2, tensor=2), *soaked(Mesh(tensor=2), Mesh(data=2, tensor=2))], ids=str
)
def test_one_result_for_every_mesh(cluster: LocalCluster, tmp_path: Path, wanted: RunFinished, mesh: Mesh) -> None:
    """Clipped AdamW, BatchNorm, dropout; workers evaluate batches of their own, some one more than others, with two
    calls of the model in each, and leave a second evaluation early.
    """
    mechanism = "tensor+zero" if mesh.shard > 1 else "tensor"
    run_result = trained(cluster, tmp_path / "out", {"mesh": mesh, "mechanism": mechanism})
    assert (run_result.sha256, run_result.samples) == (wanted.sha256, wanted.samples)
    # What the program adds up while it trains is each worker's own part here: all samples, once (a worker without a
    # slot in a pass runs a copy of another's, and that is in the program's own numbers).
    assert {**run_result.metrics, "samples": 0.0} == {**wanted.metrics, "samples": 0.0}
    if mesh.tensor != 3:
        assert run_result.metrics["samples"] == wanted.metrics["samples"]
