"""Six classes in a line, of which some are nearer to one another: a model for each node of a tree: milliseconds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.programs.disturbed import CONFIG, disturb
from torch import nn
from torch.utils.data import TensorDataset

import elastune

config = {"tree": [[0], [1]], "node": "", "lr": 0.3, "epochs": 8, "fails": "no", **CONFIG}
objectives = {"accuracy": "max"}


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(6, (count,), generator=generator)
    centres = torch.tensor([[2.0, 2.0], [2.0, 1.0], [2.0, -1.5], [-2.0, 1.5], [-2.0, -1.0], [-2.0, -2.0]])
    return TensorDataset(centres[labels] + 0.2 * torch.randn(count, 2, generator=generator), labels)


def build(config) -> nn.Module:
    outputs = elastune.class_tree(config["tree"]).outputs(config["node"])
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, outputs))


def predict(model, name):
    """Of all classes."""
    seeds = {"validation": 1, "test": 2}
    if name not in seeds:
        return None
    x, y = points(120, seeds[name]).tensors
    return [model(part) for part in x.split(16)], y


def labelled(data: TensorDataset, config) -> TensorDataset:
    """The samples of a node, by what its model tells apart."""
    tree, (x, y) = elastune.class_tree(config["tree"]), data.tensors
    rows = tree.rows(y, config["node"])
    return TensorDataset(x[rows], tree.labels(y[rows], config["node"]))


def train(session) -> None:
    config = session.config
    if config["fails"] == config["node"]:
        raise RuntimeError("as it was asked to")
    model = build(config)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=config["lr"]))
    data, held = labelled(points(240, 0), config), labelled(points(120, 1), config)
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(data, batch_size=16):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if config["node"]:  # what is below the root
                disturb(session, steps=-(-len(data) // 16) * config["epochs"])
        with torch.no_grad():
            pairs = [(model(x), y) for x, y in session.batches(held, batch_size=16, train=False)]
        hits = [(outputs.argmax(1) == y).double() for outputs, y in pairs]
        session.report(accuracy=session.mean(hits), evaluated_on=len(held))
    session.predictions("validation", [outputs for outputs, _ in pairs], [y for _, y in pairs])
