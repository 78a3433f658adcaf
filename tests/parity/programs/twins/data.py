"""Programs that bring data of their own kinds: each as a plain loop, and the same on a session."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.parity.programs.twins.made import Stream, Words, mlp, pairs
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


def plain_subset(losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(pairs(60, 6), batch_size=8, sampler=range(59, 0, -2), drop_last=True)
    for _ in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def subset(session, losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(pairs(60, 6), batch_size=8, sampler=range(59, 0, -2), drop_last=True)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            loss = F.mse_loss(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_stream(losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Stream(), batch_size=16)
    for _ in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def stream(session, losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Stream(), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            loss = F.mse_loss(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def padded(samples):
    return pad_sequence([words for words, _ in samples], batch_first=True), torch.tensor([y for _, y in samples])


def plain_buckets(losses):
    model = nn.Sequential(nn.EmbeddingBag(10, 8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    buckets = [[n for n in range(40) if n % 3 == kind][:13] for kind in (2, 0, 1)]
    loader = DataLoader(Words(), batch_sampler=buckets, collate_fn=padded)
    for _ in range(2):
        for words, y in loader:
            loss = F.cross_entropy(model(words), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def buckets(session, losses):
    model = nn.Sequential(nn.EmbeddingBag(10, 8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    buckets = [[n for n in range(40) if n % 3 == kind][:13] for kind in (2, 0, 1)]
    loader = DataLoader(Words(), batch_sampler=buckets, collate_fn=padded)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(2):
        for words, y in session.batches(loader):
            loss = F.cross_entropy(model(words), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_accumulation(losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader, so_far = DataLoader(pairs(48, 6), batch_size=8), 0.0
    for _ in range(2):
        for at, (x, y) in enumerate(loader):
            loss = F.mse_loss(model(x), y) / 2
            loss.backward()
            so_far += loss.item()
            if at % 2:
                optimizer.step()
                optimizer.zero_grad()
                losses.append(so_far)
                so_far = 0.0


def accumulation(session, losses):
    model = mlp(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(pairs(48, 6), batch_size=16)
    model, optimizer = session.prepare(model, optimizer)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            loss = F.mse_loss(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step
