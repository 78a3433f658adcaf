"""Four classes that two of three inputs tell apart; a model is shown some of them, by name: some milliseconds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.programs.disturbed import CONFIG, disturb
from torch import nn
from torch.utils.data import TensorDataset

import elastune

views = {"first": [0], "second": [1], "noise": [2]}
config = {"inputs": list(views), "lr": 0.3, "epochs": 3, "seed": 0, "fails": "", **CONFIG}
objectives = {"accuracy": "max"}


def space(trial):
    return {"lr": trial.suggest_float("lr", 0.1, 0.5)}


def points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    centres = torch.tensor([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, -1.0, 0.0]])
    return TensorDataset(centres[labels] + 0.3 * torch.randn(count, 3, generator=generator), labels)


def build(config) -> nn.Module:
    torch.manual_seed(config["seed"])
    view = elastune.InputView(views, config["inputs"])
    return nn.Sequential(view, nn.Linear(view.width, 8), nn.Tanh(), nn.Linear(8, 4))


def evaluated(session, model, data):
    with torch.no_grad():
        pairs = [(model(x), y) for x, y in session.batches(data, batch_size=16, train=False)]
    return [outputs for outputs, _ in pairs], [targets for _, targets in pairs]


def train(session) -> None:
    config = session.config
    if config["fails"] in config["inputs"]:
        raise RuntimeError("as it was asked to")
    model = build(config)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=config["lr"]))
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(points(160, 0), batch_size=16):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            disturb(session, steps=10 * config["epochs"])
        outputs, targets = evaluated(session, model, points(80, 1))
        hits = [(o.argmax(1) == t).double() for o, t in zip(outputs, targets, strict=True)]
        session.report(accuracy=session.mean(hits), evaluated_on=80)
    session.predictions("validation", outputs, targets)
    session.predictions("test", *evaluated(session, model, points(80, 2)))
