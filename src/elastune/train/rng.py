"""Random streams that belong to slots and samples, not to workers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils.data import Dataset

from elastune.core.seeds import derive


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), Python's ``random`` and, where it is loaded, NumPy."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:  # the other one formats a stack trace for every kind of device, each time: a tenth of a millisecond
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def streams_kept() -> Iterator[None]:
    """Whatever is drawn inside shows in no stream afterwards: torch's, Python's ``random``'s and NumPy's."""
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    kind = torch.accelerator.current_accelerator() if _has_accelerator() else None
    devices = [] if kind is None else [torch.accelerator.current_device_index()]
    try:
        with torch.random.fork_rng(devices, device_type="cuda" if kind is None else kind.type):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)


def epoch_order(length: int, seed: int, epoch: int) -> torch.Tensor:
    """The order in which ``epoch`` visits ``length`` samples: a pure function of its arguments."""
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    return torch.randperm(length, generator=generator)


class SeededSamples(Dataset[Any]):
    """A map-style dataset whose random augmentation depends on (seed, epoch, sample) alone."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        seed_everything(derive(self.seed, "sample", self.epoch, index))
        return self.dataset[index]
