"""On one GPU: workers that share it reduce over gloo, through host memory, to the same bits; plain PyTorch's, too.

Needs no data set but the embedded digits, and no other machine.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastune.core.journal.records import FaultInjected, Record
from elastune.core.layout import UNIT
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Place, Program, RunSpec
from elastune.parallel.comm.norms import unit_squares
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.fault_injection import Injector, parse_chaos
from elastune.runtime.job.run import JobFailed, run_job
from elastune.train.worker import _factory

PROGRAMS = Path(__file__).parent / "programs"
CNN, TRANSFORMER = PROGRAMS / "lenet.py", PROGRAMS / "transformer.py"
STEPS, SEED = 8, 3  # the transformer's first epoch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def spec(
    out: Path, program: Path, workers: int = 1, precision: str = "fp32", mechanism: str = "replicated", **config
) -> RunSpec:
    execution = ExecutionSettings(workers=workers, device="cuda", precision=precision, mechanism=mechanism)  # type: ignore[arg-type]
    return RunSpec(Program(program), out, config=config, seed=SEED, execution=execution, max_steps=STEPS)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("program", [CNN, TRANSFORMER], ids=["cnn", "transformer"])
def test_weights_do_not_show_workers(cluster: LocalCluster, tmp_path: Path, program: Path, precision: str) -> None:
    """Dropout, BatchNorm and attention; TF32 as torch has it."""
    results = {
        workers: run_job(spec(tmp_path / str(workers), program, workers, precision), cluster=cluster).sha256
        for workers in (1, 2, 4)
    }
    assert len(set(results.values())) == 1, results


def test_weights_are_plain_pytorchs_and_do_not_show_a_death(cluster: LocalCluster, tmp_path: Path) -> None:
    command = [sys.executable, str(TRANSFORMER), str(STEPS), str(SEED)]
    plain = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout.split()[-1]
    heard: list[Record] = []
    slow, chaos = spec(tmp_path, TRANSFORMER, 3, pace_s=0.2), Injector(parse_chaos("kill@step:2,kill@step:5"), seed=1)
    assert run_job(slow, cluster=cluster, injector=chaos, observe=heard.append).sha256 == plain
    assert sum(isinstance(record, FaultInjected) for record in heard) == 2


def test_the_streams_of_a_gru_are_its_slots(cluster: LocalCluster, tmp_path: Path) -> None:
    """Its dropout is drawn inside of cuDNN."""
    runs = [run_job(spec(tmp_path / str(n), TRANSFORMER, n, layer="gru"), cluster=cluster) for n in (1, 2)]
    assert runs[0].sha256 == runs[1].sha256


@pytest.mark.parametrize("program", [CNN, TRANSFORMER], ids=["cnn", "transformer"])
def test_nor_do_they_show_how_state_lies(cluster: LocalCluster, tmp_path: Path, program: Path) -> None:
    """The norm of the whole gradient is added up of pieces, on workers that hold other ones."""
    runs = [(1, "replicated"), (2, "zero"), (4, "zero")]
    results = {
        run: run_job(spec(tmp_path / str(run), program, *run[:1], "fp32", run[1], own_clip=False), cluster=cluster)
        for run in runs
    }
    assert len({result.sha256 for result in results.values()}) == 1, results


@pytest.mark.parametrize(
    ("program", "first", "others"),
    [
        (
            "shares.py",
            ExecutionSettings(device="cuda"),
            [
                ExecutionSettings(mechanism="sharded", workers=2, device="cuda"),
                ExecutionSettings(mesh=Mesh(pipeline=2), device="cuda"),
                ExecutionSettings(mesh=Mesh(data=2, pipeline=2), device="cuda"),
            ],
        ),
        (
            "layers.py",
            ExecutionSettings(mechanism="tensor", device="cuda"),
            [ExecutionSettings(mesh=Mesh(tensor=2), device="cuda")],
        ),
    ],
    ids=["shards and stages", "blocks"],
)
def test_nor_the_mesh(
    cluster: LocalCluster, tmp_path: Path, program: str, first: ExecutionSettings, others: list[ExecutionSettings]
) -> None:
    """Weights, and the norms that the program reports."""
    execution = [first, *others]
    runs = [
        run_job(
            RunSpec(Program(PROGRAMS / program), tmp_path / str(i), seed=SEED, execution=each, max_steps=STEPS),
            cluster=cluster,
        )
        for i, each in enumerate(execution)
    ]
    assert {(run.sha256, run.metrics["norms"]) for run in runs} == {(runs[0].sha256, runs[0].metrics["norms"])}


def test_squares_of_units_do_not_show_the_pieces() -> None:
    flat = torch.randn(9 * UNIT + 17, device="cuda") * 10
    for cut in (1, 4, 8):
        pieces = list(flat.split([cut * UNIT, len(flat) - cut * UNIT]))
        assert torch.equal(unit_squares(pieces), unit_squares([flat]))


def test_an_operation_without_an_order_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="add in one order .got grid_sampler_2d_backward_cuda.") as error:
        run_job(spec(tmp_path, TRANSFORMER, layer="grid"), cluster=cluster)
    assert error.value.failure.reason == "user_error"


def test_workers_that_share_a_gpu_reduce_over_gloo(tmp_path: Path) -> None:
    gpus = torch.cuda.device_count()
    place = Place(device="cuda:0", own_device=True)
    assert _factory(spec(tmp_path, CNN, gpus), place).backend == "nccl"
    assert _factory(spec(tmp_path, CNN, gpus + 1), place).backend == "gloo"
