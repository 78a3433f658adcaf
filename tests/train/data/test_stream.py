"""Streams: what is read again is the same, whoever reads; an end that nobody knew; streams without one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings
from elastune.train.data.loading import LoaderOptions
from elastune.train.data.source import data_request
from elastune.train.data.stream import Reader, StreamSource


class Stream(IterableDataset[Any]):
    """Numbers with a random one beside each; ``read`` counts how often one was asked for."""

    def __init__(self, count: int | None) -> None:
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in itertools.count() if self.count is None else range(self.count):
            self.read += 1
            yield torch.tensor([float(number), random.random(), torch.rand(()).item()])


class Unseeded(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        chance = random.SystemRandom()
        return iter([torch.tensor([chance.random()]) for _ in range(4)])


def source(stream: Any, **options: Any) -> StreamSource:
    result = data_request(stream, 4, **options).source(1)(2)
    assert isinstance(result, StreamSource)
    return result


@pytest.mark.parametrize(
    ("count", "drop_last", "sizes"),
    [
        (10, False, [4, 4, 2]),
        (10, True, [4, 4]),
        (8, False, [4, 4]),
        (8, True, [4, 4]),
        (3, True, []),
        (0, False, []),
    ],
)
def test_batches_end_where_the_stream_does(count: int, drop_last: bool, sizes: list[int]) -> None:
    stream = source(Stream(count), drop_last=drop_last)
    assert not stream.ends(0)
    known = []
    for places in stream.batches(0, 4):
        known.append((len(places), stream.ends(places.stop)))
    assert known == [(size, at == len(sizes) - 1) for at, size in enumerate(sizes)]
    assert stream.ends(sum(sizes))


def test_whoever_reads_a_place_reads_the_same() -> None:
    one, other, again = source(Stream(20)), source(Stream(20)), source(Stream(20))
    parts = list(one.batches(0, 4))
    torch.manual_seed(5)
    following = torch.rand(1)
    torch.manual_seed(5)
    results = list(one.fetch(iter(parts)))
    assert torch.equal(torch.rand(1), following), "reading shows in no stream of the program's"
    assert torch.equal(torch.cat(results)[:, 0], torch.arange(20.0))
    torch.manual_seed(6)
    late = list(other.batches(12, 4))
    assert late == parts[3:]
    for mine, theirs in zip(other.fetch(iter(late)), results[3:], strict=True):
        assert torch.equal(mine, theirs)
    assert [again.checksum(part) for part in parts] == [one.checksum(part) for part in parts]


def test_what_was_let_go_of_is_read_again_and_no_more_is_kept() -> None:
    stream = Stream(40)
    reader = Reader(stream, 0, 0, LoaderOptions())
    result = reader.at(30)
    assert stream.read == 31
    reader.let_go(30)
    assert torch.equal(reader.at(30), result)
    assert stream.read == 31
    early = reader.at(2)
    assert (early[0], stream.read) == (2.0, 31 + 3)
    assert torch.equal(reader.at(30), result)


def test_a_round_of_several_batches_reads_once() -> None:
    """Its batches are planned before the first of them is fetched; and its checksum is asked for behind the last."""
    stream = Stream(80)
    result = source(stream)
    parts = list(result.batches(0, 4))
    assert [len(batch) for batch in result.fetch(iter(parts))] == [4] * 20
    assert sum(map(result.checksum, parts)) > 0
    assert stream.read == 80
    assert len(result._reader._items) <= 3 * 4


def test_a_stream_that_gives_workers_other_items_is_seen() -> None:
    one, other = source(Unseeded(4)), source(Unseeded(4))
    assert one.checksum(range(4)) != other.checksum(range(4))
    reader = Reader(Stream(6), 0, 0, LoaderOptions())
    with pytest.raises(UserError, match="an end at 6"):
        reader.at(6)


def test_a_stream_without_an_end_trains_as_long_as_it_is_asked(tmp_path: Path) -> None:
    session = lone_session(tmp_path, execution=ExecutionSettings(num_slots=2), max_steps=5)
    model = nn.Linear(3, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in session.epochs(1):
        for x in session.batches(DataLoader(Stream(None), batch_size=4)):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert (session.step, session.samples, session.stopped) == (5, 20, "max_steps")
