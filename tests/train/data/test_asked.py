"""What ``session.batches`` is asked for: a data set with options, or a DataLoader with its own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings
from elastune.train.data.loading import drawn
from elastune.train.data.source import data_request

DATA = TensorDataset(torch.arange(20.0).reshape(20, 1), torch.arange(20.0).reshape(20, 1))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1)


class FromGlobals:
    """A user's own sampler, which draws with whatever is at hand."""

    def __iter__(self) -> Iterator[int]:
        yield random.randrange(20)
        yield int(np.random.randint(20))
        yield int(torch.randint(20, ()))


def order(data: Any, seed: int = 0, epoch: int = 0, **options: Any) -> list[int]:
    source = data_request(data, **options).source(seed)(epoch)
    parts = [batch for batch, _ in source.fetch(source.batches(0, 8))]
    return [int(x) for batch in parts for x in batch[:, 0]]


@pytest.mark.parametrize(
    ("loader", "shuffle", "sampled"),
    [
        (DataLoader(DATA, batch_size=8), False, False),
        (DataLoader(DATA, batch_size=8, shuffle=True), True, False),
        (DataLoader(DATA, batch_size=8, sampler=RandomSampler(DATA)), True, False),
        (DataLoader(DATA, batch_size=8, sampler=SequentialSampler(DATA)), False, False),
        (DataLoader(DATA, batch_size=8, sampler=DistributedSampler(DATA, 2, 0)), True, False),
        (DataLoader(DATA, batch_size=8, sampler=DistributedSampler(DATA, 2, 0, shuffle=False)), False, False),
        (DataLoader(DATA, batch_size=8, shuffle=True, generator=torch.Generator()), True, True),
        (DataLoader(DATA, batch_size=8, sampler=RandomSampler(DATA, num_samples=7)), True, True),
        (DataLoader(DATA, batch_size=8, sampler=SubsetRandomSampler([1, 2, 3])), True, True),
    ],
)
def test_the_order_of_a_loader_is_taken_over(loader: DataLoader[Any], shuffle: bool, sampled: bool) -> None:
    asked = data_request(loader, None)
    assert (asked.batch_size, asked.shuffle, asked.sampler is not None) == (8, shuffle, sampled)
    result = order(loader, batch_size=None)
    assert len(result) == len(loader.sampler) * (2 if isinstance(loader.sampler, DistributedSampler) else 1)
    assert (result == list(range(20))) is (not shuffle)


def test_other_options_of_a_loader_are_taken_over() -> None:
    loader = DataLoader(DATA, 6, num_workers=2, collate_fn=list, drop_last=True, timeout=7, prefetch_factor=3)
    asked = data_request(loader, None)
    assert asked.drop_last
    assert asked.loading.collate_fn is list
    assert (asked.loading.loader_workers, asked.loading.timeout_s, asked.loading.prefetch_factor) == (2, 7, 3)
    assert data_request(DataLoader(DATA, 6), None).loading.collate_fn is None, (
        "torch's own: whole batches can be indexed"
    )


@pytest.mark.parametrize(
    ("data", "options", "rule"),
    [
        (
            DataLoader(DATA, 8),
            {"batch_size": 8},
            "brings its own options .got batch_size",
        ),
        (DataLoader(DATA, 8), {"shuffle": False, "pin_memory": True}, "got shuffle, pin_memory"),
        (DataLoader(DATA, batch_size=None), {}, "must be of several samples .got batch_size=None"),
        (DataLoader(DATA, batch_sampler=[[0, 1], []]), {}, "must draw samples .got none of list"),
        (DataLoader(DATA, batch_sampler=[]), {}, "must draw samples .got none of list"),
        (DataLoader(Stream(), batch_size=None), {}, "must be of several samples .got batch_size=None"),
        (Stream(), {"batch_size": 2, "shuffle": True}, "an order of its own .got shuffle=True"),
        (Stream(), {"batch_size": 2, "sampler": [0]}, "an order of its own .got a sampler"),
        (Stream(), {}, "batch_size must be a whole number"),
        (iter([]), {"batch_size": 2}, "or is torch's IterableDataset"),
        (DATA, {}, "batch_size must be a whole number"),
        (DATA, {"batch_size": 2, "sampler": [0], "shuffle": True}, "a sampler decides the order"),
        (DATA, {"batch_size": 2, "sampler": BatchSampler([0, 1], 2, False)}, "one index after another"),
        (DATA, {"batch_size": 2, "sampler": 3}, "one index after another .got int"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(data: Any, options: dict[str, Any], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        data_request(data, options.pop("batch_size", None), **options)


@pytest.mark.parametrize("sampler", [RandomSampler(DATA), WeightedRandomSampler([1.0] * 20, 9), FromGlobals()])
def test_a_draw_is_a_function_of_seed_and_epoch(sampler: Any) -> None:
    torch.manual_seed(1)
    first = drawn(sampler, 20, 3, 0).tolist()
    following = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == following, "drawing shows in no stream of the program's"
    assert drawn(sampler, 20, 3, 0).tolist() == first
    others = [drawn(sampler, 20, *at).tolist() for at in ((3, 1), (4, 0))]
    assert first not in others


def test_a_samplers_own_generator_decides_beside_the_run_and_is_left_alone() -> None:
    one, same, other = (RandomSampler(DATA, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    before = one.generator.get_state()
    assert drawn(one, 20, 0, 0).tolist() == drawn(same, 20, 0, 0).tolist() != drawn(other, 20, 0, 0).tolist()
    assert torch.equal(one.generator.get_state(), before)


@pytest.mark.parametrize(
    ("sampler", "rule"),
    [
        ([], "must draw samples"),
        ([0, 20], "from 0 to 19 .got 20 of list"),
        ([-1], "from 0 to 19 .got -1"),
        ([[0, 1]], "one index after another .got list of list"),
        ([0.5], "one index after another .got float"),
        (itertools.count(0) and itertools.cycle([1]), "must come to an end"),
    ],
)
def test_what_no_sampler_may_draw_is_refused(sampler: Any, rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        drawn(sampler, 20, 0, 0)


class ByLength:
    """A batch sampler that puts like samples together: in batches of as many as have the same remainder by three."""

    def __init__(self) -> None:
        self.sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(4))

    def __iter__(self) -> Iterator[list[int]]:
        for kind in torch.randperm(3).tolist():
            yield [index for index in self.sampler if index % 3 == kind]


def test_batches_of_a_batch_sampler_keep_their_sizes() -> None:
    asked = data_request(DataLoader(DATA, batch_sampler=ByLength()), None)
    assert asked.batch_size == 7  # on average
    torch.manual_seed(1)
    source = asked.source(3)(0)
    parts = list(source.batches(0, 7))
    assert sorted(map(len, parts)) == [6, 7, 7]
    results = [[int(x) for x in batch[:, 0]] for batch, _ in source.fetch(iter(parts))]
    assert all(len({x % 3 for x in batch}) == 1 for batch in results)
    assert sorted(x for batch in results for x in batch) == list(range(20))
    torch.manual_seed(2)
    again = asked.source(3)(0)
    assert list(again.batches(parts[0].stop, 7)) == parts[1:]
    assert [[int(x) for x in batch[:, 0]] for batch, _ in again.fetch(iter(parts))] == results
    others = [asked.source(*at[:1])(at[1]) for at in ((3, 1), (4, 0))]
    assert results not in [[[int(x) for x in b[:, 0]] for b, _ in o.fetch(o.batches(0, 7))] for o in others]
    with pytest.raises(UserError, match="its own sizes .got batches of 14"):
        next(source.batches(0, 14))
    assert len(asked.to_evaluate(3)) == 20


def test_a_sample_drawn_twice_is_augmented_twice() -> None:
    source = data_request(Noisy(), 4, sampler=[2, 2, 2, 1]).source(0)(0)
    (batch,) = source.fetch(source.batches(0, 4))
    assert [int(x) for x in batch] == [2, 2, 2, 1]
    assert len(set(batch[:3, 0].tolist())) == 3
    again = data_request(Noisy(), 4, sampler=[2, 2, 2, 1]).source(0)(0)
    assert torch.equal(next(iter(again.fetch(again.batches(0, 4)))), batch)


def test_a_plain_loop_over_the_loader_comes_to_the_same_bits(tmp_path: Path) -> None:
    loader = DataLoader(DATA, batch_size=8)

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(1, 1)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.fill_(0.1)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    model, optimizer = made()
    for _ in range(2):
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    session = lone_session(tmp_path, execution=ExecutionSettings(num_slots=1))
    ours, stepping = session.prepare(*made())
    for _ in session.epochs(2):
        for x, y in session.batches(loader):
            session.backward(F.mse_loss(ours(x), y))
            stepping.step()
            stepping.zero_grad()
    for a, b in zip(model.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)
