"""Linear regression whose rank 1 does something else: ``config["act"]`` says what."""

from __future__ import annotations

import random
import time

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, TensorDataset

config = {"act": "", "epochs": 3, "lr": 0.05, "hold_s": 600.0}


def data(shift: float = 0.0, count: int = 200) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 4, generator=generator) + shift
    return TensorDataset(x, x.sum(1, keepdim=True))


class Noise(Dataset):
    """Augments with random numbers of its own, which nobody seeds."""

    def __init__(self) -> None:
        self._noise = random.SystemRandom()

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int):
        x = torch.full((4,), index / 200 + 0.1 * (self._noise.random() < 0.5))
        return x, x.sum(0, keepdim=True)


def train(session) -> None:
    act, odd = session.config["act"], session.rank == 1
    if act == "returns at once" and odd:
        return
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    if act == "another model" and odd:
        model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=session.config["lr"], momentum=0.9)
    if act == "another optimizer" and odd:
        optimizer = torch.optim.AdamW(model.parameters(), lr=session.config["lr"])
    model, optimizer = session.prepare(model, optimizer)
    train_set = data(shift=float(act == "other data" and odd), count=180 if act == "less data" and odd else 200)
    if act == "noise":
        train_set = Noise()
    best, waited = float("inf"), 0
    for epoch in session.epochs(session.config["epochs"] + (act == "one epoch more" and odd)):
        batch = 10 if act == "smaller batch" and odd else 20
        for x, y in session.batches(train_set, batch_size=batch, shuffle=not (act == "no shuffle" and odd)):
            loss = F.mse_loss(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if not session.ends_step or session.step != 4:
                continue
            if act == "break" and odd:
                break  # rank 1
            if act == "sum inside" and odd:
                session.sum(1.0)
            if act == "save" and odd:
                session.save()
            if act == "rate" and odd:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
            if act == "sleep" and odd:
                time.sleep(session.config["hold_s"])
        value = float(loss.detach()) if act == "stops by its own loss" else session.mean(loss)
        if act == "sum" and odd:
            session.sum(value)
        if act == "other metrics" and odd:
            session.report(error=value)
        elif act == "more metrics" and odd:
            session.report(loss=value, error=value)
        else:
            session.report(loss=value)  # as all
        if act == "report" and odd:
            session.report(loss=value)
        if act == "evaluates":
            held_out = data(count=60 if odd else 90)
            seen = sum(len(x) for x, _ in session.batches(held_out, 30, train=False))
            session.report(seen=session.sum(seen))
        waited = 0 if value < best else waited + 1
        best = min(best, value)
        if act == "stops early" and odd and epoch == 1:
            break  # early
        if act == "returns" and odd and epoch == 1:
            return  # rank 1
        if act == "stops by its own loss" and session.rank * epoch > 0:
            break  # its own
