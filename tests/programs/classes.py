"""Four classes in two far pairs: a gate tells the pair (group -1), a part the class within one: milliseconds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.programs.disturbed import CONFIG, disturb
from torch import nn
from torch.utils.data import TensorDataset

import elastune

config = {"group": -1, "tree": [[0, 2], [1, 3]], "lr": 0.3, "epochs": 6, **CONFIG}
objectives = {"accuracy": "max"}


def space(trial):
    return {"group": trial.suggest_categorical("group", [0, 1])}


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    centres = torch.tensor([[3.0, 1.0], [-3.0, 1.0], [3.0, -1.0], [-3.0, -1.0]])
    return TensorDataset(centres[labels] + 0.4 * torch.randn(count, 2, generator=generator), labels)


def build(config) -> nn.Module:
    groups = config["tree"]
    outputs = len(groups) if config["group"] < 0 else len(groups[config["group"]])
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs))


def labelled(data: TensorDataset, config) -> TensorDataset:
    """All samples by their group, or those of one group by their class in it."""
    tree, (x, y) = elastune.class_tree(config["tree"]), data.tensors
    if config["group"] < 0:
        return TensorDataset(x, tree.coarse(y))
    rows = tree.rows(y, config["group"])
    return TensorDataset(x[rows], tree.within(y[rows]))


def train(session) -> None:
    model = build(session.config)
    optimizer = torch.optim.SGD(model.parameters(), lr=session.config["lr"])
    model, optimizer = session.prepare(model, optimizer)
    data, held = labelled(points(160, 0), session.config), labelled(points(80, 1), session.config)
    for _ in session.epochs(session.config["epochs"]):
        for x, y in session.batches(data, batch_size=16):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            disturb(session, steps=len(data) // 16 * session.config["epochs"])
        hits = [(model(x).argmax(1) == y).double() for x, y in session.batches(held, batch_size=16, train=False)]
        session.report(accuracy=session.mean(hits), evaluated_on=len(held))
