"""Programs with something in the loop besides a loss: each as a plain loop, and the same on a session."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.parity.programs.twins.made import images, mlp, pairs
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


def plain_checkpointing(losses):
    model = nn.ModuleList([mlp(6, 6), mlp(6, 6), mlp(6, 2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(2):
        for x, y in loader:
            for part in model:
                x = checkpoint(part, x, use_reentrant=False)
            loss = F.mse_loss(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def checkpointing(session, losses):
    model = nn.ModuleList([mlp(6, 6), mlp(6, 6), mlp(6, 2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            for part in model:
                x = checkpoint(part, x, use_reentrant=False)
            loss = F.mse_loss(x, y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_channels_last(losses):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(images(44), batch_size=16)
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def channels_last(session, losses):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(images(44), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            loss = F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_autocast(losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(2):
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def autocast(session, losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_scaler(losses):
    model, scaler = mlp(6, 2), GradScaler("cpu", init_scale=256.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())


def scaler(session, losses):
    model, scaler = mlp(6, 2), GradScaler("cpu", init_scale=256.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    scaler = session.track("scaler", scaler)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            loss = F.mse_loss(model(x), y)
            session.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            session.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_replay(losses):
    model, probe = mlp(6, 2), pairs(4, 6).tensors[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    buffer = {"seen": torch.zeros(3, 4, 2), "at": 0}
    for _ in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x), y) + 0.1 * F.mse_loss(model(probe), buffer["seen"].mean(0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            buffer["seen"][buffer["at"] % 3] = model(probe).detach()
            buffer["at"] += 1
            losses.append(loss.item())


def replay(session, losses):
    model, probe = mlp(6, 2), pairs(4, 6).tensors[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    buffer = session.track("buffer", {"seen": torch.zeros(3, 4, 2), "at": 0})
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            loss = F.mse_loss(model(x), y) + 0.1 * F.mse_loss(model(probe), buffer["seen"].mean(0))
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                buffer["seen"][buffer["at"] % 3] = model(probe).detach()
                buffer["at"] += 1
                losses.append(session.loss)


def plain_average(losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    slower = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x), y) + 0.1 * F.mse_loss(model(x), average(x).detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            slower.step()
            average.update_parameters(model)
            losses.append(loss.item())


def average(session, losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    slower = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    model, optimizer, slower = session.prepare(model, optimizer, slower)
    average = session.track("average", AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            loss = F.mse_loss(model(x), y) + 0.1 * F.mse_loss(model(x), average(x).detach())
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            slower.step()
            average.update_parameters(model)
            losses += [session.loss] * session.ends_step


def plain_frozen(losses):
    model = nn.Sequential(mlp(6, 8), mlp(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for epoch in range(3):
        model[0].requires_grad_(epoch == 1)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def frozen(session, losses):
    model = nn.Sequential(mlp(6, 8), mlp(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    for epoch in session.epochs(3):
        model[0].requires_grad_(epoch == 1)
        for x, y in session.batches(loader):
            loss = F.mse_loss(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_closure(losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(2):
        for x, y in loader:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())


def closure(session, losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                session.backward(loss)
                return loss

            optimizer.step(closure)
            losses += [session.loss] * session.ends_step
