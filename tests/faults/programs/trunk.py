"""A trunk that is data parallel within a replica, and layers that its workers compute together; dropout in both."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from elastune.parallel.mechanisms.tensor.tensor_parallel import DataParallelTrunk
from elastune.testing.faults import Rests, digit_rows, inject, parse_wishes

config = {"batch_size": 64, "epochs": 2, "samples": 640, "faults": [], "reshape": [], "pause_s": 0.0, "until": ""}


def train(session) -> None:
    config = session.config
    trunk = nn.Sequential(nn.Linear(64, 192), nn.BatchNorm1d(192), nn.ReLU(), nn.Dropout(0.2))
    model = nn.Sequential(trunk, nn.Linear(192, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10), nn.Tanh())
    inside = model[3]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    each_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    model, optimizer, each_step = session.prepare(model, optimizer, each_step, plan=DataParallelTrunk())
    reach = inject(session)
    trunk.register_forward_hook(lambda *_: reach("trunk"))
    inside.register_forward_hook(lambda *_: reach("tail"))  # while all run it for one of them
    samples, unseen = digit_rows(config["samples"])
    wishes = parse_wishes(config["reshape"])
    pace = Rests(session, config["epochs"] * -(-len(samples) // config["batch_size"]), wishes)
    for _ in session.epochs(config["epochs"]):
        model.train()
        for x, y in session.batches(samples, batch_size=config["batch_size"]):
            scores = model(x)
            if scores.requires_grad:
                scores.register_hook(lambda g: reach("backward"))
            session.backward(F.cross_entropy(scores, y))
            if session.ends_step:
                pace.rest()
                if session.step in wishes:
                    session.reshape(wishes[session.step])
            session.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            each_step.step()
        model.eval()
        losses = []
        with torch.no_grad():
            for x, y in session.batches(unseen, batch_size=32, train=False):
                reach("evaluation")
                losses.append(F.cross_entropy(model(x), y))
        session.report(loss=session.sum(losses))
