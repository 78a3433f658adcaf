"""Fingerprints of data: the same data look the same, whatever is drawn; others of equal size do not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from elastune.core.journal.records import DataContext
from elastune.train.data.fingerprint import SAMPLES, data_context


class Listed(Dataset[Any]):
    """Samples of any kind, with ``targets`` where given."""

    def __init__(self, samples: list[Any], targets: Any = None) -> None:
        self.samples = samples
        if targets is not None:
            self.targets = targets

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Noisy(Listed):
    """The same with random augmentation."""

    def __getitem__(self, index: int) -> Any:
        return self.samples[index] + random.random() + torch.rand(1) + float(np.random.rand())


def images(seed: int = 0, count: int = 100, classes: int = 10) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(count, 1, 8, 8, generator=generator), torch.arange(count) % classes)


def test_a_data_set_is_known_by_its_contents_shapes_and_classes() -> None:
    result = data_context(images())
    assert result == data_context(images())
    assert (result.samples, result.sample, result.classes) == (100, "float32[1, 8, 8], int64[]", 10)
    assert result.largest_class == pytest.approx(0.1)
    assert len(result.digest) == 16


@pytest.mark.parametrize(
    "other",
    [
        images(seed=1),
        TensorDataset(100 * images().tensors[0], images().tensors[1]),
        TensorDataset(images().tensors[0], 9 - images().tensors[1]),
        TensorDataset(images().tensors[0].double(), images().tensors[1]),
        TensorDataset(images().tensors[0].reshape(100, 64), images().tensors[1]),
    ],
    ids=["others", "scaled", "other targets", "other type", "other shape"],
)
def test_other_data_of_equal_size_look_different(other: TensorDataset) -> None:
    assert len(other) == len(images())
    assert data_context(other).digest != data_context(images()).digest


def test_augmentation_does_not_show_and_nothing_is_drawn_from_the_streams_of_training() -> None:
    noisy = Noisy([torch.full((3,), float(i)) for i in range(50)])
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = data_context(noisy)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()
    torch.manual_seed(99)
    random.seed(99)
    assert data_context(noisy) == first


KINDS: list[Any] = [
    {"x": torch.ones(2), "label": 3},
    ("text", 1, 2.5, b"raw"),
    [np.arange(6).reshape(2, 3), None],
    np.float32(1.5),
]


@pytest.mark.parametrize("sample", KINDS, ids=str)
def test_samples_may_be_of_any_kind(sample: Any) -> None:
    result = data_context(Listed([sample] * 5))
    assert result.digest
    assert result == data_context(Listed([sample] * 5))
    assert result.digest != data_context(Listed([[sample, 1]] * 5)).digest
    assert result.digest != data_context(Listed([sample] * 6)).digest


def test_classes_are_seen_in_targets_and_through_subsets() -> None:
    listed = Listed([torch.zeros(1)] * 40, targets=[0] * 30 + [1] * 10)
    assert (data_context(listed).classes, data_context(listed).largest_class) == (2, 0.75)
    part = data_context(Subset(listed, list(range(20, 40))))
    assert (part.samples, part.classes, part.largest_class) == (20, 2, 0.5)
    assert data_context(TensorDataset(torch.zeros(5, 2), torch.zeros(5, 1))).classes == 0, "no integers"
    assert data_context(Listed([1, 2], targets=[[1], [1, 2]])).classes == 0


def test_what_cannot_be_fetched_is_not_known_and_fails_nothing() -> None:
    class Closed(Listed):
        def __getitem__(self, index: int) -> Any:
            raise OSError("the file is closed")

    assert data_context(Closed([1, 2, 3])) == DataContext(3)


def test_few_samples_are_looked_at() -> None:
    seen: list[int] = []

    class Counting(Listed):
        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return index

    data_context(Counting(list(range(1000))))
    assert len(seen) == 2 * SAMPLES, "each twice: what differs then is not compared"
    assert seen[:SAMPLES] == seen[SAMPLES:] == sorted(set(seen))
    assert seen[0] == 0
    assert seen[-1] > 900
