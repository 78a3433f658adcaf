"""The gradient noise scale of real runs against its exact value, from the gradient of every single sample."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.soaked import soaked
from torch.func import functional_call, grad, vmap

from elastune.core.journal.records import RunFinished
from elastune.core.run import Adapt, Elastic, ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job

PROGRAM = Path(__file__).parent / "programs" / "still.py"
STEPS = 200


@pytest.fixture(scope="module")
def exact() -> tuple[float, float]:
    """tr(Sigma) and |G|^2 over all samples."""
    spec = importlib.util.spec_from_file_location("still", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, x, y = module.problem()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, params, x[None]), y[None])

    grads = vmap(grad(loss), (None, 0, 0))(params, x, y)
    rows = torch.cat([g.flatten(1) for g in grads.values()], 1).double()
    mean = rows.mean(0)
    return float((rows - mean).square().sum(1).mean()), float(mean.square().sum())


def measured(
    cluster: LocalCluster, out: Path, workers: int, mode: Any, micro_batch: int | None, batch: int
) -> RunFinished:
    execution = ExecutionSettings(workers=workers, mode=mode, micro_batch=micro_batch, num_slots=4)
    adapt = Adapt(monitors=("noise_scale:memory=200",))
    config = {"batch_size": batch}
    elastic = Elastic(1, workers)
    spec = RunSpec(Program(PROGRAM), out, config, execution=execution, max_steps=STEPS, adapt=adapt, elastic=elastic)
    return run_job(spec, cluster=cluster)


@pytest.mark.parametrize(
    ("mode", "workers", "batch", "micro_batch"),
    [  # equal parts; unequal ones, and accumulation. One worker in fast mode has parts only where it accumulates.
        ("exact", 2, 75, 9),
        ("fast", 1, 75, 9),
        ("fast", 2, 64, None),
        *soaked(("exact", 1, 64, None), ("exact", 4, 64, None), ("fast", 4, 75, 9)),
    ],
)
def test_within_a_tenth_after_200_steps(
    cluster: LocalCluster,
    tmp_path: Path,
    exact: tuple[float, float],
    mode: str,
    workers: int,
    batch: int,
    micro_batch: int | None,
) -> None:
    run = measured(cluster, tmp_path / "out", workers, mode, micro_batch, batch)
    variance, square = exact
    value, error = run.signals["noise_scale"]
    assert value == pytest.approx(variance / square, rel=0.1), (value, error, variance / square)
    assert run.signals["gradient_variance"][0] == pytest.approx(variance, rel=0.1)
    assert run.metrics["differ"] == 0.0, "every rank holds the same bits"
