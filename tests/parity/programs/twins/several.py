"""Programs with several models or optimizers: each as a plain loop, and the same on a session."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.parity.programs.twins.made import mlp, pairs
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader


def plain_actor_critic(losses):
    actor, critic = mlp(6, 3), mlp(6, 1)
    first = torch.optim.Adam(actor.parameters(), lr=1e-2)
    second = torch.optim.SGD(critic.parameters(), lr=5e-2, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(2):
        for seen, reward in loader:
            value, actions = critic(seen)[:, 0], actor(seen)
            gain = (reward[:, 0] - value).detach()
            loss = (gain * F.cross_entropy(actions, seen.argmax(1) % 3, reduction="none")).mean()
            loss = loss + F.mse_loss(value, reward[:, 0])
            loss.backward()
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
            losses.append(loss.item())


def actor_critic(session, losses):
    actor, critic = mlp(6, 3), mlp(6, 1)
    first = torch.optim.Adam(actor.parameters(), lr=1e-2)
    second = torch.optim.SGD(critic.parameters(), lr=5e-2, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    actor, critic, first, second = session.prepare(actor, critic, first, second)
    for _ in session.epochs(2):
        for seen, reward in session.batches(loader):
            value, actions = critic(seen)[:, 0], actor(seen)
            gain = (reward[:, 0] - value).detach()
            loss = (gain * F.cross_entropy(actions, seen.argmax(1) % 3, reduction="none")).mean()
            loss = loss + F.mse_loss(value, reward[:, 0])
            session.backward(loss)
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_two_tower(losses):
    users, items = mlp(6, 8), mlp(2, 8)
    optimizer = torch.optim.AdamW([*users.parameters(), *items.parameters()], lr=1e-2)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(2):
        for user, item in loader:
            likes = (user[:, 0] > 0.5).float()
            loss = bce((users(user) * items(item)).sum(1), likes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def two_tower(session, losses):
    users, items = mlp(6, 8), mlp(2, 8)
    optimizer = torch.optim.AdamW([*users.parameters(), *items.parameters()], lr=1e-2)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    users, items, optimizer = session.prepare(users, items, optimizer)
    for _ in session.epochs(2):
        for user, item in session.batches(loader):
            likes = (user[:, 0] > 0.5).float()
            loss = bce((users(user) * items(item)).sum(1), likes)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_distillation(losses):
    teacher, student = mlp(6, 4).eval().requires_grad_(False), mlp(6, 4, width=5)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(2):
        for x, _unused in loader:
            loss = F.kl_div(student(x).log_softmax(1), teacher(x).softmax(1), reduction="batchmean")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def distillation(session, losses):
    teacher, student = mlp(6, 4).eval().requires_grad_(False), mlp(6, 4, width=5)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    student, optimizer = session.prepare(student, optimizer)
    for _ in session.epochs(2):
        for x, _unused in session.batches(loader):
            loss = F.kl_div(student(x).log_softmax(1), teacher(x).softmax(1), reduction="batchmean")
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_critic_twice(losses):
    generator, critic = mlp(2, 6), mlp(6, 1)
    first = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    second = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    for _ in range(2):
        for real, noise in loader:
            for turn in range(3):
                if turn < 2:
                    loss = critic(generator(noise).detach()).mean() - critic(real).mean()
                    loss.backward()
                    first.step()
                    first.zero_grad()
                else:
                    loss = -critic(generator(noise)).mean()
                    loss.backward()
                    second.step()
                    second.zero_grad()
                    first.zero_grad()
                losses.append(loss.item())


def critic_twice(session, losses):
    generator, critic = mlp(2, 6), mlp(6, 1)
    first = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    second = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    generator, critic, first, second = session.prepare(generator, critic, first, second)
    for _ in session.epochs(2):
        for real, noise in session.batches(loader, turns=3):
            if session.turn < 2:
                loss = critic(generator(noise).detach()).mean() - critic(real).mean()
                session.backward(loss, critic)
                first.step()
                first.zero_grad()
            else:
                loss = -critic(generator(noise)).mean()
                session.backward(loss, generator)
                second.step()
                second.zero_grad()
            losses += [session.loss] * session.ends_step


def plain_alternating(losses):
    model = nn.Sequential(mlp(6, 8), nn.Tanh(), mlp(8, 2))
    body = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    head = torch.optim.Adam(model[2].parameters(), lr=1e-2)
    loader, step = DataLoader(pairs(44, 6), batch_size=16), 0
    for _ in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            (body if step % 2 else head).step()
            model.zero_grad()
            step += 1
            losses.append(loss.item())


def alternating(session, losses):
    model = nn.Sequential(mlp(6, 8), nn.Tanh(), mlp(8, 2))
    body = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    head = torch.optim.Adam(model[2].parameters(), lr=1e-2)
    loader = DataLoader(pairs(44, 6), batch_size=16)
    model, body, head = session.prepare(model, body, head)
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            loss = F.mse_loss(model(x), y)
            session.backward(loss)
            (body if session.step % 2 else head).step()
            model.zero_grad()
            losses += [session.loss] * session.ends_step
