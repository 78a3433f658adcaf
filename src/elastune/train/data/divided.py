"""A pass through a stream that is divided: each slot has a part of it, and each worker reads the parts of its slots.

A global batch takes as many items of each part, in the parts' order, as the slot of this number has samples. A part
that is at its end gives no more: the other parts then give more, so every batch but the last is full. Parts are of
unknown length. So workers tell each other every few batches how far their parts can be read, and from which state;
this is ``StreamPositions``, a part of the run's state. What a batch is made of follows from it and from nothing else.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Protocol

from torch.utils.data import default_collate

from elastune.core.errors import UserError
from elastune.core.journal.records import Record, StreamPriced
from elastune.core.run import Position
from elastune.core.slots import cut, dealt
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.mechanisms.base import Replica
from elastune.train.data.fingerprint import PRIME
from elastune.train.data.loading import LoaderOptions
from elastune.train.data.part_reader import LoadingProcesses, PartedStream, PartMark, PartReader
from elastune.train.data.stream import collated

AHEAD = 8  # batches that workers read ahead of the newest one, after a few


@dataclass(frozen=True)
class Base:
    """A place of the pass, the size of the batches from there on, and how many items each part gave before it."""

    place: int
    size: int
    counts: list[int]


@dataclass
class Known:
    """What is known of each part: how many items it has at least, whether that is all, where it can be opened."""

    items: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    marks: list[PartMark] = field(default_factory=list)

    @classmethod
    def nothing(cls, parts: int) -> Known:
        """Nothing is known of ``parts`` parts."""
        return cls([0] * parts, [False] * parts, [PartMark()] * parts)

    def copy(self) -> Known:
        return Known([*self.items], [*self.ended], [*self.marks])

    def merge(self, row: Sequence[Sequence[Any]]) -> None:
        """Add what one worker has found."""
        for part, items, ended, index, state, checksum in row:
            self.items[part], self.ended[part] = items, ended
            self.marks[part] = PartMark(index, state, checksum)


class HasPosition(Protocol):
    """The progress of a run, as positions use it."""

    position: Position


class HasReplica(Protocol):
    """What a run trains, as positions use it."""

    @property
    def replica(self) -> Replica: ...


class StreamPositions:
    """How far the parts of a stream are known in this epoch, equal on all workers: a part of the run's state.

    Args:
        workers: The workers that read.
        slots: The slots of a batch: as many parts has a stream.
        progress: Knows the run's position.
        send: Takes records for the journal.
        trained: Returns what is trained; None: nothing yet.
    """

    name: ClassVar[str] = "streams"
    optional: ClassVar[bool] = True  # checkpoints of earlier versions have none

    def __init__(
        self,
        workers: WorkerGroup,
        slots: int,
        progress: HasPosition,
        send: Callable[[Record], None],
        trained: Callable[[], HasReplica | None],
    ) -> None:
        self.workers, self.slots = workers, slots
        self._progress, self._send, self._trained = progress, send, trained
        self._said: set[str] = set()
        self._epoch = -1
        self.bases: list[Base] = []
        self.known = Known()

    def say(self, price: str) -> None:
        """Say once what a stream costs, where several workers may read it. "": nothing."""
        workers = self.workers
        if price and price not in self._said and workers.rank == 0 and (workers.elastic or workers.size > 1):
            self._said.add(price)
            self._send(StreamPriced(price))

    def begin(self, epoch: int, parts: int, size: int) -> None:
        """Begin the pass of ``epoch``, unless it is the one that goes on."""
        if (self._epoch, len(self.known.items)) != (epoch, parts):
            self._epoch, self.known = epoch, Known.nothing(parts)
            self.bases = [Base(0, size, [0] * parts)]

    def add(self, base: Base) -> None:
        """Note how far the parts are at a place. What is behind the newest completed step is forgotten."""
        self.bases = [each for each in self.bases if each.place < base.place] + [base]
        done = self._progress.position.offset
        while len(self.bases) > 1 and self.bases[1].place <= done:
            del self.bases[0]

    def before(self, place: int) -> Base:
        """The newest base that is not behind ``place``."""
        return next((base for base in reversed(self.bases) if base.place <= place), self.bases[0])

    @property
    def mine(self) -> range:
        """The parts of this worker's slots."""
        mesh = self.workers.comms.mesh
        trained = self._trained()
        deal = cut if trained is None or not trained.replica.in_turn else dealt
        return deal(self.slots, mesh.batch)[mesh.batch_rank(self.workers.comms.rank)]

    def state_dict(self) -> dict[str, Any]:
        marks = [[mark.index, mark.state, mark.checksum] for mark in self.known.marks]
        bases = [[base.place, base.size, base.counts] for base in self.bases]
        known = {"items": self.known.items, "ended": self.known.ended, "marks": marks}
        return {"parts": json.dumps({"epoch": self._epoch, "bases": bases, **known})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = json.loads(state["parts"])
        self._epoch = int(saved["epoch"])
        self.bases = [Base(int(place), int(size), [*map(int, counts)]) for place, size, counts in saved["bases"]]
        marks = [PartMark(int(index), state, int(checksum)) for index, state, checksum in saved["marks"]]
        self.known = Known([*map(int, saved["items"])], [*map(bool, saved["ended"])], marks)


@dataclass(frozen=True)
class Composed:
    """A global batch: its first place, and for each part the first index and the number of its items."""

    start: int
    counts: list[int]
    takes: list[int]

    def items(self, places: range) -> Iterator[tuple[int, int]]:
        """The part and the index of each of ``places``."""
        return islice(self._all(), places.start - self.start, places.stop - self.start)

    def _all(self) -> Iterator[tuple[int, int]]:
        for part, (count, take) in enumerate(zip(self.counts, self.takes, strict=True)):
            for index in range(count, count + take):
                yield part, index


def shares_of_parts(size: int, left: Sequence[int], ended: Sequence[bool]) -> list[int] | None:
    """How many items of each part the next batch of ``size`` has; None: it is not known yet.

    A part gives as many as the slot of its number has samples. What parts lack at their end, the others give.

    Args:
        size: The size of a batch.
        left: How many further items of each part are known.
        ended: Whether these are all.

    Example:
        >>> shares_of_parts(8, [9, 1, 9, 9], [False, True, False, False])
        [2, 1, 2, 3]
    """
    takes, need = [0] * len(left), size
    open_parts = [part for part, items in enumerate(left) if items or not ended[part]]
    while open_parts and need:
        shares = {part: len(share) for part, share in zip(open_parts, cut(need, len(open_parts)), strict=True)}
        short = [part for part in open_parts if left[part] < shares[part]]
        if any(not ended[part] for part in short):
            return None
        for part in short or open_parts:
            takes[part] = left[part] if short else shares[part]
        need -= sum(takes[part] for part in short or open_parts)
        open_parts = [part for part in open_parts if part not in short] if short else []
    return takes


class DividedSource:
    """One epoch of a stream in parts, as a ``StepSource``.

    Args:
        dataset: The stream.
        open_part: Opens a part of it.
        positions: How far the parts are known.
        seed: The run's seed.
        epoch: The epoch.
        drop_last: Whether a last batch that is not full is left out.
        loading: How samples are loaded.
        turns: How many steps are taken with each batch.
    """

    def __init__(
        self,
        dataset: Any,
        open_part: Callable[[Any, int, int], Any],
        positions: StreamPositions,
        seed: int,
        epoch: int,
        *,
        drop_last: bool,
        loading: LoaderOptions,
        turns: int = 1,
    ) -> None:
        self.turns, self.samples = turns, 0
        self._dataset, self._open_part, self._parts = dataset, open_part, positions.slots
        self._positions, self._seed, self._epoch = positions, seed, epoch
        self._drop_last, self._loading = drop_last, loading
        self._collate = loading.collate_fn or default_collate
        self._least = 1
        self._alone: Known | None = None  # found while this worker does not act with the others
        self._composed: deque[Composed] = deque()
        self._stream: PartedStream | None = None
        self._owned = range(0)
        self._readers: dict[int, PartReader] = {}
        self._processes: LoadingProcesses | None = None

    # -- as a source --------------------------------------------------------------------------------------------------

    def batches(self, offset: int, size: int) -> Iterator[range]:
        """As ``StepSource.batches``; the workers tell each other where it is not known whether another one follows."""
        positions = self._positions
        positions.begin(self._epoch, self._parts, size)
        self._alone = None
        self._least = size if self._drop_last else 1
        if self._stream is None:
            self._stream = PartedStream(self._dataset, self._open_part, self._parts, self._seed, self._epoch)
        self._composed.clear()
        base = positions.before(offset)
        start, counts = base.place, base.counts
        while start < offset:
            takes = self._compose(counts, start, base.size)
            start, counts = start + sum(takes), _added(counts, takes)
            if not sum(takes):
                break
        if start != offset:
            rule, fix = "a divided stream goes on between its batches", "resume at the end of an epoch, or begin anew"
            raise UserError(rule, f"batches that end at {start}, and a run at {offset}", fix)
        positions.add(Base(offset, size, counts))
        self._own(positions.mine)
        while sum(takes := self._compose(counts, start, size)):
            self._composed.append(Composed(start, counts, takes))
            stop, counts = start + sum(takes), _added(counts, takes)
            yield range(start, stop)
            start = stop

    def ends(self, place: int) -> bool:
        """Whether the pass is known to be over at ``place``."""
        return all(self._known.ended) and sum(self._known.items) - place < self._least

    def length(self, offset: int, size: int) -> int:
        """0: the length is unknown."""
        return 0

    def checksum(self, places: range) -> int:
        """A checksum of the places: nobody reads all items. ``PartReader`` compares items that are read again."""
        return (places.start + places.stop - 1) * len(places) // 2 % PRIME

    def numbers(self, places: range) -> list[int]:
        return list(places)

    def fetch(self, parts: Iterator[range]) -> Iterator[Any]:
        for places in parts:
            batch = next(each for each in reversed(self._composed) if each.start <= places.start)
            self._let_go(batch)
            items = [self._reader(part).at(index) for part, index in batch.items(places)]
            share = max(batch.takes)
            for part in self._owned:  # two shares a batch at most, so that nobody has to wait for many of them
                if (reader := self._readers.get(part)) is not None:
                    reader.reaches(min(batch.counts[part] + AHEAD * share, reader.known + 2 * share))
            yield collated(items, self._collate)

    def probe(self) -> range:
        return range(0)

    @property
    def _known(self) -> Known:
        if self._alone is None or self._positions.workers.synchronised:
            return self._positions.known
        return self._alone

    # -- what batches are made of -------------------------------------------------------------------------------------

    def _compose(self, counts: list[int], start: int, size: int) -> list[int]:
        """How many items of each part the batch at ``start`` has; none: the pass is over."""
        while True:
            known = self._known
            left = [items - count for items, count in zip(known.items, counts, strict=True)]
            takes = shares_of_parts(size, left, known.ended)
            if takes is not None:
                follow = sum(left) - sum(takes)
                if all(known.ended) or follow >= self._least:
                    return takes if sum(takes) >= self._least else [0] * self._parts
            self._exchange(counts, start, size)

    def _exchange(self, counts: list[int], start: int, size: int) -> None:
        """Read ahead, and find out with the other workers how far the parts go.

        A worker that warms up, or whose step was just lost, reads all parts by itself, and nobody gets what it found.
        """
        workers, positions = self._positions.workers, self._positions
        together = workers.synchronised
        open_parts = sum(not ended for ended in self._known.ended)
        share = -(-size // max(1, open_parts))
        if together:
            positions.add(Base(start, size, counts))
        else:
            self._alone = self._known.copy()
        oldest = positions.bases[0].counts
        self._own(positions.mine if together else range(self._parts))
        row = []
        for part in self._owned:
            reader = self._reader(part)
            reader.reaches(counts[part] + 2 * share + 1)
            mark = reader.mark(oldest[part])
            row.append([part, reader.known, reader.ended, mark.index, mark.state, mark.checksum])
        data = json.dumps(row).encode()
        rows = workers.gather_bytes(data, "how far a stream can be read") if together else [data]
        for each in rows:  # the parts of a lost worker are still unknown, and asked for again
            self._known.merge(json.loads(each))

    # -- readers ------------------------------------------------------------------------------------------------------

    def _own(self, parts: range) -> None:
        """Read ``parts`` ahead from here on."""
        if parts == self._owned:
            return
        self._owned, self._processes = parts, None
        if not self._loading.loader_workers:
            self._readers = {part: reader for part, reader in self._readers.items() if part in parts}
            return
        self._readers = {}
        if parts:
            assert self._stream is not None
            begins = {part: self._known.marks[part] for part in parts}
            self._processes = LoadingProcesses(self._stream, begins, self._loading)
            for part in parts:  # now, as they begin where the processes do
                self._reader(part)

    def _reader(self, part: int) -> PartReader:
        """The reader of ``part``."""
        if part not in self._readers:
            stream, processes = self._stream, self._processes
            assert stream is not None
            pull = None
            if processes is not None and part in self._owned:
                pull = lambda: processes.next_of(part)  # noqa: E731 - a method bound to two variables
            self._readers[part] = PartReader(lambda mark: stream.chunks(part, mark), self._known.marks[part], pull)
        return self._readers[part]

    def _let_go(self, batch: Composed) -> None:
        """Drop items that will hardly be needed again: those before the batch before ``batch``."""
        while len(self._composed) > 1 and self._composed[1].start < batch.start:
            self._composed.popleft()
        marked = self._positions.bases[0].counts
        for part, reader in self._readers.items():
            reader.let_go(self._composed[0].counts[part], marked[part])


def _added(counts: Sequence[int], takes: Sequence[int]) -> list[int]:
    return [count + take for count, take in zip(counts, takes, strict=True)]
