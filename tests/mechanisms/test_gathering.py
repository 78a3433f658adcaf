"""Blocks of a model, and values that are here only while they are used."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastune.comm.comms import replicated
from elastune.comm.group import Group
from elastune.core.batch_slices import BatchSlice
from elastune.core.run import Means
from elastune.mechanisms.owned.blocks import blocks_of
from elastune.mechanisms.owned.gathering import ShardedReplica
from elastune.mechanisms.owned.mechanism import Owned
from elastune.mechanisms.owned.store import has_storage

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
        found: torch.Tensor = self.head(self.groups[0][0](x))
        return found


def test_what_is_needed_together() -> None:
    """The children of containers; the rest, and what two of them share, belongs to the model itself."""
    model = Stack()
    names = [name for name, _ in model.named_parameters()]
    root, *blocks = blocks_of(model, list(model.parameters()))
    told = [[names[i] for i in block.leaves] for block in blocks]
    assert told[0] == ["layers.0.0.bias"]
    assert told[2] == ["layers.2.0.weight", "layers.2.0.bias"]
    assert told[5] == ["groups.0.0.weight", "groups.0.0.bias"]
    own = {names[i] for i in root.leaves}
    assert own == {"enter.weight", "enter.bias", "head.weight", "head.bias", "layers.0.0.weight"}


def test_values_are_here_only_while_they_are_used() -> None:
    torch.manual_seed(0)
    model, plain = Stack(), Stack()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mechanism = Owned("sharded", ("shard",), frees=True)
    replica = mechanism.attach(model, optimizer, replicated(Group()), Means())
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
