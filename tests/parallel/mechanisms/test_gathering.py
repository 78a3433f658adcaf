"""Blocks of a model, and values that are here only while they are used."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice, shares
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms, form_comms, replicated
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.mechanisms.owned.mechanism import Owned, ShardedReplica, blocks_of
from elastune.parallel.mechanisms.owned.store import has_storage
from elastune.parallel.sync.registry import prepare
from elastune.testing.worker_processes import LIMIT_S, Worker, processes

ONE = BatchSlice(samples=range(4), slot=0, weight=1.0, ends_slot=True, ends_step=True)


class Stack(nn.Module):
    """Layers in a list, one of them run again in the backward pass; a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))
        self.groups = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8)])])
        self.head = nn.Linear(8, 6)
        self.head.weight = nn.Parameter(torch.zeros(6, 8))
        self.layers[1][0].weight = self.layers[0][0].weight
        self.most_here = 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if i == 3 and x.requires_grad else layer(x)
            self.most_here = max(self.most_here, sum(has_storage(each[0].bias) for each in self.layers))
        result: torch.Tensor = self.head(self.groups[0][0](x))
        return result


def test_what_is_needed_together() -> None:
    """The children of containers; the rest, and what two of them share, belongs to the model itself."""
    model = Stack()
    names = [name for name, _ in model.named_parameters()]
    root, *blocks = blocks_of(model, list(model.parameters()))
    results = [[names[i] for i in block.param_blocks] for block in blocks]
    assert results[0] == ["layers.0.0.bias"]
    assert results[2] == ["layers.2.0.weight", "layers.2.0.bias"]
    assert results[5] == ["groups.0.0.weight", "groups.0.0.bias"]
    own = {names[i] for i in root.param_blocks}
    assert own == {"enter.weight", "enter.bias", "head.weight", "head.bias", "layers.0.0.weight"}


def test_values_are_here_only_while_they_are_used() -> None:
    torch.manual_seed(0)
    model, plain = Stack(), Stack()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mechanism = Owned("sharded", ("shard",), frees=True)
    replica = mechanism.attach(model, optimizer, replicated(Group()), ExecutionSettings())
    assert isinstance(replica, ShardedReplica)
    x = torch.randn(4, 6)
    assert not any(map(has_storage, model.parameters()))
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert not any(map(has_storage, model.parameters()))
    got: dict[int, torch.Tensor] = {}
    replica.begin_step()
    loss = replica.model(x).square().mean()
    assert has_storage(model.head.weight)
    for _ in replica.run(
        loss, ONE, lambda part: None, lambda i, g: got.update({i: g.clone()} if g is not None else {})
    ):
        pass
    assert not any(map(has_storage, model.parameters()))
    assert model.most_here <= 2, "the one that runs, and the next"
    plain(x).square().mean().backward()
    for i, p in enumerate(plain.parameters()):
        torch.testing.assert_close(got[i], p.grad)


def test_what_is_not_here_is_neither_copied_nor_saved() -> None:
    """Where it is, in a pass, what is saved of it is a plain parameter."""
    model, kept = Stack(), io.BytesIO()
    weight = model.enter.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Owned("sharded", ("shard",), frees=True).attach(model, optimizer, replicated(Group()), ExecutionSettings())
    for of in (model, model.head, model.head.weight):
        with pytest.raises(UserError, match="a copy of a model needs all"):
            copy.deepcopy(of)
    for of in (model.head, model.head.weight):
        with pytest.raises(UserError, match=r"a file of a model needs all .* save by session.save"):
            torch.save(of, io.BytesIO())
        with pytest.raises(UserError, match="a file of a model needs all"):
            pickle.dumps(of)
    for part in (model, model.layers[2]):
        with pytest.raises(UserError, match="is not pickled"):
            torch.save(part, io.BytesIO())
        with pytest.raises(UserError, match="a state_dict needs all"):
            part.state_dict()
    hook = model.enter.register_forward_hook(lambda *_: torch.save([model.enter.weight], kept))
    model(torch.randn(4, 6))
    hook.remove()
    (result,) = torch.load(io.BytesIO(kept.getvalue()), weights_only=True)
    assert type(result) is nn.Parameter
    assert torch.equal(result, weight)


SLOTS, BATCH = 4, 12
CALLS = ((0, 1, 2), (2, 2, 1))
"""By rank and step: how often the model is called in an evaluation."""


class Closing(Stack):
    """While it ``closes``, what it returns belongs to no graph."""

    closes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        return result.detach() if self.closes else result


def outputs(model: nn.Module, replica: Replica, x: torch.Tensor, gradients: Sequence[bool], *, ends: bool) -> set[str]:
    """An evaluation with a call for each of ``gradients``; unless it ``ends``, the program leaves it early."""
    replica.begin_evaluation()
    names = set()
    for enabled in gradients:
        with torch.set_grad_enabled(enabled):
            names.add(str(model(x).tolist()))
    if ends:
        replica.stand_in()
        replica.stand_in()  # nobody evaluates any more
    return names


def trained(comms: Comms, calls: Sequence[int]) -> list[set[str]]:
    """What ``calls`` of the model in each step gave, and one after the last; in the second step inside of it."""
    torch.manual_seed(0)
    model = Closing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = prepare(model, optimizer, ExecutionSettings(mesh=comms.mesh, mechanism="sharded", num_slots=SLOTS), comms)
    mesh, rank, replica = comms.mesh, comms.rank, sync.replica
    results: list[set[str]] = []
    sync.parts = shares(BATCH, SLOTS, mesh.batch, mesh.batch_rank(rank), "exact", None, even=True, in_turn=True)
    for step, times in enumerate(calls):
        x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
        if step != 1:
            model.closes = step == 2
            results.append(outputs(model, replica, x, [(rank + i) % 2 == 0 for i in range(times)], ends=True))
            model.closes = False
        for i, share in enumerate(sync.parts):
            sync.begin(share, starts_step=i == 0)
            if step == 1 and i == 0:
                results.append(outputs(model, replica, x, [False] * times, ends=rank > 0))
            part = x[share.samples.start : share.samples.stop]
            sync.backward(model(part).square().mean(), share)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*results, {str(model(x).tolist())}]


def work(worker: Worker) -> None:
    comms = form_comms(GlooFactory("lo", LIMIT_S), worker.store, "all", worker.rank, Mesh(shard=worker.size))
    worker.send(trained(comms, CALLS[worker.rank]))
    worker.receive()


def test_a_model_may_be_called_unequally_often_in_an_evaluation() -> None:
    """With gradients on some workers and without on others, to its end or not: no bit shows it."""
    wanted = trained(replicated(Group()), (1, 1, 1))
    assert len({str(each) for each in wanted}) == len(wanted)
    with processes(len(CALLS), work) as them:
        for rank, calls in enumerate(CALLS):
            (result,) = them.receive(rank)
            assert [len(each) for each in result] == [min(times, 1) for times in (*calls, 1)]
            assert all(each <= want for each, want in zip(result, wanted, strict=True))
