"""State in shares: the bits of replicated training, on every mesh, with all that a model and its loop may have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked

from elastune.core.journal.records import RunFinished
from elastune.core.mesh import Mesh
from elastune.core.run import Adapt, ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job

PROGRAM = Path(__file__).parent / "programs" / "shares.py"
ZERO = {"mechanism": "zero"}


def spec(out: Path, execution: dict[str, Any], max_steps: int | None = None, **config: Any) -> RunSpec:
    return RunSpec(
        Program(PROGRAM),
        out,
        config=config,
        execution=ExecutionSettings(**{"num_slots": 4, **execution}),
        max_steps=max_steps,
    )


def same(cluster: LocalCluster, out: Path, execution: list[dict[str, Any]], **config: Any) -> RunFinished:
    """The result of the first, after a check that all come to its bits."""
    results = [run_job(spec(out / str(i), each, **config), cluster=cluster) for i, each in enumerate(execution)]
    values = [(each.sha256, each.metrics, each.signals) for each in results]
    assert values == [values[0]] * len(values)
    return results[0]


def test_one_result_for_every_mesh(cluster: LocalCluster, tmp_path: Path) -> None:
    """Clipped; AdamW with two parameter groups and a schedule; BatchNorm and dropout."""
    meshes = [
        {"workers": 2},
        *({**ZERO, "workers": workers} for workers in (3, 4)),
        {"mechanism": "sharded", "workers": 3},
        {**ZERO, "workers": 2, "copies": 1},
        {"mesh": Mesh(data=2, shard=2), "copies": 1},
        {**ZERO, "workers": 2, "offload": True},
    ]
    assert same(cluster, tmp_path, meshes).metrics["norms"] > 0


def test_one_result_under_torchs_fully_shard(cluster: LocalCluster, tmp_path: Path) -> None:
    """Rows that end anywhere; slots in several passes, of which workers have unequally many."""
    fsdp2 = {"mechanism": "fsdp2", "num_slots": 5, "micro_batch": 5}
    meshes = [{**fsdp2, "mechanism": "replicated"}, *({**fsdp2, "workers": workers} for workers in (2, 3))]
    assert same(cluster, tmp_path, meshes, odd=False).metrics["norms"] > 0


@pytest.mark.parametrize("optimizer", ["adagrad", *soaked("sgd")])
def test_further_optimizers(cluster: LocalCluster, tmp_path: Path, optimizer: str) -> None:
    same(cluster, tmp_path, [{"workers": 1}, {**ZERO, "workers": 3}], optimizer=optimizer, max_norm=0.0)


def test_a_fused_optimizer(cluster: LocalCluster, tmp_path: Path) -> None:
    same(cluster, tmp_path, [{"workers": 1}, {**ZERO, "workers": 3}], optimizer="fused")


def test_slots_in_several_passes(cluster: LocalCluster, tmp_path: Path) -> None:
    """And fewer workers than slots, so that workers make different numbers of passes."""
    passes = {"micro_batch": 3, "num_slots": 5}
    others = ({"mechanism": mechanism, "workers": 3, **passes} for mechanism in ("zero", "sharded"))
    same(cluster, tmp_path, [{"workers": 1, **passes}, *others])


def test_fast_mode_sums_once_a_worker(cluster: LocalCluster, tmp_path: Path) -> None:
    """Of two workers there is one order only."""
    fast = {"mode": "fast", "workers": 2}
    same(cluster, tmp_path, [fast, {**ZERO, **fast}, {"mechanism": "sharded", **fast}], max_norm=0.0)
    three = run_job(spec(tmp_path / "three", {**ZERO, "mode": "fast", "workers": 3}), cluster=cluster)
    assert three.steps == 8


def test_a_checkpoint_serves_every_mechanism(cluster: LocalCluster, tmp_path: Path) -> None:
    whole = run_job(spec(tmp_path / "whole", {"workers": 1}, odd=False), cluster=cluster)
    for name, first, then in (
        ("a", {**ZERO, "workers": 3}, {"workers": 2}),
        ("b", {"workers": 2}, {**ZERO, "workers": 2}),
        ("c", {"mechanism": "fsdp2", "workers": 3}, {"mechanism": "fsdp2", "workers": 2}),
    ):
        begun = run_job(spec(tmp_path / name, first, max_steps=5, odd=False), cluster=cluster)
        assert begun.sha256 != whole.sha256
        in_pieces = bool(list((tmp_path / name).rglob("tensors-*-of-*.safetensors")))
        assert in_pieces == ("mechanism" in first)
        rest = run_job(replace(spec(tmp_path / name, then, odd=False), resume=True), cluster=cluster)
        assert (rest.steps, rest.sha256) == (whole.steps, whole.sha256)


@pytest.mark.parametrize(
    ("config", "message"),
    [({"max_norm": -1.0}, r"session\.clip_grad_norm_"), ({"optimizer": "adafactor"}, "each element by itself")],
)
def test_what_would_go_wrong_is_refused(
    cluster: LocalCluster, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    """The program's own clip, which would find no gradients; an optimizer that sees a parameter as a whole."""
    with pytest.raises(JobFailed, match=message) as failed:
        run_job(spec(tmp_path, {**ZERO, "workers": 2}, **config), cluster=cluster)
    assert failed.value.failure.reason == "user_error"


def test_the_noise_scale_is_that_of_replicated_training(cluster: LocalCluster, tmp_path: Path) -> None:
    """Up to rounding of one sum; the same on every mesh."""
    watched = Adapt(monitors=("noise_scale",))
    execution = [{"workers": 2}, {**ZERO, "workers": 2}, {**ZERO, "workers": 3}, {"mechanism": "sharded", "workers": 3}]
    results = [
        run_job(replace(spec(tmp_path / str(i), each), adapt=watched), cluster=cluster)
        for i, each in enumerate(execution)
    ]
    assert results[1].signals == results[2].signals == results[3].signals
    assert results[0].signals.keys() == results[1].signals.keys() != set()
    for name, result in results[0].signals.items():
        assert results[1].signals[name] == pytest.approx(result, rel=1e-3), name


def test_what_needs_whole_parameters_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    changed = replace(spec(tmp_path, {"mechanism": "sharded", "workers": 2}), adapt=Adapt(monitors=("curvature",)))
    with pytest.raises(JobFailed, match="needs whole parameters"):
        run_job(changed, cluster=cluster)
