"""Losses that are no mean over samples, and a scheduler that nobody prepares: plain, and on a session."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.parity.programs.twins.made import mlp, padded_pairs, pairs
from torch import nn
from torch.utils.data import DataLoader


def plain_summed(losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x), y, reduction="sum")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def summed(session, losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            loss = F.mse_loss(model(x), y, reduction="sum")
            session.backward(loss, reduction="sum")
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_padded(losses):
    model = mlp(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(padded_pairs(44), batch_size=16)
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def padded(session, losses):
    model = mlp(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(padded_pairs(44), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
            session.backward(loss, count=(y != -100).sum())
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def similarity(one, other):
    """Each row of ``one`` against all rows of ``other``."""
    logits = F.normalize(one, dim=1) @ F.normalize(other, dim=1).T / 0.2
    return F.cross_entropy(logits, torch.arange(len(logits)))


class Towers(nn.Module):
    """Inputs and targets in one space."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = mlp(6, 3), mlp(2, 3)

    def forward(self, x, y):
        return self.one(x), self.other(y)


def plain_contrastive(losses):
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(2):
        for x, y in loader:
            loss = similarity(*model(x, y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def contrastive(session, losses):
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            session.backward_global(similarity, model, x, y)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_scheduled(losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    halved = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(3):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        halved.step()


def scheduled(session, losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    halved = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(3):
        for x, y in session.batches(loader):
            loss = F.mse_loss(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step
        halved.step()
