"""One net in all the roles of transfer.py: flat, source, gate, part of a group, part of a view, stacked head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import elastune
from elastune.recipes import datasets
from elastune.recipes.datasets import Splits

config = {
    "data": "fashion",
    "seed": 0,  # draws the samples, and the initial values
    "train": 4000,
    "first": 0,  # of the samples drawn, where this training's begin
    "selection": 2000,
    "classes": [],  # of these alone, renumbered; []: all
    "tree": [],  # groups of classes
    "group": -1,  # of the tree: a part; -1 with a tree: the gate
    "node": "",  # of a deeper tree: its name
    "root_epochs": 0,  # of a deeper tree's root; 0: as all
    "split": "",  # "regions" or "samples": a part of either
    "part": 0,
    "stack": "",  # the folder of a study of such parts: train a head over them
    "lr": 0.05,
    "batch_size": 50,
    "epochs": 6,
}
objectives = {"accuracy": "max"}
LOADERS = {"digits": datasets.digits, "mnist": datasets.mnist, "fashion": datasets.fashion_mnist}
PARTS = 2


def view(config, x):
    """What a part is shown of the images: of regions the upper or the lower half, else all."""
    if config["split"] != "regions":
        return x
    half = x.shape[2] // PARTS
    return x[:, :, config["part"] * half : (config["part"] + 1) * half]


class Net(nn.Module):
    """``trunk`` and ``head``: another task has another head."""

    def __init__(self, height: int, width: int, outputs: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.ReLU()]
        layers += [nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.Flatten()]
        self.trunk = nn.Sequential(*layers)
        self.head = nn.Linear(16 * -(-height // 4) * -(-width // 4), outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


def node_of(config) -> str:
    return config["node"] or ("" if config["group"] < 0 else str(config["group"]))


def outputs_of(config) -> int:
    if config["tree"]:
        return elastune.class_tree(config["tree"]).outputs(node_of(config))
    return len(config["classes"]) or 10


def build(config) -> nn.Module:
    torch.manual_seed(config["seed"])
    side = 8 if config["data"] == "digits" else 28
    return Net(side // PARTS if config["split"] == "regions" else side, side, outputs_of(config))


def labelled(data: TensorDataset, config) -> TensorDataset:
    """With the labels of the role, and those samples alone that have one."""
    x, y = data.tensors
    if config["tree"]:
        tree, node = elastune.class_tree(config["tree"]), node_of(config)
        rows = tree.rows(y, node)
        return TensorDataset(x[rows], tree.labels(y[rows], node))
    if config["classes"]:
        places = torch.full((10,), -1)
        places[config["classes"]] = torch.arange(len(config["classes"]))
        rows = (places[y] >= 0).nonzero().flatten()
        return TensorDataset(x[rows], places[y[rows]])
    return data


def drawn(data: TensorDataset, first: int, count: int, seed: int) -> TensorDataset:
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[first : first + count]
    return TensorDataset(*(tensor[order] for tensor in data.tensors))


def splits(config) -> Splits:
    whole, seed = LOADERS[config["data"]](), config["seed"]
    first = config["part"] * config["train"] if config["split"] == "samples" else config["first"]
    train = drawn(labelled(whole.train, {**config, "tree": []}), first, config["train"], seed)
    held = drawn(labelled(whole.validation, {**config, "tree": []}), 0, config["selection"], seed)
    test = labelled(whole.test, {**config, "tree": []})
    return Splits(*(labelled(one, {**config, "classes": []}) for one in (train, held, test)))


def model_of(config, example: torch.Tensor) -> nn.Module:
    if config["stack"]:
        torch.manual_seed(config["seed"])
        return elastune.stacked_parts(config["stack"], build, outputs=10, example=example, view=view)
    return build(config)


def evaluated(session, model, data, config):
    model.eval()
    outputs, targets = [], []
    with torch.no_grad():
        for x, y in session.batches(data, batch_size=500, train=False):
            outputs.append(model(view(config, x)))
            targets.append(y)
    model.train()
    hits = [(o.argmax(1) == y).double() for o, y in zip(outputs, targets, strict=True)]
    return outputs, targets, session.mean(hits)


def train(session) -> None:
    config, data = session.config, splits(session.config)
    model = model_of(config, data.train.tensors[0][:1])
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = session.prepare(model, torch.optim.SGD(trained, lr=config["lr"], momentum=0.9))
    root = config["root_epochs"] if config["tree"] and not node_of(config) else 0
    for _ in session.epochs(root or config["epochs"]):
        for x, y in session.batches(data.train, batch_size=config["batch_size"]):
            session.backward(F.cross_entropy(model(view(config, x)), y))
            optimizer.step()
            optimizer.zero_grad()
        outputs, targets, right = evaluated(session, model, data.validation, config)
        session.report(accuracy=right)
    session.predictions("validation", outputs, targets)
    session.report(test_accuracy=evaluated(session, model, data.test, config)[2])
