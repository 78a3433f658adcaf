"""A body that is frozen and unfrozen while it trains, each way in which people do that."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastune.testing.faults import Rests, inject, parse_wishes

config = {"how": "flag", "faults": [], "resize": [], "pause_s": 0.0, "epochs": 4}


def data() -> TensorDataset:
    source = torch.Generator().manual_seed(5)
    return TensorDataset(torch.rand(48, 8, generator=source), torch.randint(0, 3, (48,), generator=source))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


def before(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Lines between ``prepare`` and the loop."""
    if how == "flag":
        model[0].requires_grad_(False)
    if how == "rate":
        optimizer.param_groups[0]["lr"] = 0.0


def begins(how: str, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Lines where an epoch begins."""
    if how == "flag" and epoch in (1, 3):
        model[0].requires_grad_(epoch == 1)
    if how == "rate" and epoch in (1, 3):
        optimizer.param_groups[0]["lr"] = 0.1 if epoch == 1 else 0.0


def train(session) -> None:
    how = session.config["how"]
    model, optimizer = build()
    if how == "late":
        model[0].requires_grad_(False)
    if how == "group":
        body = optimizer.param_groups.pop(0)
    model, optimizer = session.prepare(model, optimizer)
    before(how, model, optimizer)
    wishes = parse_wishes(session.config["resize"])
    reach, rests = inject(session), Rests(session, session.config["epochs"] * 3, wishes)
    for epoch in session.epochs(session.config["epochs"]):
        begins(how, epoch, model, optimizer)
        if how == "late" and epoch == 1:
            model[0].requires_grad_(True)
        if how == "group" and epoch == 1:
            optimizer.add_param_group(body)
        if how == "forgetful" and epoch == 1 and session.rank == 0:
            model[0].requires_grad_(False)
        for x, y in session.batches(data(), batch_size=16):
            if how == "body":  # as a GAN's loop does, in each batch
                model[0].requires_grad_(session.step % 2 == 0)
            reach("before")
            session.backward(F.cross_entropy(model(x), y))
            reach("after")
            optimizer.step()
            (model if how == "group" else optimizer).zero_grad()
            if session.ends_step:
                if session.step in wishes:
                    session.resize(int(wishes[session.step]))
                rests.rest()
        reach("passed")
        session.report(trains=float(model[0].weight.requires_grad), rate=optimizer.param_groups[0]["lr"])
