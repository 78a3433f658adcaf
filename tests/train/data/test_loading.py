"""How a batch comes to a device; loading processes that stay from pass to pass."""

from __future__ import annotations

import os
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from elastune.train.data.loading import to_device
from elastune.train.data.source import data_request

Pair = namedtuple("Pair", "x y")


class Named(list[Any]):
    """A list of a kind of its own."""


def test_a_batch_keeps_its_structure() -> None:
    x, device = torch.ones(2), torch.device("meta")
    given = [x, "word", Named([x, 3]), (x, b"bytes"), Pair(x, None), {"x": [x]}]
    result = to_device(given, device)
    assert [type(each) for each in result] == [torch.Tensor, str, Named, tuple, Pair, dict]
    moved = [result[0], result[2][0], result[3][0], result[4].x, result[5]["x"][0]]
    assert all(each.device == device for each in moved)
    assert (result[1], result[2][1], result[3][1], result[4].y) == ("word", 3, b"bytes", None)
    assert to_device(given, x.device)[0] is x


class Noted(Dataset[Any]):
    """Samples with a random number, and the process that read them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        return index, os.getpid(), torch.rand(()).item()


def passes(loader: DataLoader[Any], epochs: int = 3) -> tuple[list[list[tuple[int, float]]], set[int]]:
    """The samples of each epoch, and the processes that read them; the second pass is begun twice."""
    read, processes = [], set()
    for epoch in range(epochs):
        source = data_request(loader, None, seed=1).source(1)(epoch)
        if epoch == 1:
            next(iter(source.fetch(source.batches(0, 4))))
        batches = list(source.fetch(source.batches(0, 4)))
        read.append(
            [(int(i), float(x)) for indices, _, numbers in batches for i, x in zip(indices, numbers, strict=True)]
        )
        processes |= {int(process) for _, each, _ in batches for process in each}
    return read, processes


@pytest.mark.parametrize("drawn", [False, True])
def test_processes_that_stay_read_what_new_ones_would(drawn: bool) -> None:
    def loader(**options: Any) -> DataLoader[Any]:
        sampler = WeightedRandomSampler([1.0] * 12, 12) if drawn else None
        return DataLoader(Noted(), batch_size=4, sampler=sampler, shuffle=None if drawn else True, **options)

    plain, _ = passes(loader())
    kept, processes = passes(loader(num_workers=1, persistent_workers=True))
    assert kept == plain
    assert len({tuple(index for index, _ in epoch) for epoch in kept}) == 3, "each epoch has an order of its own"
    assert len(processes) == 1
    _, others = passes(loader(num_workers=1), epochs=2)
    assert len(others) == 2


def test_a_pass_inside_of_a_pass_has_processes_of_its_own() -> None:
    loader = DataLoader(Noted(), batch_size=4, num_workers=1, persistent_workers=True)
    source = data_request(loader, None, seed=1).source(1)(0)
    outer = source.fetch(source.batches(0, 4))
    first = next(outer)
    inner = list(source.fetch(source.batches(0, 4)))
    assert [len(indices) for indices, _, _ in (first, *outer)] == [len(indices) for indices, _, _ in inner] == [4, 4, 4]
