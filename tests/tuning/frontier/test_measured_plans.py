"""What was predicted of a plan beside what was measured: how it is run, which are, and what a failure says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastune.core.errors import UserError
from elastune.core.journal.records import RunFinished, WorkerMemory
from elastune.core.mesh import Mesh
from elastune.core.plan.cluster_plan import ClusterPlan, ProgramForecast, SearchModel
from elastune.core.plan.memory import HeldAlone
from elastune.core.plan.step_model import prior_model
from elastune.core.plan.step_time import CONSTANTS, Constant, StepSplits, StepWork
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.elastic_cluster import ElasticCluster
from elastune.runtime.clusters.fork import ForkLauncher
from elastune.runtime.job.validation import why_impossible
from elastune.train.program.load import load_as_guest
from elastune.train.rehearsal import ProgramSize, rehearse
from elastune.tuning.cluster_plan.probes import (
    MachineProbes,
    MeasuredPlan,
    TrainingPlan,
    measure_plans,
    plans_here,
    plans_on,
)

SIZE = ProgramSize(100, 16, 3, 1e6, 100.0, 100.0, 0.0, 1000, 1000, 2000, 3, 1.0, fake=True)
MIB = 2**20


def plan_of(mesh: Mesh, batch: int = 16, width: int = 1) -> ClusterPlan:
    return ClusterPlan(
        width, mesh, False, batch, 4, 1.0, (0.5, 2.0), 10.0, (5.0, 20.0), 1.0, 100.0, 1.0, ("compute", 1.0)
    )


@pytest.fixture
def probes(tmp_path: Path) -> MachineProbes:
    (tmp_path / "fixed.py").write_text("config = {'lr': 0.1}\n\ndef train(session): ...\n")
    return MachineProbes(Program(tmp_path / "fixed.py"), {}, SIZE, cores=2, budget_s=1.0)


@pytest.mark.parametrize(
    ("mesh", "sharded", "name"),
    [
        (Mesh(), False, "replicated"),
        (Mesh(data=2), False, "replicated"),
        (Mesh(shard=2), False, "zero"),
        (Mesh(shard=2), True, "sharded"),
        (Mesh(tensor=2), False, "tensor"),
        (Mesh(shard=2, pipeline=2), False, "pipeline+zero"),
        (Mesh(data=2, shard=2, tensor=2), True, "tensor+sharded"),
    ],
)
def test_a_plan_runs_as_means_that_can_run(mesh: Mesh, sharded: bool, name: str) -> None:
    execution = TrainingPlan(mesh, 16, 4, sharded).execution
    assert execution.parts == ExecutionSettings(mechanism=name, mesh=mesh, mode="fast").parts
    assert execution.workers == mesh.workers
    assert why_impossible(RunSpec(Program(Path("any.py")), Path("out"), execution=execution)) is None


def test_those_are_measured_that_have_room_here_and_a_setting(probes: MachineProbes, tmp_path: Path) -> None:
    plans = [plan_of(Mesh(data=4)), plan_of(Mesh(data=2)), plan_of(Mesh(data=2), width=3)]
    plans += [plan_of(Mesh(), batch=32), plan_of(Mesh())]
    here, large = TrainingPlan(Mesh(data=2), 16, 4), TrainingPlan(Mesh(), 32, 4)
    assert plans_here(plans, probes, 3) == (here, TrainingPlan(Mesh(), 16, 4))  # several at once are one, alone
    (tmp_path / "settable.py").write_text("config = {'batch_size': 16}\n\ndef train(session): ...\n")
    settable = replace(probes, program=Program(tmp_path / "settable.py"))
    assert plans_here(plans, settable, 2) == (here, large)


def test_errors_are_relative_to_what_was_measured() -> None:
    row = MeasuredPlan(Mesh(), "replicated", 16, 4, 0.9, (0.5, 1.5), 80.0, 1.0, 100.0)
    assert row.step_error == pytest.approx(-0.1)
    assert row.memory_error == pytest.approx(-0.2)
    assert row.within is True
    assert replace(row, measured_step_s=1.6).within is False
    unknown = replace(row, measured_step_s=None, measured_memory_bytes=None)
    assert (unknown.step_error, unknown.memory_error, unknown.within) == (None, None, None)


def test_a_plan_that_fails_says_why_and_the_others_are_measured(
    probes: MachineProbes, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"parameters": 1000, "gradients": 1000, "optimizer": 2000, "copies": 0}
    probes.held[Mesh(), 16] = [WorkerMemory(0, **state, activations=0, peak=100 * MIB)]
    probes.held[Mesh(data=2), 8] = [WorkerMemory(0, **state, activations=0, peak=130 * MIB)]

    def run(self: MachineProbes, cluster: Any, execution: ExecutionSettings, **config: Any) -> RunFinished:
        if execution.first_mesh.tensor > 1:
            raise UserError("a plan must run", "no such thing", "nothing")
        results = [WorkerMemory(rank, **state, activations=0, peak=140 * MIB) for rank in range(execution.workers)]
        return RunFinished("0" * 64, execution.workers, 12, 192, 3.0, {}, step_s=0.25, memory=results)

    monkeypatch.setattr(MachineProbes, "run", run)
    constants = [Constant(name, 1e-9, 1.5) for name in CONSTANTS]
    work = StepWork(*(np.array(x) for x in (3.0, 1e6, 100.0, 100.0, 300.0, 0.0, 0.0)))
    model = prior_model(constants, work, StepSplits(*(np.ones(0) for _ in range(7))), 0.05)
    forecast = ProgramForecast(model, work, HeldAlone(1e3, 1e3, 2e3, 0, 0), SearchModel(1, 10.0, 16, 0.0))
    two, broken = measure_plans(
        [TrainingPlan(Mesh(data=2), 16, 4), TrainingPlan(Mesh(tensor=2), 16, 4)], forecast, probes
    )
    assert two.measured_step_s == 0.25
    assert two.step_interval_s[0] < two.step_s < two.step_interval_s[1]
    assert two.measured_memory_bytes == pytest.approx(10 * MIB + 7000)
    assert broken.measured_step_s is None
    assert "no such thing" in broken.failed


def test_a_cluster_that_is_given_is_where_plans_run(probes: MachineProbes, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [plan_of(Mesh(data=4)), plan_of(Mesh(data=4), width=2), plan_of(Mesh(), batch=32), plan_of(Mesh(data=2))]
    chosen = plans_on(plans, probes, 5)
    assert [plan.mesh for plan in chosen] == [Mesh(data=4), Mesh(data=2)], "more workers than this machine has cores"
    there, asked = object(), list[tuple[Any, int]]()
    probes.held[Mesh(), 16] = [WorkerMemory(0, 1000, 1000, 2000, 0, 0, 100 * MIB)]

    def run(self: MachineProbes, cluster: Any, execution: ExecutionSettings, **config: Any) -> RunFinished:
        asked.append((cluster, execution.workers))
        return RunFinished("0" * 64, execution.workers, 12, 192, 3.0, {}, step_s=0.25)

    monkeypatch.setattr(MachineProbes, "run", run)
    wide, narrow = (measure_plans(chosen, forecast_of(), probes, there, near) for near in (1, 4))  # type: ignore[arg-type]
    assert asked == [(there, 4), (there, 2)] * 2
    assert wide[0].step_s > narrow[0].step_s, "gradients cross between nodes of one worker"


def test_plans_are_measured_on_an_elastic_cluster(tmp_path: Path) -> None:
    """A cluster of agents without the agents: the same elastic runs, forked here."""
    (tmp_path / "wide.py").write_text(WIDE)
    program = Program(tmp_path / "wide.py")
    size = rehearse(load_as_guest(program), program, {})
    own = MachineProbes(program, {}, size, cores=2, budget_s=1.0, out=tmp_path / "out")
    own.held[Mesh(), size.batch_size] = [WorkerMemory(0, 1000, 1000, 2000, 0, 0, 100 * MIB)]
    plans = [TrainingPlan(Mesh(data=2), size.batch_size, 4), TrainingPlan(Mesh(shard=2), size.batch_size, 4)]
    with ElasticCluster(ForkLauncher(2, preload=())) as cluster:
        rows = measure_plans(plans, forecast_of(), own, cluster, 1)
    assert [row.failed for row in rows] == ["", ""]
    assert all(row.measured_step_s is not None and row.measured_step_s > 0 for row in rows)


def forecast_of() -> ProgramForecast:
    constants = [Constant(name, 1e-3 if name == "across_hop_s" else 1e-9, 1.5) for name in CONSTANTS]
    work = StepWork(*(np.array(x) for x in (3.0, 1e6, 100.0, 100.0, 300.0, 0.0, 0.0)))
    model = prior_model(constants, work, StepSplits(*(np.ones(0) for _ in range(7))), 0.05)
    return ProgramForecast(model, work, HeldAlone(1e3, 1e3, 2e3, 0, 0), SearchModel(1, 10.0, 16, 0.0))


WIDE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

config = {}

def train(session):
    data = TensorDataset(torch.randn(256, 16), torch.randn(256, 2))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters()))
    for _ in session.epochs(1):
        for x, y in session.batches(data, batch_size=8):
            session.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        session.report(done=1.0)
"""
