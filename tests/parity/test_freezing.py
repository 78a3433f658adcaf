"""What is frozen in mid-run trains as in plain PyTorch, with the same bits on any workers; or it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.parity.programs import freezing
from tests.soaked import soaked
from tests.support.elastic_runs import Runs
from tests.support.sessions import lone_session

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, Program, RunSpec, derive
from elastune.core.slots import Mode
from elastune.parallel.mechanisms.tensor_storage import whole
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job
from elastune.train.checkpoints.start_from import weights_in
from elastune.train.rng import epoch_order, seed_everything

PROGRAM = Program(Path(__file__).parent / "programs" / "freezing.py")


@pytest.mark.parametrize("how", ["rate", "body", *soaked("flag")])
def test_workers_deaths_and_joiners_do_not_show_in_it(cluster: LocalCluster, tmp_path: Path, how: str) -> None:
    """A joiner has not run the lines that freeze and unfreeze: it comes in the second epoch, or later."""
    runs = Runs(cluster, tmp_path, PROGRAM)
    alone, three = runs(1, how=how), runs(3, how=how, faults=["kill 1 5 after", "kill 0 9 passed"])

    grown = runs(1, how=how, resize=["4 2"])
    assert three.sha256 == alone.sha256 == grown.sha256
    assert three.reports == alone.reports == grown.reports
    assert sorted(three.lost) == [0, 1]
    assert max(len(r.members) for r in grown.regrouped) == 2


@pytest.mark.parametrize("how", ["flag", *soaked("rate")])
def test_a_resumed_run_goes_on_as_it_was(cluster: LocalCluster, tmp_path: Path, how: str) -> None:
    """Lines behind ``session.prepare`` freeze the body; the line that unfroze it is not run again."""
    spec = RunSpec(
        PROGRAM, tmp_path / "whole", config={"how": how}, execution=ExecutionSettings(workers=2, num_slots=4)
    )
    undisturbed = run_job(spec, cluster=cluster)
    halted = replace(spec, out=tmp_path / "halted")
    run_job(replace(halted, max_steps=8), cluster=cluster)
    resumed = run_job(replace(halted, resume=True), cluster=cluster)
    assert (resumed.sha256, resumed.steps) == (undisturbed.sha256, 12)


@pytest.mark.parametrize(
    ("how", "mode"), [("flag", "exact"), ("body", "fast"), *soaked(("flag", "fast"), ("rate", "exact"))]
)
def test_it_is_what_plain_pytorch_does(cluster: LocalCluster, tmp_path: Path, how: str, mode: Mode) -> None:
    spec = RunSpec(
        PROGRAM, tmp_path / "out", config={"how": how}, execution=ExecutionSettings(workers=2, mode=mode, num_slots=4)
    )
    run_job(spec, cluster=cluster)
    seed_everything(derive(spec.seed, "init"))
    model, optimizer = freezing.build()
    freezing.before(how, model, optimizer)
    inputs, targets = freezing.data().tensors
    steps = 0
    for epoch in range(4):
        freezing.begins(how, epoch, model, optimizer)
        for places in epoch_order(48, spec.seed, epoch).split(16):
            if how == "body":
                model[0].requires_grad_(steps % 2 == 0)
            F.cross_entropy(model(inputs[places]), targets[places]).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    with weights_in(spec.out) as (result, _):
        kept = {name: whole(tensor) for name, tensor in result.items()}
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor, kept[name], atol=1e-6), name


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("late", "requires gradients when session.prepare is called (got 0.weight"),
        ("group", "has all its parameter groups when session.prepare is called"),
        ("forgetful", "frozen parameters 0.weight, 0.bias"),
    ],
)
def test_what_cannot_be_right_is_refused(cluster: LocalCluster, tmp_path: Path, how: str, words: str) -> None:
    spec = RunSpec(PROGRAM, tmp_path / "out", config={"how": how}, execution=ExecutionSettings(workers=2, num_slots=4))
    with pytest.raises(JobFailed) as failed:
        run_job(spec, cluster=cluster)
    assert failed.value.failure.reason == "user_error"
    assert words in failed.value.failure.detail


@pytest.mark.parametrize("mechanism", ["zero", "sharded"])
def test_a_model_in_pieces_is_frozen_before(tmp_path: Path, mechanism: Any) -> None:
    session = lone_session(tmp_path, execution=ExecutionSettings(mechanism=mechanism, num_slots=4))
    model, optimizer = session.prepare(*freezing.build())
    with pytest.raises(UserError, match="decided before session.prepare"):
        for epoch in session.epochs(2):
            model[0].requires_grad_(epoch == 0)
            for x, y in session.batches(freezing.data(), batch_size=16):
                session.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    assert session.epoch == 1
