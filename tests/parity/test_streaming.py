"""A stream: no sample twice and none lost, the same bits on any workers, whoever dies, joins or resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.parity.programs import streaming
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs
from torch.utils.data import DataLoader

from elastune.core.run import ExecutionSettings, Program, RunSpec, derive
from elastune.parallel.mechanisms.tensor_storage import whole
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job
from elastune.train.checkpoints.start_from import weights_in
from elastune.train.rng import seed_everything

PROGRAM = Program(Path(__file__).parent / "programs" / "streaming.py")


@pytest.fixture(scope="module")
def alone(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Runs(cluster, tmp_path_factory.mktemp("alone"), PROGRAM)(1)


def test_one_worker_takes_each_sample_once(alone: Ran) -> None:
    assert alone.ledger.exact
    assert [epoch.length for epoch in alone.ledger.epochs] == [69, 70, 71]
    assert [epoch.once for epoch in alone.ledger.epochs] == [69, 70, 71]
    assert [report["seen"] for report in alone.reports] == [33, 33, 33]


@pytest.mark.parametrize(
    "faults",
    [
        ["kill 0 5 before", "kill 2 10 evaluating"],  # in the epoch's last step; and all go back behind it
        *soaked(["kill 1 3 after"]),  # in mid-epoch: those who are left read nothing again
    ],
)
def test_deaths_do_not_show(cluster: LocalCluster, tmp_path: Path, alone: Ran, faults: list[str]) -> None:
    three = Runs(cluster, tmp_path, PROGRAM)(3, faults=faults)
    assert len(three.lost) == len(faults)
    assert three.sha256 == alone.sha256
    assert three.reports == alone.reports
    assert three.ledger.exact
    assert [epoch.once for epoch in three.ledger.epochs] == [69, 70, 71]


def test_a_joiner_reads_up_to_where_the_others_are(cluster: LocalCluster, tmp_path: Path, alone: Ran) -> None:
    grown = Runs(cluster, tmp_path, PROGRAM)(1, resize=["2 2"])
    assert max(len(r.members) for r in grown.regrouped) == 2
    assert grown.sha256 == alone.sha256
    assert grown.ledger.exact


@pytest.mark.parametrize("loaders", [2, *soaked(0)])
def test_a_resumed_run_goes_on_where_it_was(cluster: LocalCluster, tmp_path: Path, loaders: int) -> None:
    """In mid-epoch, and with another number of workers; in loading processes, too."""
    spec = RunSpec(
        PROGRAM,
        tmp_path / "whole",
        config={"loaders": loaders, "epochs": 2},
        execution=ExecutionSettings(workers=1, num_slots=4),
    )
    undisturbed = run_job(spec, cluster=cluster)
    halted = replace(spec, out=tmp_path / "halted", execution=ExecutionSettings(workers=2, num_slots=4))
    run_job(replace(halted, max_steps=7), cluster=cluster)
    resumed = run_job(replace(halted, resume=True), cluster=cluster)
    assert (resumed.sha256, resumed.steps, resumed.samples) == (undisturbed.sha256, 10, 139)


def test_it_is_the_plain_loop(cluster: LocalCluster, tmp_path: Path) -> None:
    spec = RunSpec(
        PROGRAM, tmp_path / "out", config={"plain": True}, execution=ExecutionSettings(workers=2, num_slots=4)
    )
    run_job(spec, cluster=cluster)
    seed_everything(derive(spec.seed, "init"))
    model, optimizer = streaming.build()
    stream = streaming.Stream(69, augments=False)
    for epoch in range(3):
        stream.set_epoch(epoch)
        for x, y in DataLoader(stream, batch_size=16):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    with weights_in(spec.out) as (result, _):
        kept = {name: whole(tensor) for name, tensor in result.items()}
    for name, tensor in model.state_dict().items():
        assert torch.allclose(tensor, kept[name], atol=1e-6), name


def test_workers_that_read_other_items_complete_no_step(cluster: LocalCluster, tmp_path: Path) -> None:
    spec = RunSpec(
        PROGRAM, tmp_path / "out", config={"unseeded": True}, execution=ExecutionSettings(workers=2, num_slots=4)
    )
    with pytest.raises(JobFailed) as failed:
        run_job(spec, cluster=cluster)
    assert failed.value.failure.reason == "user_error"
    assert "all ranks must take a step with the same data" in failed.value.failure.detail


def test_turns_take_each_batch_of_it_twice(cluster: LocalCluster, tmp_path: Path) -> None:
    runs = Runs(cluster, tmp_path, PROGRAM)
    one, two = runs(1, turns=2, epochs=1), runs(2, turns=2, epochs=1, faults=["kill 0 4 after"])
    assert one.sha256 == two.sha256
    assert one.outcome.steps == 10
    assert one.ledger.exact
    assert two.ledger.exact
