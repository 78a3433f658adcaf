"""Strategies, routes, compression and monitors on one GPU that workers share: one hash, whoever computes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastune.core.communication import Topology
from elastune.core.journal.records import FaultInjected, Record
from elastune.core.run import Adapt, ExecutionSettings, Program, RunSpec
from elastune.core.sync_plan import SyncPlan, SyncSchedule
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.fault_injection import Injector, parse_chaos
from elastune.runtime.job.run import run_job

PROGRAMS = Path(__file__).parent / "programs"
CNN, STILL, TRANSFORMER = PROGRAMS / "lenet.py", PROGRAMS / "still.py", PROGRAMS / "transformer.py"
SEED, STEPS, DEVICE = 3, 8, "cuda"
STRATEGIES = (
    "local:learners=4,every=3",
    "averaging:learners=4,every=4,mix=2",
    "diloco:learners=4,every=3",
    "local:learners=4,every=3,send=int8",
    "gossip:learners=4,every=4",
    "pair_averaging:learners=4,every=4",
    "parameter_server:learners=4,every=4,staleness=1",
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def spec(out: Path, workers: int, sync: str = "allreduce", config: Any = None, **execution: Any) -> RunSpec:
    return RunSpec(
        Program(CNN),
        out,
        {"optimizer": "adamw", "schedule": "step", **(config or {})},
        seed=SEED,
        execution=ExecutionSettings(workers=workers, device=DEVICE, **execution),
        sync=SyncPlan.parse(sync),
        max_steps=STEPS,
    )


@pytest.mark.parametrize("sync", STRATEGIES)
def test_strategies_do_not_show_workers(cluster: LocalCluster, tmp_path: Path, sync: str) -> None:
    results = {n: run_job(spec(tmp_path / str(n), n, sync), cluster=cluster).sha256 for n in (1, 2, 3)}
    assert len(set(results.values())) == 1, results


def test_nor_a_death_within_a_round(cluster: LocalCluster, tmp_path: Path) -> None:
    """A program that rests gives the injector time to kill."""
    base = replace(spec(tmp_path / "whole", 1, "diloco:learners=4,every=4"), program=Program(TRANSFORMER), config={})
    whole = run_job(base, cluster=cluster)
    hit = replace(
        base, out=tmp_path / "hit", config={"pace_s": 0.2}, execution=replace(base.execution, workers=3, mesh=None)
    )
    heard: list[Record] = []
    chaos = Injector(parse_chaos("kill@step:2"), seed=1)
    assert run_job(hit, cluster=cluster, injector=chaos, observe=heard.append).sha256 == whole.sha256
    assert sum(isinstance(record, FaultInjected) for record in heard) == 1


def test_nor_do_switches_of_strategies(cluster: LocalCluster, tmp_path: Path) -> None:
    schedule = SyncSchedule.parse("2=local:learners=4,every=2; 5=diloco:learners=4,every=2; 7=allreduce")
    results = {
        n: run_job(replace(spec(tmp_path / str(n), n), sync_schedule=schedule), cluster=cluster).sha256 for n in (1, 2)
    }
    assert len(set(results.values())) == 1, results


def test_nor_do_routes(cluster: LocalCluster, tmp_path: Path) -> None:
    routes = ("native", "ring", "tree", "binary_tree:chunk_kib=64", "star")
    results = {
        route: run_job(spec(tmp_path / str(i), 3, topology=Topology.parse(route)), cluster=cluster).sha256
        for i, route in enumerate(routes)
    }
    assert len(set(results.values())) == 1, results


@pytest.mark.parametrize("compress", ["bf16", "fp16", "int8", "powersgd:rank=2", "topk:ratio=0.1"])
def test_compressed_runs_end(cluster: LocalCluster, tmp_path: Path, compress: str) -> None:
    run_spec = spec(tmp_path / "out", 2, mode="fast", compress=compress, config={"plain": True})
    ran = run_job(run_spec, cluster=cluster)
    assert ran.steps == STEPS


def test_monitors_do_not_show_workers(cluster: LocalCluster, tmp_path: Path) -> None:
    results = []
    for n in (1, 2):
        changed = replace(
            spec(tmp_path / str(n), n), program=Program(STILL), config={}, adapt=Adapt(monitors=("noise_scale",))
        )
        results.append(run_job(changed, cluster=cluster).signals)
    for name in ("noise_scale", "gradient_variance"):
        assert results[0][name] == results[1][name], (name, results)
