"""Divided layers under a data-parallel trunk: the bits of the plan without one, on every mesh; and what is refused."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, derive
from elastune.core.slots import apart, shares
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms, form_comms, replicated
from elastune.parallel.mechanisms.base import ModelParallel, Replica
from elastune.parallel.mechanisms.owned.replica import OwnedReplica
from elastune.parallel.mechanisms.tensor.tensor_parallel import DataParallelTrunk, Plan, plan_layers
from elastune.parallel.mechanisms.tensor.trunk import divide_layers
from elastune.parallel.sync.registry import prepare
from elastune.testing.worker_processes import LIMIT_S, Worker, processes

if str(Path(__file__).parent) not in sys.path:  # worker processes import the models by their name
    sys.path.append(str(Path(__file__).parent))

from models import COLUMNS, ROWS, mlp
from test_tensor_mesh import sha

SLOTS, BATCH, STEPS, CLIP = 4, 13, 3, 0.3
MESHES = (*(Mesh(tensor=n) for n in (1, 2, 3, 4)), Mesh(data=2, tensor=2), Mesh(shard=2, tensor=2), Mesh(data=2))


class Cnn(nn.Module):
    """BatchNorm and dropout on both sides, and behind the tail; a layer of the trunk that only some slots use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.3)
        self.rare = nn.Linear(54, 54)
        self.classifier = nn.Sequential(
            nn.Dropout(0.2), nn.Linear(54, 41), nn.BatchNorm1d(41), nn.ReLU(inplace=True), nn.Dropout(0.4),
            nn.Linear(41, 10),
        )  # fmt: skip
        self.last, self.behind = nn.Linear(10, 10), nn.BatchNorm1d(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.drop(self.norm(self.conv(x)))), 2).flatten(1)
        if float(x.detach().sum()) > self.bound:
            x = x + self.rare(x)
        return self.behind(self.last(F.dropout(self.classifier(x).relu_(), 0.1)))

    bound = 195.0


def flat() -> nn.Module:
    """All in one row, of which the divided layers are the middle."""
    return nn.Sequential(
        nn.Linear(6, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, 33),
        nn.Dropout(0.3),
        nn.Linear(33, 10),
        nn.Tanh(),
    )


def called() -> nn.Module:
    """The tail is a module's call, and a copy of the model is used as well."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(12, 33), nn.Linear(33, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(1)[:, :10] + self.down(F.gelu(self.up(x)))

    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), Head(), nn.Dropout(0.2))


def attends() -> nn.Module:
    """Transformer layers, which lie in a list of the module that is called."""
    layer = nn.TransformerEncoderLayer(16, 4, 30, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(6, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


MODELS: dict[str, tuple[Any, Plan | None, tuple[int, ...]]] = {
    "cnn": (Cnn, {"classifier.1": COLUMNS, "classifier.5": ROWS}, (1, 8, 8)),
    "flat": (flat, {"3": COLUMNS, "5": ROWS}, (6,)),
    "called": (called, None, (6,)),
    "attends": (attends, None, (5, 6)),
}


def trained(name: str, optimizer: str, comms: Comms, *, trunk: bool = True) -> tuple[dict[str, torch.Tensor], Any]:
    """The state after some clipped steps, as far as it lies on this worker, and the statistics of the last."""
    make, layers, shape = MODELS[name]
    torch.manual_seed(1)
    model = make()
    plan_layers(model, DataParallelTrunk(layers) if trunk else layers)
    chosen = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    stepper = chosen(model.parameters(), lr=0.01, **({"momentum": 0.9} if optimizer == "sgd" else {}))
    mechanism = "tensor+zero" if comms.mesh.shard > 1 else "tensor"
    execution = ExecutionSettings(mesh=comms.mesh, mechanism=mechanism, num_slots=SLOTS, virtual_tensor=4)
    sync = prepare(model, stepper, execution, comms)
    replica = sync.replica
    assert isinstance(replica, OwnedReplica)
    assert replica.apart == trunk
    for step in range(STEPS):
        x = torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(step))
        mesh, rank = comms.mesh, comms.rank
        evaluate(model, replica, x, calls=(rank + step) % 3, to_the_end=step != 1)
        plan = shares(BATCH, SLOTS, mesh.batch, mesh.batch_rank(rank), "exact", None, replica.least_samples)
        sync.parts = apart(plan, *replica.among(mesh, rank)) if trunk else plan
        for i, share in enumerate(sync.parts):
            torch.manual_seed(derive(0, "slot", step, share.slot))
            sync.begin(share, starts_step=i == 0)
            part = x[share.samples.start : share.samples.stop]
            if step != 1:
                with torch.no_grad():
                    model(part)  # on other samples on each worker
            sync.backward((model(part) + torch.rand(())).square().mean(), share)
        replica.clip(CLIP)
        stepper.step()
        stepper.zero_grad()
    split = replica.split
    results = {split.param_blocks[i].name: replica.store.parameters[i].detach().clone() for i in replica.store.computed}
    return results | dict(replica.module.named_buffers()), sync.statistics.parts["loss"]


@torch.no_grad()
def evaluate(model: nn.Module, replica: Replica, x: torch.Tensor, calls: int, *, to_the_end: bool) -> None:
    """Another number of calls on each worker; where a program leaves the evaluation early the next pass ends it."""
    model.eval()
    replica.begin_evaluation()
    wanted = None
    for _ in range(calls):
        torch.manual_seed(0)
        result = model(x)
        wanted = result if wanted is None else wanted
        assert torch.equal(result, wanted)
    model.train()
    if to_the_end:
        replica.stand_in()
        replica.stand_in()  # nobody evaluates any more


def refused(comms: Comms) -> list[str]:
    """What all are told where one evaluates in another mode; and where a program copies what is not all here."""
    model = called()
    plan_layers(model, DataParallelTrunk())
    execution = ExecutionSettings(mesh=comms.mesh, mechanism="tensor", num_slots=SLOTS, virtual_tensor=4)
    replica = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), execution, comms).replica
    replica.begin_evaluation()
    results = []
    with torch.no_grad():
        try:
            if comms.rank == 0:
                model.eval()(torch.randn(4, 6))
            replica.stand_in()
        except UserError as error:
            results.append(str(error))
    replica.stand_in()  # at once: nobody waits for anybody behind an error
    try:
        copy.deepcopy(model)
    except UserError as error:
        results.append(str(error))
    return results


CASES = (("cnn", "adamw"), ("flat", "sgd"), ("called", "adamw"), ("attends", "adamw"))


def work(worker: Worker) -> None:
    factory = GlooFactory("lo", LIMIT_S)
    for mesh in MESHES:
        if worker.rank < mesh.workers:
            comms = form_comms(factory, worker.store, str(mesh), worker.rank, mesh)
            for case in CASES:
                state, loss = trained(*case, comms)
                worker.send({param_block: sha(value) for param_block, value in state.items()}, loss)
            if mesh == Mesh(tensor=2):
                worker.send(refused(comms))
    worker.receive()


def test_the_mesh_does_not_show() -> None:
    """Nor does the trunk: one worker by the same plan without it comes to the same bits."""
    wanted = {case: trained(*case, replicated(Group()), trunk=False) for case in CASES}
    with processes(4, work) as them:
        for mesh in MESHES:
            for case, (state, loss) in wanted.items():
                alone = {param_block: sha(value) for param_block, value in state.items()}
                together: dict[str, str] = {}
                for rank in range(mesh.workers):
                    result, heard = them.receive(rank)
                    assert result.items() <= alone.items(), f"{case} on {mesh}"
                    assert heard == loss, f"{case} on {mesh}"
                    together |= result
                assert together.keys() == alone.keys()
            if mesh == Mesh(tensor=2):
                for rank in range(2):
                    ((modes, copied),) = them.receive(rank)
                    assert "in one mode at a time" in modes
                    assert "a copy of a model" in copied


def test_slots_are_dealt_out_within_a_replica() -> None:
    plan = shares(12, 4, 1, 0, "exact", None)
    own = [apart(plan, 3, place) for place in range(3)]
    assert [[(each.slot, bool(each.weight)) for each in passes] for passes in own] == [
        [(0, True), (3, True)],
        [(1, True), (0, False)],
        [(2, True), (0, False)],
    ]
    assert [each.ends_step for each in own[1]] == [False, True]
    assert [[each.slot for each in passes[0].together] for passes in own] == [[0, 1, 2]] * 3
    assert apart(plan, 1, 0) == [replace(each, together=(replace(each, ends_step=False),)) for each in plan]
    with pytest.raises(UserError, match="each slot in one pass"):
        apart(shares(12, 4, 1, 0, "exact", 2), 2, 0)


def loose() -> nn.Module:
    """Its divided layers stand side by side in the model itself."""

    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 33), nn.Linear(33, 6)

    return Loose()


def tied() -> nn.Module:
    """A layer of the trunk is used by the tail, too."""
    model = called()
    model[2].first = model[0]
    return model


@pytest.mark.parametrize(
    ("model", "execution", "message"),
    [
        (loose, {}, "are in one module, or follow each other"),
        (tied, {}, "share"),
        (mlp, {"mode": "fast"}, "for exact mode"),
        (mlp, {"micro_batch": 2}, "whole slots"),
        (mlp, {"mesh": Mesh(tensor=2, pipeline=2), "mechanism": "tensor+pipeline"}, "tensor alone or with zero"),
        (mlp, {"mesh": Mesh(shard=2, tensor=2), "mechanism": "tensor+sharded"}, "tensor alone or with zero"),
        (mlp, {"mesh": Mesh(data=2, tensor=4), "num_slots": 4}, "has a slot of its own"),
    ],
)
def test_what_is_refused_before_a_worker_starts(model: Any, execution: dict[str, Any], message: str) -> None:
    made = model()
    plan_layers(made, DataParallelTrunk())
    with pytest.raises(UserError, match=message):
        divide_layers(
            ModelParallel(made), ExecutionSettings(**{"virtual_tensor": 4, "mechanism": "tensor", **execution})
        )


def alone(model: nn.Module, layers: Plan | None = None) -> Any:
    plan_layers(model, DataParallelTrunk(layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = prepare(model, optimizer, ExecutionSettings(mechanism="tensor", num_slots=2), replicated(Group()))
    sync.parts = shares(8, 2, 1, 0, "exact", None)
    sync.begin(sync.parts[0], starts_step=True)
    return sync


def test_what_is_refused_in_a_pass() -> None:
    x = torch.randn(4, 6)
    model = mlp()
    sync = alone(model)
    with pytest.raises(UserError, match="no call of the model"):
        sync.backward(torch.ones((), requires_grad=True), sync.parts[0])
    model(x)
    with pytest.raises(UserError, match="a second call"):
        model(x)
    sync = alone(model := flat(), {"3": COLUMNS, "5": ROWS})
    loss = model(x).sum() + model.get_parameter("5.bias").square().sum()
    with pytest.raises(UserError, match="through their output alone"):
        sync.backward(loss, sync.parts[0])
    sync = alone(model := called())
    model(x)
    sync.abandon()
    with pytest.raises(UserError, match="in training batches alone"):
        model(x).sum().backward()


@pytest.mark.parametrize(("make", "layers"), [(called, None), (flat, {"3": COLUMNS, "5": ROWS})])
def test_a_copy_of_the_model_runs_by_itself(make: Any, layers: Plan | None) -> None:
    """An average of its weights, say. A file of it would need the other workers."""
    model = make()
    sync = alone(model, layers)
    x = torch.randn(4, 6)
    other = copy.deepcopy(model).eval()
    assert [type(each) for each in other.modules()] == [type(each) for each in model.modules()]
    assert {type(p) for p in other.parameters()} == {nn.Parameter}
    for part in (model, model[2:], other):
        with pytest.raises(UserError, match=r"is not pickled .* save by session.save"):
            pickle.dumps(part)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
        assert not other(x).any()
        assert model(x).any()
    sync.backward(model(x).square().mean(), sync.parts[0])
