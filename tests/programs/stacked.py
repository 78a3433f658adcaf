"""A head over the parts that a study of tests/programs/views.py has left: some milliseconds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.programs.disturbed import CONFIG, disturb
from tests.programs.views import build, points, view

import elastune

config = {"parts": "", "epochs": 4, **CONFIG}
objectives = {"accuracy": "max"}


def train(session) -> None:
    data, held = points(160, 2), points(80, 3)
    parts = session.config["parts"]
    model = elastune.stacked_parts(parts, build, outputs=4, example=data.tensors[0][:1], view=view)
    model, optimizer = session.prepare(model, torch.optim.Adam(model.head.parameters(), lr=0.1))
    for _ in session.epochs(session.config["epochs"]):
        for x, y in session.batches(data, batch_size=16):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            disturb(session, steps=10 * session.config["epochs"])
        hits = [(model(x).argmax(1) == y).double() for x, y in session.batches(held, batch_size=16, train=False)]
        session.report(accuracy=session.mean(hits), evaluated_on=len(held))
