"""What a worker is said to hold beside what one was measured to hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from elastune.core.journal.records import WorkerMemory
from elastune.core.mesh import Mesh
from elastune.core.plan.memory import BUFFERS, peak_bytes
from elastune.core.plan.step_time import StepSplits
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.reducer import FlatBucket
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.program.load import load_as_guest
from elastune.train.rehearsal import rehearse
from elastune.tuning.cluster_plan.probes import beside_bytes, held_by, step_work, trained_bytes

WIDE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

config = {}

def train(session):
    data = TensorDataset(torch.randn(64, 64), torch.randn(64, 8))
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 8))
    model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters()))
    for _ in session.epochs(1):
        for x, y in session.batches(data, batch_size=8):
            session.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        session.report(done=1.0)
"""


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(shard=2)], ids=str)
def test_a_run_holds_what_was_said_before_it_began(
    mesh: Mesh, tmp_path: Path, processes: None, forked_from: Callable[..., AbstractContextManager[None]]
) -> None:
    """Measured in new processes: what a fork of the tests' has freed before would be taken for room."""
    (tmp_path / "wide.py").write_text(WIDE)
    program = Program(tmp_path / "wide.py")
    size = rehearse(load_as_guest(program), program, {})
    sharded = mesh.shard > 1
    splits = StepSplits(*(np.array([x], float) for x in (8, 4, mesh.data, mesh.shard, 1, 1, 2)))
    held = replace(held_by(size), buffer=0.0)  # buffers were there before the step that was looked at
    said = peak_bytes(held, step_work(size), splits, sharded)[0]
    execution = ExecutionSettings(mode="fast", mesh=mesh, micro_batch=4)
    execution = replace(execution, mechanism="sharded", copies=1) if sharded else execution
    with LocalCluster(2) as cluster, forked_from(cluster):
        result = run_job(RunSpec(program, tmp_path / "out", execution=execution, max_steps=4), cluster=cluster).memory
    assert len(result) == 2
    state = (size.parameter_bytes + size.gradient_bytes + size.optimizer_bytes) / (2 if sharded else 1)
    assert state == pytest.approx(max(trained_bytes(each) - (each.activations or 0) for each in result), rel=0.02)
    # What a step needs beside its state is measured by whole processes, which keep what they have freed.
    assert said == pytest.approx(max(trained_bytes(each) for each in result), rel=0.25)


def test_a_bucket_that_survives_a_loss_has_as_many_buffers_as_are_counted() -> None:
    like = [torch.zeros(300_000)]
    bucket = FlatBucket([0], like, Group(), hold=True)
    tensors = [each for kept in vars(bucket).values() for each in (kept if isinstance(kept, list) else [kept])]
    there = sum(each.numel() for each in tensors if isinstance(each, torch.Tensor))
    assert there == pytest.approx(BUFFERS * like[0].numel(), rel=0.01)


def test_what_was_measured_counts_where_it_is_more(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    program = Program(tmp_path / "wide.py")
    size = rehearse(load_as_guest(program), program, {})
    state = (size.parameter_bytes, size.gradient_bytes, size.optimizer_bytes)
    more = WorkerMemory(0, *state, copies=0, activations=10**9, peak=3 * 10**9)
    held = held_by(size, [more])
    assert (held.kept_split + held.kept_whole) * size.batch_size + held.fixed == pytest.approx(1e9)
    less = WorkerMemory(0, *state, copies=0, activations=0, peak=0)
    assert held_by(size, [less]) == held_by(size)
    assert beside_bytes([more]) == pytest.approx(3e9 - 1e9 - sum(state) - BUFFERS * size.gradient_bytes)
    assert beside_bytes([less]) == 0.0
