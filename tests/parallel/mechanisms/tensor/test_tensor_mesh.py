"""The mechanism in training: one state on every mesh, that of plain PyTorch but for rounding."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, derive
from elastune.core.slots import Mode, shares
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms, form_comms, replicated
from elastune.parallel.mechanisms.base import ModelParallel
from elastune.parallel.mechanisms.owned.replica import OwnedReplica
from elastune.parallel.mechanisms.tensor.tensor_parallel import plan_layers
from elastune.parallel.mechanisms.tensor.trunk import divide_layers
from elastune.parallel.sync.registry import prepare
from elastune.testing.worker_processes import LIMIT_S, Worker, processes

if str(Path(__file__).parent) not in sys.path:  # worker processes import the models by their name
    sys.path.append(str(Path(__file__).parent))

from models import EXAMPLES, Example, built, samples

SLOTS, BATCH, STEPS, CLIP = 4, 12, 3, 0.3
TRAINED = ("mlp", "cnn", "gpt, tied", "encoder")
FAST = ("mlp without dropout", "encoder without dropout")  # where how many samples a pass has does not show
MESHES = (
    *(Mesh(tensor=tensor) for tensor in (1, 2, 3, 4)),
    *(Mesh(data=2, tensor=tensor) for tensor in (1, 2)),
    Mesh(data=3),
    Mesh(shard=2, tensor=2),
)


def trained(
    example: Example, comms: Comms, mode: Mode = "exact", dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The state after some clipped steps, as far as it lies on this worker: by leaf."""
    model = built(example, dtype)
    if example.plan is not None:
        plan_layers(model, example.plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mechanism = "tensor+zero" if comms.mesh.shard > 1 else "tensor"
    execution = ExecutionSettings(mesh=comms.mesh, mechanism=mechanism, num_slots=SLOTS, mode=mode, virtual_tensor=4)
    sync = prepare(model, optimizer, execution, comms)
    replica = sync.replica
    assert isinstance(replica, OwnedReplica)
    for step in range(STEPS):
        x = samples(example, step, dtype, BATCH)
        plan = shares(
            BATCH, SLOTS, comms.mesh.batch, comms.mesh.batch_rank(comms.rank), mode, None, replica.least_samples
        )
        for i, share in enumerate(plan):
            torch.manual_seed(derive(0, "slot", step, share.slot))
            sync.begin(share, starts_step=i == 0)
            part = x[share.samples.start : share.samples.stop]
            sync.backward(replica.model(part).square().mean(), share)
        replica.clip(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    split = replica.split
    results = {split.param_blocks[i].name: replica.store.parameters[i].detach().clone() for i in replica.store.computed}
    return results | dict(replica.module.named_buffers())


def sha(value: torch.Tensor) -> str:
    return hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()


def work(worker: Worker) -> None:
    """Train on every mesh, and in fast mode on the largest."""
    factory = GlooFactory("lo", LIMIT_S)
    for mesh in MESHES:
        if worker.rank < mesh.workers:
            comms = form_comms(factory, worker.store, str(mesh), worker.rank, mesh)
            states = {name: trained(EXAMPLES[name], comms) for name in TRAINED}
            worker.send(
                {
                    name: {param_block: sha(value) for param_block, value in state.items()}
                    for name, state in states.items()
                }
            )
    mesh = Mesh(data=2, tensor=2)
    comms = form_comms(factory, worker.store, "fast", worker.rank, mesh)
    worker.send({name: trained(EXAMPLES[name], comms, "fast", torch.float64) for name in FAST})
    worker.receive()


def test_the_mesh_does_not_show() -> None:
    with processes(4, work) as them:
        results = {mesh: [them.receive(rank)[0] for rank in range(mesh.workers)] for mesh in MESHES}
        fast = [them.receive(rank)[0] for rank in range(4)]
    alone = results[Mesh()][0]
    for mesh, workers in results.items():
        for name in TRAINED:
            together: dict[str, str] = {}
            for result in workers:
                assert result[name].items() <= alone[name].items(), f"{name} on {mesh}"
                together |= result[name]
            assert together.keys() == alone[name].keys()
            if mesh.tensor > 1:
                assert all(len(result[name]) < len(alone[name]) for result in workers), (
                    "blocks lie where they are computed"
                )
    for result in fast:
        for name, values in result.items():
            wanted = in_leaves(EXAMPLES[name])
            assert values
            for param_block, value in values.items():
                torch.testing.assert_close(
                    value, wanted[param_block], rtol=1e-6, atol=1e-6, msg=f"{name} {param_block}"
                )


def plain(example: Example) -> dict[str, torch.Tensor]:
    """The same training in plain PyTorch: each slot by itself, gradients weighted and added, buffers' moves too."""
    model = built(example, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x = samples(example, step, torch.float64, BATCH)
        start = {name: b.clone() for name, b in model.named_buffers()}
        moved = {name: torch.zeros_like(b) for name, b in start.items() if b.is_floating_point()}
        for share in shares(BATCH, SLOTS, 1, 0, "exact", None, 2):
            for name, b in model.named_buffers():
                b.copy_(start[name])
            torch.manual_seed(derive(0, "slot", step, share.slot))
            (model(x[share.samples.start : share.samples.stop]).square().mean() * share.weight).backward()
            for name in moved:
                moved[name] += share.weight * (model.get_buffer(name) - start[name])
        for name, by in moved.items():
            model.get_buffer(name).copy_(start[name] + by)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()) | dict(model.named_buffers())


def in_leaves(example: Example) -> dict[str, torch.Tensor]:
    """What plain PyTorch comes to, cut as the mechanism cuts it."""
    model, whole = built(example), plain(example)
    if example.plan is not None:
        plan_layers(model, example.plan)
    param_blocks = divide_layers(
        ModelParallel(model), ExecutionSettings(mechanism="tensor", virtual_tensor=4)
    ).split.param_blocks
    cut = {
        param_block.name: whole[param_block.tensor][tuple(slice(*edge) for edge in param_block.box)]
        for param_block in param_blocks
    }
    return cut | {name: whole[name] for name, _ in model.named_buffers()}


@pytest.mark.parametrize("name", TRAINED)
def test_equals_plain_pytorch(name: str) -> None:
    """On one worker; that others are equal to it the other test shows."""
    run_result = trained(EXAMPLES[name], replicated(Group()), dtype=torch.float64)
    torch.testing.assert_close(run_result, in_leaves(EXAMPLES[name]), rtol=1e-6, atol=1e-6)
