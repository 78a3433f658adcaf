"""Averaged weights, the best value so far, its checkpoint, and an end that a metric decides."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from elastune.testing.faults import inject

config = {"epochs": 6, "patience": 2, "faults": []}


def train(session) -> None:
    source = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.rand(60, 8, generator=source), torch.randint(0, 3, (60,), generator=source))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    ema = session.track("ema", AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
    best = session.track("best", {"loss": float("inf"), "epoch": 0, "steps": 0})
    reach = inject(session)
    for _ in session.epochs(session.config["epochs"]):
        for x, y in session.batches(data, batch_size=16):
            reach("before")
            session.backward(F.cross_entropy(model(x), y))
            reach("after")
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model)
            if session.ends_step:
                best["steps"] += 1
        losses = [F.cross_entropy(ema(x), y) * len(y) for x, y in session.batches(data, batch_size=30, train=False)]
        session.report(loss=session.sum(losses) / 60 * (1.1 if session.epoch > 3 else 1.0), steps=best["steps"])
        session.save_best("loss", "min")
        reach("evaluated")
        if session.metrics["loss"] < best["loss"]:
            best |= {"loss": session.metrics["loss"], "epoch": session.epoch}
        elif session.epoch - best["epoch"] >= session.config["patience"]:
            session.stop(f"no better loss for {session.config['patience']} epochs")
    weights = sum(float(p.detach().double().sum()) for p in ema.module.parameters())
    session.report(averaged=weights, best=best["epoch"])
