"""Programs with several losses of one batch, or a compiled model: each as a plain loop, and the same on a session."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.parity.programs.twins.made import mlp, pairs
from torch import nn
from torch.utils.data import DataLoader


def plain_in_turn(losses):
    model = mlp(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(2):
        for x, y in loader:
            one = F.mse_loss(model(x), y)
            one.backward()
            other = 0.1 * model(-x).square().mean()
            other.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(one.item() + other.item())


def in_turn(session, losses):
    model = mlp(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            one = F.mse_loss(model(x), y)
            session.backward(one, more=True)
            other = 0.1 * model(-x).square().mean()
            session.backward(other)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_adversaries(losses):
    first, second = mlp(6, 2), nn.Linear(2, 1)
    opt_first = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
    opt_second = torch.optim.SGD(second.parameters(), lr=0.05)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(2):
        for x, y in loader:
            result = first(x)
            judged = second(result.detach()).square().mean() - second(y).mean()
            judged.backward()
            loss = F.mse_loss(result, y)
            loss.backward()
            opt_first.step()
            opt_second.step()
            opt_first.zero_grad()
            opt_second.zero_grad()
            losses.append(judged.item() + loss.item())


def adversaries(session, losses):
    first, second = mlp(6, 2), nn.Linear(2, 1)
    opt_first = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
    opt_second = torch.optim.SGD(second.parameters(), lr=0.05)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    first, second, opt_first, opt_second = session.prepare(first, second, opt_first, opt_second)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            result = first(x)
            judged = second(result.detach()).square().mean() - second(y).mean()
            session.backward(judged, second, more=True)
            loss = F.mse_loss(result, y)
            session.backward(loss, first)
            opt_first.step()
            opt_second.step()
            opt_first.zero_grad()
            opt_second.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_compiled(losses):
    model = torch.compile(mlp(6, 2), backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def compiled(session, losses):
    model = torch.compile(mlp(6, 2), backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            loss = F.mse_loss(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step
