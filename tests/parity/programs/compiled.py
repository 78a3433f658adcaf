"""A model that TorchInductor compiles: what it has made is kept in a folder that the settings name."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from elastune.testing.faults import Rests

config = {"cache": "", "epochs": 2, "pause_s": 0.0, "until": "", "faults": []}


def train(session) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = session.config["cache"]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model, optimizer = session.prepare(torch.compile(model), optimizer)
    x = torch.linspace(0, 1, 256).view(64, 4)
    pace = Rests(session, session.config["epochs"] * 4)
    for _ in session.epochs(session.config["epochs"]):
        for one, other in session.batches(TensorDataset(x, x.sum(1, keepdim=True)), 16):
            session.backward(mse_loss(model(one), other))
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                pace.rest()
    counted = torch._dynamo.utils.counters["inductor"]
    session.report(made=session.sum(counted["fxgraph_cache_miss"]), found=session.sum(counted["fxgraph_cache_hit"]))
