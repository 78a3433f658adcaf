"""A stream in parts: what its batches are made of, where readers begin, and what is known of its end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.parity.programs import others_data
from tests.parity.programs.divided import Numbers, Seekable, Stream, Unseeded
from tests.support.sessions import lone_session
from torch.utils.data import IterableDataset

from elastune.core.errors import UserError
from elastune.core.run import Position
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import Group
from elastune.train.data import part_reader
from elastune.train.data.divided import DividedSource, StreamPositions, shares_of_parts
from elastune.train.data.loading import LoaderOptions
from elastune.train.data.part_reader import PartedStream, PartMark, PartReader
from elastune.train.data.parts import Division, TarPart, division_of, open_hugging_face, open_shard, open_tars


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that parts of a few items have several."""
    monkeypatch.setattr(part_reader, "CHUNK", 4)


class At:
    """Stands for a run's progress."""

    def __init__(self) -> None:
        self.position = Position(epoch=1)


def positions(at: At, slots: int = 4) -> StreamPositions:
    return StreamPositions(WorkerGroup(Group()), slots, at, lambda record: None, lambda: None)


def source(where: StreamPositions, kind: type[Numbers] = Seekable, loaders: int = 0, **options: Any) -> DividedSource:
    loading = LoaderOptions(loader_workers=loaders)
    return DividedSource(
        Stream(40, kind), open_shard, where, 3, 1, drop_last=options.get("drop_last", False), loading=loading
    )


def everything(kind: type[Numbers] = Seekable, loaders: int = 0) -> tuple[list[range], list[Any]]:
    whole = source(positions(At()), kind, loaders)
    places = []

    def noted() -> Iterator[range]:
        for batch in whole.batches(0, 8):
            places.append(batch)
            yield batch

    return places, list(whole.fetch(noted()))


@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=6),
)
def test_a_batch_is_full_as_long_as_there_are_items(size: int, parts: list[tuple[int, bool]]) -> None:
    left, ended = [items for items, _ in parts], [over for _, over in parts]
    takes = shares_of_parts(size, left, ended)
    if takes is None:
        assert not all(ended)
        return
    assert all(0 <= take <= items for take, items in zip(takes, left, strict=True))
    assert sum(takes) == (min(size, sum(left)) if all(ended) else size)
    certain = shares_of_parts(size, [100 if not over else items for items, over in parts], ended)
    assert takes == certain, "more knowledge changes nothing"


def test_slots_have_the_items_of_their_parts() -> None:
    places, batches = everything()
    assert [len(batch) for batch in places] == [8] * 6 + [5]
    part = list(Stream(40, Seekable).shard(2, 4))
    assert len(part) == 10
    assert [len(x) for x, _ in batches] == [len(batch) for batch in places]


@pytest.mark.parametrize("kind", [Seekable, Numbers])
@pytest.mark.parametrize("loaders", [0, 2])
def test_who_begins_late_reads_the_same(kind: type[Numbers], loaders: int) -> None:
    batches = everything(kind)[1]
    at = At()
    first = positions(at)
    for number, batch in enumerate(source(first, kind).batches(0, 8)):
        at.position = Position(epoch=1, offset=batch.start)
        if number == 4:
            break
    second = positions(at)
    second.load_state_dict(first.state_dict())
    late = source(second, kind, loaders)
    rest = list(late.fetch(late.batches(32, 8)))
    assert len(rest) == len(batches) - 4
    for (x, y), (wanted_x, wanted_y) in zip(rest, batches[4:], strict=True):
        assert torch.equal(x, wanted_x)
        assert torch.equal(y, wanted_y)


def test_processes_that_load_change_nothing() -> None:
    alone, loaded = everything()[1], everything(loaders=2)[1]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(alone, loaded, strict=True))


def test_the_last_batch_is_known_to_be_the_last() -> None:
    for drop_last, sizes in ((False, [8] * 6 + [5]), (True, [8] * 6)):
        whole = source(positions(At()), drop_last=drop_last)
        known = [(len(batch), whole.ends(batch.stop)) for batch in whole.batches(0, 8)]
        assert known == [(size, number == len(sizes) - 1) for number, size in enumerate(sizes)]


def test_a_size_may_change_in_mid_epoch() -> None:
    at = At()
    where = positions(at)
    begun = source(where)
    sizes = [len(batch) for batch, _ in zip(begun.batches(0, 8), range(2), strict=False)]
    at.position = Position(epoch=1, offset=16)
    sizes += [len(batch) for batch in begun.batches(16, 12)]
    assert sizes == [8, 8, 12, 12, 12, 1]
    other = positions(at)
    other.load_state_dict(where.state_dict())
    assert [len(batch) for batch in source(other).batches(16, 12)] == [12, 12, 12, 1]


class Counting(Seekable):
    """Counts the items that were read."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            Counting.read += 1
            yield item


def test_a_reader_that_seeks_reads_few_items_again() -> None:
    stream = PartedStream(Stream(40_000, Counting), open_shard, 4, 0, 0)
    reader = PartReader(lambda mark: stream.chunks(1, mark), PartMark())
    item = reader.at(9000)
    mark = reader.mark(9000)
    Counting.read = 0
    late = PartReader(lambda mark: stream.chunks(1, mark), mark)
    assert torch.equal(late.at(9000)[0], item[0])
    assert Counting.read <= 2 * 4
    late.let_go(9000, 9000)
    assert torch.equal(late.at(mark.index)[0], reader.at(mark.index)[0]), "what was dropped is read again"


def test_a_part_that_gives_other_items_is_seen() -> None:
    stream = PartedStream(Stream(400, Unseeded), open_shard, 4, 0, 0)
    reader = PartReader(lambda mark: stream.chunks(1, mark), PartMark())
    reader.reaches(44)
    with pytest.raises(UserError, match="another item at 40 of part 1"):
        PartReader(lambda mark: stream.chunks(1, mark), reader.mark(40)).reaches(44)


def test_workers_read_their_own_parts_only() -> None:
    opened = []

    class Watched(Stream):
        def shard(self, index: int, count: int) -> Numbers:
            opened.append(index)
            return super().shard(index, count)

    at = At()
    where = positions(at)
    lone = DividedSource(Watched(400, Seekable), open_shard, where, 0, 0, drop_last=False, loading=LoaderOptions())
    next(lone.batches(0, 8))
    assert sorted(opened) == [0, 1, 2, 3]
    assert all(items <= 2 * 4 for items in where.known.items), "and not far ahead"


class OtherOrder(IterableDataset[int]):
    """Has a ``shard`` of another meaning."""

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def shard(self, num_shards: int, index: int) -> None: ...


def test_what_can_be_divided_says_so() -> None:
    assert division_of(Stream(4, Seekable), 4) == Division(open_shard)
    unsought = division_of(Stream(4, Numbers), 4)
    assert isinstance(unsought, Division)
    assert "from their beginning" in unsought.price
    whole = division_of(OtherOrder(), 4)
    assert isinstance(whole, str)
    assert "stream OtherOrder: every worker reads all of it" in whole
    assert division_of(OtherOrder(), 1) == ""


def ids(part: Any) -> list[int]:
    return [int(sample["id"]) for sample in part]


def test_tar_files_go_to_slots_and_are_sought(tmp_path: Path) -> None:
    others_data.write_tars(tmp_path)
    stream = others_data.raw_tars(str(tmp_path))
    assert division_of(stream, 4) == Division(open_tars)
    parts = [ids(open_tars(stream, index, 4)) for index in range(4)]
    assert parts[0] == [*range(10), *range(40, 50)]
    assert sorted(itertools.chain(*parts)) == list(range(50))
    for read in (1, 9, 10, 11, 19):
        part = open_tars(stream, 0, 4)
        assert isinstance(part, TarPart)
        begun = ids(itertools.islice(part, read))
        late = open_tars(stream, 0, 4)
        late.load_state_dict(part.state_dict())
        assert begun + ids(late) == parts[0]
    shuffled = division_of(others_data.tars(str(tmp_path)), 4)
    assert isinstance(shuffled, Division)
    assert "keeps samples back" in shuffled.price
    assert isinstance(division_of(stream, 6), str), "five files"


@pytest.mark.parametrize("shards", [8, 5])
def test_streams_of_hugging_face_go_to_slots(shards: int) -> None:
    held = datasets.Dataset.from_dict({"id": list(range(50))})
    stream = held.to_iterable_dataset(num_shards=shards)
    assert division_of(stream, 4) == Division(open_hugging_face)
    parts = [ids(open_hugging_face(stream, index, 4)) for index in range(4)]
    assert sorted(itertools.chain(*parts)) == list(range(50))
    assert all(parts)
    shuffled = division_of(stream.shuffle(seed=1, buffer_size=8), 4)
    assert isinstance(shuffled, Division)
    assert "shuffle buffer" in shuffled.price
    assert isinstance(division_of(held.to_iterable_dataset(num_shards=3), 4), str)


@pytest.mark.parametrize("kind", ["tars", "datasets"])
def test_readers_of_others_streams_seek(tmp_path: Path, kind: str) -> None:
    if kind == "tars":
        others_data.write_tars(tmp_path)
        data: Any = others_data.raw_tars(str(tmp_path))
    else:
        data = datasets.Dataset.from_dict({"id": list(range(50))}).to_iterable_dataset(num_shards=4)
    division = division_of(data, 2)
    assert isinstance(division, Division)
    stream = PartedStream(data, division.open_part, 2, 0, 1)
    reader = PartReader(lambda mark: stream.chunks(1, mark), PartMark())
    wanted = [reader.at(index)["id"] for index in range(20)]
    mark = reader.mark(14)
    assert mark.state is not None
    late = PartReader(lambda mark: stream.chunks(1, mark), mark)
    assert [late.at(index)["id"] for index in range(mark.index, 20)] == wanted[mark.index :]


def test_a_lone_session_uses_each_sample_once(tmp_path: Path) -> None:
    seen = []
    session = lone_session(tmp_path)
    model = torch.nn.Linear(8, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in session.epochs(2):
        for x, _ in session.batches(Stream(40, Seekable), 8):
            seen.append(len(x))
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert (sum(seen), session.samples) == (53 + 52, 105)
