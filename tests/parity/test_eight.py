"""Eight workers with a slot each: the bits of one worker, on meshes of up to three axes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked

from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job

PROGRAM = Path(__file__).parent / "programs" / "shares.py"
WORKERS = 8


@pytest.fixture(scope="module")
def eight() -> Iterator[LocalCluster]:
    with LocalCluster(capacity=WORKERS) as cluster:
        yield cluster


def trained(cluster: LocalCluster, out: Path, **execution: Any) -> tuple[str, dict[str, float]]:
    """An epoch of four steps, of which the last has 16 samples, so two a slot; and an evaluation."""
    spec = RunSpec(
        Program(PROGRAM),
        out,
        execution=ExecutionSettings(num_slots=WORKERS, **execution),
        epochs=1,
        checkpoint_every_steps=0,
    )
    finished = run_job(spec, cluster=cluster)
    assert finished.steps == 4
    return finished.sha256, finished.metrics


@pytest.mark.parametrize("mechanism", ["sharded", *soaked("zero")])
def test_eight_shares(eight: LocalCluster, tmp_path: Path, mechanism: str) -> None:
    alone = trained(eight, tmp_path / "alone", workers=1)
    assert trained(eight, tmp_path / "eight", mesh=Mesh(shard=8), mechanism=mechanism) == alone


THREE_AXES = {
    "tensor+zero": Mesh(data=2, shard=2, tensor=2),
    "tensor+sharded": Mesh(data=2, shard=2, tensor=2),
    "tensor+pipeline": Mesh(data=2, tensor=2, pipeline=2),
    "tensor+pipeline+zero": Mesh(shard=2, tensor=2, pipeline=2),
}


@pytest.mark.soak
def test_three_axes(eight: LocalCluster, tmp_path: Path) -> None:
    """With divided layers: what one worker computes in as many blocks."""
    alone = trained(eight, tmp_path / "alone", mechanism="tensor")
    for mechanism, mesh in THREE_AXES.items():
        assert trained(eight, tmp_path / mechanism, mesh=mesh, mechanism=mechanism) == alone, mechanism


def test_stages_in_shares(eight: LocalCluster, tmp_path: Path) -> None:
    alone = trained(eight, tmp_path / "alone", workers=1)
    mesh = Mesh(data=2, shard=2, pipeline=2)
    assert trained(eight, tmp_path / "eight", mesh=mesh, mechanism="pipeline+zero") == alone
