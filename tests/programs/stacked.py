"""A head over the parts that a study of tests/programs/views.py has left: some milliseconds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.programs.disturbed import CONFIG, disturb
from tests.programs.views import build as build_part
from tests.programs.views import points, view

import elastune

config = {"parts": "", "epochs": 4, **CONFIG}
objectives = {"accuracy": "max"}


def build(config):
    return elastune.stacked_parts(config["parts"], build_part, outputs=4, example=torch.zeros(1, 2), view=view)


def predict(model, name):
    x, y = points(80, {"validation": 3, "test": 4}[name]).tensors
    return model(x), y


def train(session) -> None:
    data, held = points(160, 2), points(80, 3)
    model = build(session.config)
    model, optimizer = session.prepare(model, torch.optim.Adam(model.head.parameters(), lr=0.1))
    for _ in session.epochs(session.config["epochs"]):
        for x, y in session.batches(data, batch_size=16):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            disturb(session, steps=10 * session.config["epochs"])
        hits = [(model(x).argmax(1) == y).double() for x, y in session.batches(held, batch_size=16, train=False)]
        session.report(accuracy=session.mean(hits), evaluated_on=len(held))
