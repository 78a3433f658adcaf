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
    else:  # the other one formats a stack trace for every kind of device, each time: a tenth of a millisecond
        torch.default_generator.manual_seed(seed)


def _seed_others(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def _draw_others() -> tuple[float, ...]:
    """A number of 53 bits from each of the streams that ``_seed_others`` seeds: it tells apart where they stand."""
    numpy = sys.modules.get("numpy")
    return (random.random(),) if numpy is None else (random.random(), numpy.random.random_sample())


@contextmanager
def _others_kept() -> Iterator[None]:
    """As ``streams_kept``, of the streams that ``_seed_others`` seeds."""
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
    """Whatever is drawn inside shows in no stream afterwards: torch's, Python's ``random``'s and NumPy's."""
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

    Seeding all streams takes longer than reading a sample from memory, and most of it are Python's and NumPy's. Where
    the first sample has not drawn from these two, they stand still while a batch is read, and one number of each is
    looked at behind it: a batch in which somebody has drawn is read again, and seeds them for each sample as all that
    follow. To look at their whole states would take ten times as long. Who draws and puts a stream back to where it
    stood is not noticed: without a seed of its own in between, plain PyTorch gives all its samples the same numbers.
    """

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = epoch
        self._torch_alone: bool | None = None  # nobody has looked
        self._still = derive(seed, "still", epoch)
        self._unmoved: tuple[float, ...] = ()  # what is drawn first after that seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        seed_everything(self._seed_of(index))
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """What torch's loader calls for a batch: each of them as above; the streams stand as behind the last."""
        found: list[Any] = []
        if self._torch_alone is None:
            found.append(self[indices[0]])
            self._torch_alone = self._not_drawn_for(indices[0])
        rest = indices[len(found) :]
        if self._torch_alone and rest:
            samples = self._read_alone(rest)
            if samples is not None:
                return found + samples
            self._torch_alone = False
        return found + [self[index] for index in rest]

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
        """These samples, with a seed of torch's stream for each; None where somebody draws from another one."""
        _seed_others(self._still)
        samples = []
        for index in indices:
            _seed_torch(self._seed_of(index))
            samples.append(self.dataset[index])
        if _draw_others() != self._unmoved:
            return None
        _seed_others(self._seed_of(indices[-1]))  # for who collates them
        return samples

    def _seed_of(self, index: int) -> int:
        return derive(self.seed, "sample", self.epoch, index)
