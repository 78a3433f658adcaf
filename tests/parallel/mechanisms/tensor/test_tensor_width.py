"""The number of workers along the tensor axis does not show; neither do blocks, but for rounding."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from elastune.core.mesh import AXES, Mesh
from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice, Mode
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.base import ModelParallel
from elastune.parallel.mechanisms.tensor.layers import Divided
from elastune.parallel.mechanisms.tensor.tensor_parallel import TensorParallel, plan_layers
from elastune.parallel.mechanisms.tensor.trunk import divide_layers
from elastune.testing.worker_processes import LIMIT_S, Worker, processes

if str(Path(__file__).parent) not in sys.path:  # worker processes import the models by their name
    sys.path.append(str(Path(__file__).parent))

from models import EXAMPLES, Example, built, samples

BLOCKS, STEPS, WIDEST = 4, 3, 4
ALL = BatchSlice(range(6), 0, 1.0, ends_slot=True, ends_step=True)


def divided(example: Example, dtype: torch.dtype, mode: Mode = "exact") -> TensorParallel:
    model = built(example, dtype)
    if example.plan is not None:
        plan_layers(model, example.plan)
    division = divide_layers(ModelParallel(model), ExecutionSettings(virtual_tensor=BLOCKS, mode=mode))
    assert isinstance(division, TensorParallel)
    return division


def along(group: Group) -> Comms:
    return Comms(Mesh(tensor=group.size), group, {a: group if a == "tensor" else Group() for a in AXES}, Group())


def trained(example: Example, dtype: torch.dtype, group: Group, mode: Mode = "exact") -> dict[str, torch.Tensor]:
    """The state after some steps, whole, and what the model then says; every block updated where it is computed."""
    division = divided(example, dtype, mode)
    division.enter(along(group))
    run(division.model, example, dtype, lambda loss: list(division.backward(loss, ALL)))
    return state_of(division.model, example, dtype)


def run(model: nn.Module, example: Example, dtype: torch.dtype, backward) -> None:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        torch.manual_seed(step)
        backward(model(samples(example, step, dtype)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, example: Example, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model.eval()
    with torch.no_grad():
        results = {"says": model(samples(example, 99, dtype))}
        for prefix, layer in model.named_modules():
            for name in layer.divided if isinstance(layer, Divided) else ():
                results[f"{prefix}.{name}".lstrip(".")] = layer._gathered(name)
        results |= {name: value for name, value in model.named_parameters(remove_duplicate=False) if "#" not in name}
        return results | dict(model.named_buffers())


def sha(state: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def work(worker: Worker) -> None:
    """Train every example on 1, 2, 3 and 4 workers; then in fast mode on all."""
    factory = GlooFactory("lo", LIMIT_S)
    for width in range(1, WIDEST + 1):
        if worker.rank < width:
            group = factory.form(worker.store, f"{width}", worker.rank, width)
            worker.send({name: sha(trained(example, torch.float32, group)) for name, example in EXAMPLES.items()})
    group = factory.form(worker.store, "fast", worker.rank, worker.size)
    worker.send({name: trained(example, torch.float64, group, "fast") for name, example in EXAMPLES.items()})
    worker.receive()


@pytest.mark.soak
def test_the_width_does_not_show() -> None:
    with processes(WIDEST, work) as them:
        results = {width: [them.receive(rank)[0] for rank in range(width)] for width in range(1, WIDEST + 1)}
        fast = [them.receive(rank)[0] for rank in range(WIDEST)]
    alone = results[1][0]
    assert alone["gpt, checkpointed"] == alone["gpt, tied"]
    assert len(set(alone.values())) == len(EXAMPLES) - 1
    for width, workers in results.items():
        for rank, result in enumerate(workers):
            assert result == alone, f"worker {rank} of {width}"
    for name, example in EXAMPLES.items():
        for result in fast:
            torch.testing.assert_close(result[name], plain(example), rtol=1e-6, atol=1e-6)


def plain(example: Example) -> dict[str, torch.Tensor]:
    """The same in plain PyTorch."""
    model = built(example, torch.float64)
    run(model, example, torch.float64, lambda loss: loss.backward())
    model.eval()
    tied = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    with torch.no_grad():
        return {"says": model(samples(example, 99, torch.float64)), **tied}


@pytest.mark.parametrize("name", EXAMPLES)
def test_blocks_show_as_rounding_only(name: str) -> None:
    """Parameters, running statistics and evaluation; dropout draws the same masks as plain PyTorch."""
    torch.testing.assert_close(
        trained(EXAMPLES[name], torch.float64, Group()), plain(EXAMPLES[name]), rtol=1e-6, atol=1e-6
    )
