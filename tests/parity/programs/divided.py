"""A stream in parts of unequal, unknown lengths, which augments at random; ``seeks``: its parts have a state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from elastune.testing.faults import Rests, inject, parse_wishes

config = {"epochs": 2, "faults": [], "resize": [], "pause_s": 0.0, "loaders": 0, "drop_last": False}
config |= {"seeks": True, "unseeded": False, "length": 270, "until": ""}


class Numbers:
    """The numbers of one part."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.next = numbers, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.next < len(self.numbers):
            number = self.numbers[self.next]
            self.next += 1
            noise = torch.randn(8) * random.random()
            x = torch.rand(8, generator=torch.Generator().manual_seed(number)) + 0.1 * noise
            yield x, (x.sum() > 4).long()


class Seekable(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Unseeded(Numbers):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for x, y in super().__iter__():
            yield x + random.SystemRandom().random(), y


class Stream(IterableDataset):
    """Part k of n has the numbers k, k + n, ...; the first part has twelve more, and each epoch one more."""

    def __init__(self, length: int, kind: type[Numbers]) -> None:
        self.length, self.kind, self.epoch = length, kind, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, index: int, count: int) -> Numbers:
        more = range(1000, 1012 + self.epoch) if index == 0 else []
        return self.kind([*range(self.length)[index::count], *more])

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("a stream with shard is read in parts")


def kind_of(asked: dict[str, Any]) -> type[Numbers]:
    return Unseeded if asked["unseeded"] else Seekable if asked["seeks"] else Numbers


def train(session) -> None:
    asked = session.config
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
    model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    wishes = parse_wishes(asked["resize"])
    reach, rests = inject(session), Rests(session, 20, wishes)
    stream = Stream(asked["length"], kind_of(asked))
    loader = DataLoader(stream, batch_size=24, num_workers=asked["loaders"], drop_last=asked["drop_last"])
    for _ in session.epochs(asked["epochs"]):
        for x, y in session.batches(loader):
            reach("before")
            session.backward(F.cross_entropy(model(x), y))
            reach("after")
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                if session.step in wishes:
                    session.resize(int(wishes[session.step]))
                rests.rest()
        session.report(seen=session.samples)
