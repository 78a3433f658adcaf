"""What programs do on a GPU beside plain loops: compiled code, fused optimizers, scalers, calls by name, resuming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job

PROGRAMS = Path(__file__).parent / "programs"
CNN, COMPILED = PROGRAMS / "lenet.py", PROGRAMS / "compiled.py"
SEED, STEPS, DEVICE = 3, 8, "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOOP = """
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

def train(session):
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01{fused})
    model, optimizer = session.prepare(model, optimizer)
    {before}
    x = torch.linspace(0, 1, 1024).view(256, 4)
    for _ in session.epochs(2):
        for one, other in session.batches(TensorDataset(x, x.sum(1, keepdim=True)), 64):
            {step}
            optimizer.zero_grad()
"""
PLAIN = "session.backward(mse_loss(model(one), other)); optimizer.step()"
SCALED = """with torch.autocast(one.device.type, torch.float16):
                loss = mse_loss(model(one), other)
            session.backward(scaler.scale(loss)); scaler.step(optimizer); scaler.update()"""
NAMED = """
            if session.ends_step:
                mine = torch.ones(3, device=one.device) * (session.step + 1)
                begun = session.allreduce("sum", mine), session.broadcast("root", mine), session.gather("rows", mine)
                for each in begun:
                    value = each.wait().value
                    for row in value if isinstance(value, list) else [value]:
                        assert torch.isfinite(row).all()"""
SCALER = 'scaler = session.track("scaler", torch.amp.GradScaler(next(model.parameters()).device.type))'


def hashes(cluster: LocalCluster, out: Path, program: Program, **config: Any) -> set[str | None]:
    execution = (ExecutionSettings(workers=n, device=DEVICE) for n in (1, 2))
    specs = [RunSpec(program, out / str(each.workers), dict(config), seed=SEED, execution=each) for each in execution]
    return {run_job(each, cluster=cluster).sha256 for each in specs}


@pytest.mark.parametrize(
    ("fused", "before", "step"),
    [(", fused=True", "pass", PLAIN), ("", SCALER, SCALED), ("", "pass", PLAIN + NAMED)],
    ids=["fused", "scaler", "named"],
)
def test_loops_do_not_show_workers(
    cluster: LocalCluster,
    tmp_path: Path,
    program: Callable[[str], Program],
    fused: str,
    before: str,
    step: str,
) -> None:
    text = LOOP.format(fused=fused, before=before, step=step)
    assert len(hashes(cluster, tmp_path, program(text))) == 1


def test_nor_does_what_is_compiled(cluster: LocalCluster, tmp_path: Path) -> None:
    """By Triton; the second run reads what the first has made."""
    assert len(hashes(cluster, tmp_path, Program(COMPILED), cache=str(tmp_path / "cache"))) == 1


def test_a_checkpoint_goes_on_with_other_workers(cluster: LocalCluster, tmp_path: Path) -> None:
    execution, config = ExecutionSettings(workers=2, device=DEVICE), {"optimizer": "adamw", "schedule": "step"}
    whole = RunSpec(Program(CNN), tmp_path / "whole", config, seed=SEED, execution=execution, max_steps=STEPS)
    expected = run_job(whole, cluster=cluster).sha256
    cut = replace(whole, out=tmp_path / "cut", max_steps=STEPS // 2)
    run_job(cut, cluster=cluster)
    rest = replace(cut, execution=ExecutionSettings(workers=1, device=DEVICE), max_steps=STEPS, resume=True)
    assert run_job(rest, cluster=cluster).sha256 == expected


def test_nor_does_state_with_copies_or_in_the_cpus_memory(cluster: LocalCluster, tmp_path: Path) -> None:
    """The CPU takes the steps of what lies in its memory, and rounds otherwise than the GPU: these have bits of their
    own, whoever computes them.
    """
    plain, zero = ExecutionSettings(device=DEVICE), ExecutionSettings(workers=3, device=DEVICE, mechanism="zero")
    changed = replace(zero, offload=True)
    asked = [plain, replace(zero, copies=2), changed, replace(changed, workers=2, mesh=None)]
    config = {"own_clip": False, "optimizer": "adamw"}
    results = [
        run_job(
            RunSpec(Program(CNN), tmp_path / str(i), config, seed=SEED, execution=execution, max_steps=STEPS),
            cluster=cluster,
        ).sha256
        for i, execution in enumerate(asked)
    ]
    assert results[0] == results[1]
    assert results[2] == results[3]
