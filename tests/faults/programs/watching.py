"""Says at every step who it believes to be: its rank, how many workers there are, and to whom it gives its sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastune.recipes.datasets import digits
from elastune.testing.faults import Rests, inject, parse_wishes

config = {"batch_size": 64, "epochs": 2, "samples": 1000, "pause_s": 0.0, "faults": [], "resize": [], "route": []}


def train(session) -> None:
    config = session.config
    model = nn.Linear(64, 10)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    reach = inject(session)
    images, labels = digits().train[: config["samples"]]
    samples = TensorDataset(images.flatten(1), labels)
    wishes, topologies = parse_wishes(config["resize"]), parse_wishes(config["route"])
    pace = Rests(session, config["epochs"] * -(-len(samples) // config["batch_size"]), wishes)
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(samples, batch_size=config["batch_size"]):
            reach("before")
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                pace.rest()
                if session.step in wishes:
                    session.resize(int(wishes[session.step]))
                if session.step in topologies:
                    session.set_topology(topologies[session.step])
                routes = session.state.workers.comms.group("data").routes
                parents = [route.up[session.rank] + 1 for route in routes] or [0]
                gives = (session.rank + 1) * sum(parents)
                session.report(rank=session.rank, size=session.size, squares=session.rank**2, gives=gives)
