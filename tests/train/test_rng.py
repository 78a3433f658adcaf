"""Samples from streams of their own, whether a batch is read at once or each sample by itself."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from elastune.train.rng import SeededSamples

BATCHES = [[3, 1, 4], [0, 5, 2], [9, 7, 6], [8, 11, 10]]


class Drawing(Dataset[tuple[int, float, float]]):
    """Of samples in ``drawing`` a part is random: torch's own in all, and Python's or NumPy's in these."""

    def __init__(self, *drawing: int, numpy: bool = False) -> None:
        self.drawing, self.numpy = drawing, numpy
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        self.reads[index] += 1
        drawn = 0.0
        if index in self.drawing:
            drawn = np.random.standard_normal() if self.numpy else random.random()
        return index, float(torch.rand(())), drawn


def read(dataset: Drawing, at_once: bool) -> list[object]:
    """All batches, and what who collates each of them would draw."""
    samples, result = SeededSamples(dataset, 5, 2), []
    for batch in BATCHES:
        result.append(samples.__getitems__(batch) if at_once else [samples[index] for index in batch])
        result.append((random.random(), np.random.standard_normal(), float(torch.rand(()))))
    return result


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("drawing", [(), (3,), (5,), (1, 7), (6,), tuple(range(12))])
def test_a_batch_is_what_its_samples_are_one_by_one(drawing: tuple[int, ...], numpy: bool) -> None:
    alone, together = Drawing(*drawing, numpy=numpy), Drawing(*drawing, numpy=numpy)
    assert read(together, at_once=True) == read(alone, at_once=False)
    first = BATCHES[0][0]
    parts = [BATCHES[0][1:], *BATCHES[1:]]
    again = next((part for part in parts if first not in drawing and set(drawing) & set(part)), [])
    assert together.reads == Counter(range(12)) + Counter(again)


@pytest.mark.parametrize("drawing", [(), (3,)])
def test_a_batch_of_one_sample_leaves_streams_as_that_does(drawing: tuple[int, ...]) -> None:
    alone, together = (SeededSamples(Drawing(*drawing), 5, 2) for _ in range(2))
    for index in (3, 4):
        expected = alone[index], random.random(), np.random.standard_normal()
        assert (*together.__getitems__([index]), random.random(), np.random.standard_normal()) == expected


def test_streams_that_no_sample_draws_from_are_not_seeded_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    seed = random.seed
    monkeypatch.setattr(random, "seed", lambda given: (seeded.append(given), seed(given)))
    samples = SeededSamples(Drawing(), 5, 2)
    counts = []
    for _ in range(3):
        samples.__getitems__(list(range(12)))
        counts.append(len(seeded))
        seeded.clear()
    assert counts == [5, 2, 2]
