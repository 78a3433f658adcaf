"""Stages through the whole program: the bits, metrics and norms of one worker, on meshes of both axes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked

from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job

PROGRAM = Path(__file__).parent / "programs" / "shares.py"
TROUBLES = PROGRAM.parent / "unpiped.py"


def spec(out: Path, max_steps: int | None = None, config: dict[str, Any] | None = None, **execution: Any) -> RunSpec:
    return RunSpec(
        Program(PROGRAM),
        out,
        config=config or {},
        execution=ExecutionSettings(**{"num_slots": 4, **execution}),
        max_steps=max_steps,
    )


def test_one_result_for_every_mesh(cluster: LocalCluster, tmp_path: Path) -> None:
    """AdamW with two groups and a schedule, clipped; BatchNorm, dropout; tied, frozen and unused parameters.

    Slots in several passes are in another comparison, since BatchNorm sees them apart; these do not divide a slot.
    """
    whole = {}
    for micro_batch in (None, 3):
        run = run_job(spec(tmp_path / f"one{micro_batch}", workers=1, micro_batch=micro_batch), cluster=cluster)
        whole[micro_batch] = run.sha256, run.metrics, run.signals
    assert whole[None] != whole[3]
    for i, execution in enumerate(
        (
            {"mesh": Mesh(pipeline=3), "schedule": "zero-bubble"},
            {"mesh": Mesh(data=2, pipeline=2), "schedule": "interleaved", "copies": 2},
            {"mesh": Mesh(shard=2, pipeline=2), "micro_batch": 3},
        )
    ):
        run = run_job(spec(tmp_path / str(i), **execution), cluster=cluster)
        assert (run.sha256, run.metrics, run.signals) == whole[execution.get("micro_batch")], execution


def test_with_divided_layers(cluster: LocalCluster, tmp_path: Path) -> None:
    """A pipeline is not cut where a value is in blocks."""
    results = {}
    for mesh, schedule in ((Mesh(), "1f1b"), (Mesh(tensor=2, pipeline=2), "interleaved"), (Mesh(pipeline=3), "1f1b")):
        execution = {"mesh": mesh, "mechanism": "tensor+pipeline", "virtual_tensor": 4, "schedule": schedule}
        results[mesh] = run_job(spec(tmp_path / str(mesh), 4, **execution), cluster=cluster).sha256
    assert len(set(results.values())) == 1, results


def test_a_checkpoint_goes_to_other_stages(cluster: LocalCluster, tmp_path: Path) -> None:
    """Written by two stages, it is continued by three, and by one worker with all of it."""
    whole = run_job(spec(tmp_path / "whole", workers=1), cluster=cluster)
    for name, first, then in (
        ("more", {"mesh": Mesh(pipeline=2)}, {"mesh": Mesh(pipeline=3)}),
        ("one", {"mesh": Mesh(data=2, pipeline=2)}, {"workers": 1}),
    ):
        begun = run_job(spec(tmp_path / name, max_steps=5, **first), cluster=cluster)
        assert begun.sha256 != whole.sha256
        rest = run_job(replace(spec(tmp_path / name, **then), resume=True), cluster=cluster)
        assert (rest.steps, rest.sha256) == (whole.steps, whole.sha256)


def test_fast_mode(cluster: LocalCluster, tmp_path: Path) -> None:
    """A replica's workers run the same pass: up to nothing at all what one worker runs."""
    one = run_job(spec(tmp_path / "one", mode="fast", workers=1, micro_batch=7), cluster=cluster)
    two = run_job(spec(tmp_path / "two", mode="fast", mesh=Mesh(pipeline=2), micro_batch=7), cluster=cluster)
    assert two.metrics["accuracy"] == one.metrics["accuracy"]
    assert two.metrics["norms"] == pytest.approx(one.metrics["norms"], rel=1e-5)


@pytest.mark.parametrize(
    ("trouble", "stages", "message"),
    [
        ("few", 3, "at least one layer a stage"),
        ("branches", 2, "torch.fx must be able to follow"),
        ("twice", 2, "once for each training batch"),
        ("not called", 2, "learns from what its model returned"),
        ("counts again", 2, "not run again in the backward pass"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(
    cluster: LocalCluster, tmp_path: Path, trouble: str, stages: int, message: str
) -> None:
    """In one line, on every stage."""
    run = spec(tmp_path, config={"trouble": trouble}, mesh=Mesh(pipeline=stages))
    with pytest.raises(JobFailed, match=message) as failed:
        run_job(replace(run, program=Program(TROUBLES)), cluster=cluster)
    assert failed.value.failure.reason == "user_error"


def test_an_optimizer_that_sees_a_parameter_as_a_whole_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    """Shares are flat, those of stages too."""
    with pytest.raises(JobFailed, match="must update each element by itself"):
        run_job(spec(tmp_path, config={"optimizer": "adafactor"}, mesh=Mesh(pipeline=2)), cluster=cluster)


@pytest.mark.parametrize("at", [2, *soaked(0, 4)])
def test_what_fails_on_one_stage_ends_all(cluster: LocalCluster, tmp_path: Path, at: int) -> None:
    """The others wait for it: they are told, and the run says what has failed."""
    run = spec(tmp_path, config={"trouble": "fails", "at": at}, mesh=Mesh(pipeline=3))
    with pytest.raises(JobFailed, match="no third batch here"):
        run_job(replace(run, program=Program(TROUBLES)), cluster=cluster)
