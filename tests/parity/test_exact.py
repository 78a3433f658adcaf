"""The bar of exact mode: one SHA-256 for any number of workers, any interruption, and for plain PyTorch."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.soaked import soaked

from elastune.core.run import ExecutionSettings, Program, RunSpec, derive
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.checkpoints.checkpoint import complete
from elastune.train.checkpoints.tree import fingerprint

PROGRAM = Path(__file__).parent / "programs" / "lenet.py"
STEPS = 12  # of which the 10th is a partial batch
SLOTS = 8


def load_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lenet_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file with the program's data."""
    images, labels = load_program().data().tensors
    file = tmp_path_factory.mktemp("samples") / "samples"
    save_file({"images": images, "labels": labels}, file)
    return str(file)


def spec(out: Path, workers: int, steps: int = STEPS, seed: int = 3, **changes) -> RunSpec:
    execution = ExecutionSettings(
        workers=workers, num_slots=SLOTS, **{k: changes.pop(k) for k in ("mode",) if k in changes}
    )
    return RunSpec(Program(PROGRAM), out, config=changes, seed=seed, execution=execution, max_steps=steps)


def reference(name: str, schedule: str, samples: str) -> str:
    """The same training in plain PyTorch, one process, slots and their sum written out."""
    program = load_program()
    seed = 3
    torch.manual_seed(derive(seed, "init"))
    model = program.LeNet()
    optimizer = program.optimizer_of(name, model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99 if schedule == "step" else 1.0)
    images, labels = program.data(samples).tensors
    params, buffers = list(model.parameters()), list(model.buffers())
    step = 0
    for epoch in itertools.count():
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(derive(seed, "order", epoch)))
        for batch in order.split(100):
            start = [b.clone() for b in buffers]
            grads, moves = [], []
            for slot in range(SLOTS):
                low, high = len(batch) * slot // SLOTS, len(batch) * (slot + 1) // SLOTS
                weight = (high - low) / len(batch)
                for b, s in zip(buffers, start, strict=True):
                    b.copy_(s)
                torch.manual_seed(derive(seed, "slot", step, slot, low))
                x, y = images[batch[low:high]], labels[batch[low:high]]
                grads.append(torch.autograd.grad(F.cross_entropy(model(x), y) * weight, params))
                moves.append([(b - s) * weight for b, s in zip(buffers, start, strict=True) if b.is_floating_point()])
            for p, *g in zip(params, *grads, strict=True):
                p.grad = ((g[0] + g[1]) + (g[2] + g[3])) + ((g[4] + g[5]) + (g[6] + g[7]))
            moved = (
                ((m[0] + m[1]) + (m[2] + m[3])) + ((m[4] + m[5]) + (m[6] + m[7])) for m in zip(*moves, strict=True)
            )
            for b, s in zip(buffers, start, strict=True):
                if b.is_floating_point():
                    b.copy_(s + next(moved))
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            if step == STEPS:
                return fingerprint({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    raise AssertionError


@pytest.mark.parametrize(("optimizer", "schedule"), [("adamw", "step"), *soaked(("sgd", "none"))])
def test_weights_do_not_show_workers_nor_interruptions(
    cluster: LocalCluster, tmp_path: Path, samples: str, optimizer: str, schedule: str
) -> None:
    changes = {"optimizer": optimizer, "schedule": schedule, "samples": samples}
    results = {
        workers: run_job(spec(tmp_path / f"w{workers}", workers, **changes), cluster=cluster) for workers in (1, 3, 4)
    }
    first = spec(tmp_path / "cut", 3, steps=8, **changes)
    half = run_job(first, cluster=cluster)
    assert (half.steps, half.stopped) == (8, "max_steps")
    rest = spec(tmp_path / "cut", 2, **changes)
    resumed = run_job(replace(rest, resume=True), cluster=cluster)

    assert {run.steps for run in [*results.values(), resumed]} == {STEPS}
    expected = reference(optimizer, schedule, samples)
    assert {workers: run.sha256 for workers, run in results.items()} == dict.fromkeys(results, expected)
    assert resumed.sha256 == expected
    assert half.sha256 != expected


def final_model(out: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(complete(out / "checkpoints")[-1] / "tensors.safetensors")
    return {name: tensor.double() for name, tensor in tensors.items() if ".model." in name}


def largest_gap(a: Path, b: Path) -> float:
    """The largest difference of a tensor, relative to its norm."""
    one, two = final_model(a), final_model(b)
    assert one.keys() == two.keys()
    return max(float((one[n] - two[n]).norm() / one[n].norm().clamp_min(1e-12)) for n in one)


# In single precision rounding is amplified from step to step, most by BatchNorm and max-pooling, so a tight bound holds
# for a few steps only; in double precision a mistake would show and rounding does not. (The 10th batch is a partial
# one: fast mode averages buffers over workers without weights, so that a share of 12 samples counts as one of 13.)
PRECISIONS = pytest.mark.parametrize(("double", "steps", "bound"), [(True, 9, 1e-12), *soaked((False, 4, 1e-5))])


@PRECISIONS
def test_fast_equals_exact_where_every_worker_has_one_slot(
    cluster: LocalCluster, tmp_path: Path, samples: str, double: bool, steps: int, bound: float
) -> None:
    """With dropout and BatchNorm: one slot a worker means the same streams and the same statistics."""
    for mode in ("exact", "fast"):
        run = spec(tmp_path / mode, 4, steps=steps, mode=mode, double=double, samples=samples)
        run_job(replace(run, execution=replace(run.execution, num_slots=4)), cluster=cluster)
    assert largest_gap(tmp_path / "exact", tmp_path / "fast") < bound


@PRECISIONS
def test_fast_equals_exact_for_any_workers_without_dropout_and_batchnorm(
    cluster: LocalCluster, tmp_path: Path, samples: str, double: bool, steps: int, bound: float
) -> None:
    plain = {"steps": steps, "plain": True, "double": double, "samples": samples}
    run_job(spec(tmp_path / "exact", 2, **plain), cluster=cluster)
    for workers in (1, 2, 3):
        out = tmp_path / f"fast{workers}"
        run_job(spec(out, workers, mode="fast", **plain), cluster=cluster)
        assert largest_gap(tmp_path / "exact", out) < bound
