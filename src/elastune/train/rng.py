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
    _seed_torch(seed)
    _seed_others(seed)


def _seed_torch(seed: int) -> None:
    if _has_accelerator():
        torch.manual_seed(seed)
    else:  # the other one formats a stack trace for every kind of device, each time: a tenth of a millisecond
        torch.default_generator.manual_seed(seed)


def _seed_others(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def _others() -> tuple[Any, ...]:
    """Where the streams stand that ``_seed_others`` seeds."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    told = numpy.random.get_state(legacy=False)
    inner = (part.tobytes() if isinstance(part, numpy.ndarray) else part for part in told["state"].values())
    return random.getstate(), *inner, told["has_gauss"]


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
    """A map-style dataset whose random augmentation depends on (seed, epoch, sample) alone.

    Seeding all streams takes longer than reading a sample from memory, and most of it are Python's and NumPy's. Where
    nobody has drawn from these two in a whole batch they are seeded once a batch from then on, and looked at behind it:
    a batch in which somebody does is read again.
    """

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = epoch
        self._torch_alone: bool | None = None  # nobody has looked

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        seed_everything(self._seed_of(index))
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """What torch's loader calls for a batch: each of them as above; the streams stand as behind the last."""
        if self._torch_alone is None:
            return self._watched(indices)
        if self._torch_alone:
            before, samples = _others(), []
            for index in indices:
                _seed_torch(self._seed_of(index))
                samples.append(self.dataset[index])
            self._torch_alone = _others() == before
            if self._torch_alone:
                _seed_others(self._seed_of(indices[-1]))  # for who collates them
                return samples
        return [self[index] for index in indices]

    def _watched(self, indices: list[int]) -> list[Any]:
        """As ``__getitems__``, of the first batch: nothing is read twice where all samples draw."""
        samples, self._torch_alone = [], True
        for index in indices:
            seed_everything(self._seed_of(index))
            before = _others()
            samples.append(self.dataset[index])
            self._torch_alone &= _others() == before
        return samples

    def _seed_of(self, index: int) -> int:
        return derive(self.seed, "sample", self.epoch, index)
