"""Random streams that belong to slots and samples, not to workers: so the number of workers changes no result."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils.data import Dataset

from elastune.core.run import derive


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
    else:  # ``torch.manual_seed`` formats a stack trace for every kind of device: a tenth of a millisecond each time
        torch.default_generator.manual_seed(seed)


def _seed_others(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def _draw_others() -> tuple[float, ...]:
    """A number of 53 bits from each stream that ``_seed_others`` seeds: it shows where the streams stand."""
    numpy = sys.modules.get("numpy")
    return (random.random(),) if numpy is None else (random.random(), numpy.random.random_sample())


@contextmanager
def _others_kept() -> Iterator[None]:
    """As ``streams_kept``, for the streams that ``_seed_others`` seeds."""
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)


@contextmanager
def streams_kept() -> Iterator[None]:
    """Put the streams of torch, Python's ``random`` and NumPy back afterwards: draws inside do not show in them."""
    kind = torch.accelerator.current_accelerator() if _has_accelerator() else None
    devices = [] if kind is None else [torch.accelerator.current_device_index()]
    device_type = "cuda" if kind is None else kind.type
    with _others_kept(), torch.random.fork_rng(devices, device_type=device_type):
        yield


def epoch_order(length: int, seed: int, epoch: int) -> torch.Tensor:
    """The order in which ``epoch`` visits ``length`` samples: a pure function of its arguments."""
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    return torch.randperm(length, generator=generator)


class SeededSamples(Dataset[Any]):
    """A map-style dataset whose random augmentation depends on (seed, epoch, sample) alone.

    Seeding all streams takes longer than reading a sample from memory; Python's and NumPy's streams take most of it. So
    where the first sample draws from neither, only torch's stream is seeded for each sample of a batch. After the batch
    one number of each other stream shows whether a sample has drawn from it. If so, the batch is read again, and from
    then on each sample seeds all streams. Comparing the whole states would take ten times as long.

    A sample that draws and then puts the stream back is not noticed. Without a seed of its own in between, plain
    PyTorch gives all such samples the same numbers.
    """

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = epoch
        self._torch_alone: bool | None = None  # whether samples draw from torch's stream alone; None: not known yet
        self._still = derive(seed, "still", epoch)
        self._unmoved: tuple[float, ...] = ()  # the first numbers after that seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        seed_everything(self._seed_of(index))
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Read a batch, as torch's loader asks for it; afterwards the streams stand as behind the last sample."""
        samples: list[Any] = []
        if self._torch_alone is None:
            samples.append(self[indices[0]])
            self._torch_alone = self._not_drawn_for(indices[0])
        rest = indices[len(samples) :]
        if self._torch_alone and rest:
            others = self._read_alone(rest)
            if others is not None:
                return samples + others
            self._torch_alone = False
        return samples + [self[index] for index in rest]

    def _not_drawn_for(self, index: int) -> bool:
        """Whether Python's and NumPy's streams stand as they did before sample ``index``, the newest."""
        with _others_kept():
            now = _draw_others()
            _seed_others(self._seed_of(index))
            before = _draw_others()
            _seed_others(self._still)
            self._unmoved = _draw_others()
        return now == before

    def _read_alone(self, indices: list[int]) -> list[Any] | None:
        """These samples, each with torch's stream seeded; None where a sample draws from another stream."""
        _seed_others(self._still)
        samples = []
        for index in indices:
            _seed_torch(self._seed_of(index))
            samples.append(self.dataset[index])
        if _draw_others() != self._unmoved:
            return None
        _seed_others(self._seed_of(indices[-1]))  # for the code that collates them
        return samples

    def _seed_of(self, index: int) -> int:
        return derive(self.seed, "sample", self.epoch, index)
