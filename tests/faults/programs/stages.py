"""A network that a pipeline can cut: BatchNorm, dropout, an input that skips layers, weights on several stages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from elastune.testing.faults import Rests, digit_rows, inject, parse_wishes

config = {"samples": 360, "epochs": 2, "faults": [], "reshape": [], "pause_s": 0.0, "until": "", "again": False}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))
        self.tied = nn.Linear(64, 64)
        self.last = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tied(self.first(x))
        for block in self.blocks:
            h = block(h) + x
        return self.last(self.tied(h))


def train(session) -> None:
    config = session.config
    net = Net()
    model, optimizer = session.prepare(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
    reach = inject(session)
    for block in net.blocks:
        block[0].register_forward_hook(lambda *_: reach("forward"))
    samples, unseen = digit_rows(config["samples"], 96)
    wishes = parse_wishes(config["reshape"])
    pace = Rests(session, config["epochs"] * -(-len(samples) // 64), wishes)
    for _ in session.epochs(config["epochs"]):
        model.train()
        for x, y in session.batches(samples, batch_size=64):
            session.backward(F.cross_entropy(model(x), y))
            reach("after")
            if config["again"]:
                model.eval()
                with torch.no_grad():
                    assert model(x).shape == (len(x), 10)
                model.train()
            if session.ends_step:
                pace.rest()
                if session.step in wishes:
                    session.reshape(wishes[session.step])
            session.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            reach("stepped")
        model.eval()
        losses = []
        with torch.no_grad():
            for x, y in session.batches(unseen, batch_size=32, train=False):
                reach("evaluation")
                losses.append(F.cross_entropy(model(x), y))
        session.report(loss=session.sum(losses))
