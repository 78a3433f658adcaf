"""Made data and small networks for the twins."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset


def mlp(inputs: int, outputs: int, width: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def pairs(count: int, inputs: int) -> TensorDataset:
    """Inputs, and two targets each."""
    source = torch.Generator().manual_seed(5)
    x = torch.rand(count, inputs, generator=source)
    return TensorDataset(x, torch.stack([x.sum(1).sin(), x.prod(1)], 1))


def images(count: int) -> TensorDataset:
    source = torch.Generator().manual_seed(6)
    x = torch.rand(count, 3, 6, 6, generator=source)
    return TensorDataset(x, x.mean((1, 2, 3), keepdim=False).mul(50).long() % 3)


class Words(Dataset):
    """Sequences of lengths from one to three."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.arange(index, index + 1 + index % 3) % 10, index % 2


class Stream(IterableDataset):
    """The samples of ``pairs``, one after another."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return iter(pairs(44, 6))


def padded_pairs(count: int) -> TensorDataset:
    """Texts of five places with a target in some of them: in none of four texts in a row, in all of the last ones."""
    source = torch.Generator().manual_seed(7)
    x, y = torch.rand(count, 5, 6, generator=source), torch.randint(0, 4, (count, 5), generator=source)
    kept = torch.rand(count, 5, generator=source) < torch.linspace(0.1, 1.0, count)[:, None]
    kept[4:8] = False
    return TensorDataset(x, torch.where(kept, y, -100))
