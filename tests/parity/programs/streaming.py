"""A stream of unknown length that shuffles in a buffer and augments at random, and a smaller one to evaluate on."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from elastune.testing.faults import Rests, inject, parse_wishes

config = {"epochs": 3, "faults": [], "resize": [], "pause_s": 0.0, "loaders": 0, "turns": 1}
config |= {"plain": False, "unseeded": False}  # the stream draws nothing; it draws from what no seed decides


class Stream(IterableDataset):
    """Samples in an order that a buffer of eight makes, other ones in each epoch; no ``__len__``."""

    def __init__(self, count: int, augments: bool) -> None:
        self.count, self.augments, self.epoch = count, augments, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sample(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(number)
        x = torch.rand(8, generator=source)
        return x + (0.1 * torch.randn(8) if self.augments else 0.0), (x.sum() > 4).long()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker, buffer = get_worker_info(), []
        numbers = range(self.count + self.epoch)
        for number in numbers if worker is None else numbers[worker.id :: worker.num_workers]:
            buffer.append(number)
            if len(buffer) == 8:
                yield self.sample(buffer.pop(random.randrange(8)) if self.augments else buffer.pop(0))
        yield from map(self.sample, buffer)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(session) -> None:
    asked = session.config
    model, optimizer = session.prepare(*build())
    wishes = parse_wishes(asked["resize"])
    reach, rests = inject(session), Rests(session, 14 * asked["turns"], wishes)
    if asked["unseeded"]:
        random.randrange = random.SystemRandom().randrange
    loader = DataLoader(Stream(69, not asked["plain"]), batch_size=16, num_workers=asked["loaders"])
    for _ in session.epochs(asked["epochs"]):
        for x, y in session.batches(loader, turns=asked["turns"]):
            reach("before")
            session.backward(F.cross_entropy(model(x), y))
            reach("after")
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                if session.step in wishes:
                    session.resize(int(wishes[session.step]))
                rests.rest()
        right, seen = [], []
        for x, y in session.batches(Stream(33, augments=False), 10, train=False):
            reach("evaluating")
            right.append((model(x).argmax(1) == y).float().sum())
            seen.append(float(len(y)))
        session.report(right=session.sum(right), seen=session.sum(seen))
