"""One part of a divided stream: opened where it can be sought, read in chunks, and kept for as long as steps need it.

A part is named by its number, an item in it by its index from 0. Items are read in chunks that begin at multiples of
``CHUNK``. The random draws of a chunk follow from seed, epoch, part and index: so whoever reads it, in whichever
process, gets the same items.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from elastune.core.errors import UserError
from elastune.core.run import derive
from elastune.train.data.fingerprint import checksum_of
from elastune.train.data.loading import LoaderOptions
from elastune.train.data.stream import damaged_tar
from elastune.train.rng import seed_everything, streams_kept

CHUNK = 32  # items: seeding takes as long as reading a small item
UNKNOWN = -1  # a checksum that nobody has taken


@dataclass(frozen=True)
class PartMark:
    """A place in a part at which another worker can begin to read.

    Attributes:
        index: The index of the next item.
        state: The stream's state there, JSON; None: it has none, so a reader begins at the part's first item.
        checksum: The checksum of that item; ``UNKNOWN``: there was none.
    """

    index: int = 0
    state: Any = None
    checksum: int = UNKNOWN


@dataclass(frozen=True)
class PartChunk:
    """Some neighbouring items of a part. ``after`` has the state behind them; ``ended``: no more follow."""

    part: int
    first: PartMark
    items: list[Any]
    after: PartMark
    ended: bool


@dataclass(frozen=True)
class PartedStream:
    """A stream that is read in ``count`` parts, in one epoch of a run with ``seed``.

    Attributes:
        dataset: The stream.
        open_part: Opens a part by its number: an iterable with or without ``state_dict``.
        count: The number of parts.
        seed: The seed of the run.
        epoch: The epoch.
    """

    dataset: Any
    open_part: Callable[[Any, int, int], Any]
    count: int
    seed: int
    epoch: int

    def chunks(self, part: int, begin: PartMark) -> Iterator[PartChunk]:
        """Read ``part`` from ``begin`` on."""
        seed_everything(derive(self.seed, "stream", self.epoch, part))
        _set_epoch(self.dataset, self.epoch)
        opened = self.open_part(self.dataset, part, self.count)
        _set_epoch(opened, self.epoch)
        if begin.state is not None:
            opened.load_state_dict(begin.state)
        first = begin if begin.state is not None else PartMark()
        items = iter(opened)
        while True:
            seed_everything(derive(self.seed, "stream", self.epoch, part, first.index))
            chunk = _read(items)
            after = PartMark(first.index + len(chunk), _state_of(opened))
            if chunk:
                first = replace(first, checksum=checksum_of(chunk[0]))
            ended = len(chunk) < CHUNK
            yield PartChunk(part, first, chunk, after, ended)
            if ended:
                return
            first = after


def _read(items: Iterator[Any]) -> list[Any]:
    try:
        return list(islice(items, CHUNK))
    except Exception as error:
        if (damage := damaged_tar(error)) is not None:
            raise damage from error
        raise


def _set_epoch(stream: Any, epoch: int) -> None:
    if callable(set_epoch := getattr(stream, "set_epoch", None)):
        set_epoch(epoch)


def _state_of(opened: Any) -> Any:
    """The state of an opened part, as JSON gives it back; None where it has none that JSON can hold."""
    if not callable(getattr(opened, "load_state_dict", None)):
        return None
    with suppress(TypeError, ValueError):
        state = opened.state_dict()
        again = json.loads(json.dumps(state))
        return again if again == state else None
    return None


class PartReader:
    """Reads the items of one part by their indices, from a mark on.

    Args:
        open_at: Opens the part at a mark, in this process.
        begin: The mark to begin at.
        pull: Gives the next chunk from a loading process; None: this process reads.
    """

    def __init__(
        self,
        open_at: Callable[[PartMark], Iterator[PartChunk]],
        begin: PartMark,
        pull: Callable[[], PartChunk] | None = None,
    ) -> None:
        self._open_at = open_at
        self._expected = begin
        self._begin(begin, pull)

    def _begin(self, mark: PartMark, pull: Callable[[], PartChunk] | None = None) -> None:
        self._pull = pull or partial(next, self._open_at(mark))
        self._items: dict[int, Any] = {}
        opened = PartMark() if mark.state is None else mark
        self._marks = deque([opened])
        self.known = opened.index
        self.ended = False

    def reaches(self, stop: int) -> bool:
        """Whether the part has at least ``stop`` items. Reads them."""
        if self.known < stop and not self.ended:
            with streams_kept():
                while self.known < stop and not self.ended:
                    self._take(self._pull())
        return self.known >= stop

    def at(self, index: int) -> Any:
        """The item at ``index``."""
        if index < self.known and index not in self._items:  # a step is repeated whose items were dropped
            self._begin(next((mark for mark in reversed(self._marks) if mark.index <= index), PartMark()))
        if not self.reaches(index + 1):
            raise _changed(f"an end at {self.known} where there was an item before")
        return self._items[index]

    def let_go(self, before: int, marked: int) -> None:
        """Drop the items before index ``before``, and the marks that nobody needs who reads from ``marked`` on."""
        for index in [index for index in self._items if index < before]:
            del self._items[index]
        while len(self._marks) > 1 and self._marks[1].index <= marked:
            self._marks.popleft()

    def mark(self, index: int) -> PartMark:
        """The newest mark from which a reader comes to ``index``."""
        return next((mark for mark in reversed(self._marks) if mark.index <= index), self._marks[0])

    def _take(self, chunk: PartChunk) -> None:
        index = self._expected.index
        for at, item in enumerate(chunk.items, self.known):
            self._items[at] = item
            if at == index and self._expected.checksum not in (UNKNOWN, checksum_of(item)):
                raise _changed(f"another item at {index} of part {chunk.part}")
        if self._marks[-1].index == chunk.first.index:
            self._marks[-1] = replace(self._marks[-1], checksum=chunk.first.checksum)
        self.known += len(chunk.items)
        self.ended = chunk.ended
        if not chunk.ended:
            self._marks.append(chunk.after)


def _changed(value: str) -> UserError:
    rule = "a part of a stream gives the same items each time that an epoch of it is read"
    fix = "let it depend on nothing but its epoch, its state and torch's, NumPy's and Python's global generators"
    return UserError(rule, value, fix)


class LoadingProcesses:
    """Reads several parts ahead in loading processes, each part in one of them."""

    def __init__(self, stream: PartedStream, begins: Mapping[int, PartMark], loading: LoaderOptions) -> None:
        self._waiting: dict[int, deque[PartChunk]] = {part: deque() for part in begins}
        processes = min(loading.loader_workers, len(begins))
        loader: DataLoader[PartChunk] = DataLoader(
            _Dealt(stream, dict(begins), processes),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=processes,
            prefetch_factor=loading.prefetch_factor,
            timeout=loading.timeout_s,
            worker_init_fn=loading.worker_init_fn,
            multiprocessing_context=loading.context,
            generator=torch.Generator().manual_seed(derive(stream.seed, "stream", stream.epoch)),
        )
        self._chunks = iter(loader)

    def next_of(self, part: int) -> PartChunk:
        """The next chunk of ``part``."""
        while not self._waiting[part]:
            chunk = next(self._chunks)
            self._waiting[chunk.part].append(chunk)
        return self._waiting[part].popleft()


def _as_it_is(item: Any) -> Any:
    return item


class _Dealt(IterableDataset[PartChunk]):
    """The chunks of some parts. Each of the ``processes`` reads its own parts in turn."""

    def __init__(self, stream: PartedStream, begins: Mapping[int, PartMark], processes: int) -> None:
        self._stream, self._begins, self._processes = stream, begins, processes

    def __iter__(self) -> Iterator[PartChunk]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        # A part is read as a whole: the stream must not divide it once more among the loading processes.
        torch.utils.data._utils.worker._worker_info = None
        mine = list(self._begins.items())[worker.id :: self._processes]
        return in_turn([self._stream.chunks(part, begin) for part, begin in mine])


def in_turn(iterators: Sequence[Iterator[PartChunk]]) -> Iterator[PartChunk]:
    """One chunk of each iterator after the other, until all are at their end."""
    left = list(iterators)
    while left:
        for each in list(left):
            chunk = next(each)
            yield chunk
            if chunk.ended:
                left.remove(each)
