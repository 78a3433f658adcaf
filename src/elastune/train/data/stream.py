"""A pass through a stream: an ``IterableDataset`` of unknown length.

Every worker reads the whole stream and takes the items of its slots; ``divided.py`` has streams that can be divided. An
item is named by its position in the epoch, counted from 0. Damaged tar files of WebDataset's are reported by name.
"""

from __future__ import annotations

import re
import tarfile
import traceback
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from elastune.core.errors import UserError
from elastune.core.run import derive
from elastune.train.data.fingerprint import PRIME, checksum_of
from elastune.train.data.loading import LoaderOptions
from elastune.train.rng import seed_everything, streams_kept

FIX = "write the file anew, or leave it out"
URL, KEY = "__url__", "__key__"  # WebDataset's names for the origin of a sample


class StreamSource:
    """One epoch of a stream, as a ``StepSource``."""

    def __init__(
        self, dataset: Any, seed: int, epoch: int, *, drop_last: bool, loading: LoaderOptions, turns: int = 1
    ) -> None:
        self.turns, self.samples = turns, 0
        self._reader = Reader(dataset, seed, epoch, loading)
        self._least = 1  # items that make one more batch
        self._size = 1
        self._drop_last = drop_last
        self._collate = loading.collate_fn or default_collate

    def batches(self, offset: int, size: int) -> Iterator[range]:
        """As ``StepSource.batches``; it looks ahead, to know at each batch whether another one follows."""
        self._least, self._size = size if self._drop_last else 1, size
        start = offset
        while self._reader.reaches(start + self._least):
            stop = start + size
            if not self._reader.reaches(stop + self._least) and self._reader.length is not None:
                stop = min(stop, self._reader.length)
            yield range(start, stop)
            start = stop

    def ends(self, place: int) -> bool:
        """Whether the pass is known to be over at ``place``."""
        length = self._reader.length
        return length is not None and length - place < self._least

    def length(self, offset: int, size: int) -> int:
        """0: the length is unknown."""
        return 0

    def checksum(self, places: range) -> int:
        """The checksum of the items themselves, which shows if a stream gives workers different items."""
        return self._reader.checksum(places)

    def numbers(self, places: range) -> list[int]:
        return list(places)

    def fetch(self, parts: Iterator[range]) -> Iterator[Any]:
        for part in parts:
            self._reader.let_go(part.start - 2 * self._size)  # this batch and the one before stay
            yield collated([self._reader.at(place) for place in part], self._collate)

    def probe(self) -> range:
        return range(0)


def evaluated(
    dataset: Any,
    batch_size: int,
    loading: LoaderOptions,
    seed: int,
    workers: int,
    rank: int,
    seen: Callable[[int], None],
) -> Iterator[tuple[list[int], Any]]:
    """Every ``workers``-th batch of a stream, with its places.

    At the end ``seen`` is called with the number of items.
    """
    reader, start = Reader(dataset, seed, -1, loading), 0
    collate = loading.collate_fn or default_collate
    for batch in range(1 << 62):
        reader.reaches(start + batch_size)
        stop = start + batch_size if reader.length is None else min(start + batch_size, reader.length)
        if stop <= start:
            break
        if batch % workers == rank:
            yield list(range(start, stop)), collated([reader.at(place) for place in range(start, stop)], collate)
        reader.let_go(stop)
        start = stop
    seen(start)


def _as_it_is(item: Any) -> Any:
    return item


def collated(items: list[Any], collate: Callable[[list[Any]], Any]) -> Any:
    """Collate ``items`` into a batch. Raises ``UserError`` if an item is the rest of a damaged sample."""
    try:
        return collate(items)
    except KeyError as error:
        if (damage := damaged_tar(error, items)) is not None:
            raise damage from error
        raise


class Reader:
    """Reads the items of one epoch of ``dataset`` by their places.

    The random draws of an item follow from seed, epoch and place. So any worker that comes to a place, by training,
    joining or resuming, reads the same item there: a new reader reads everything before it, and drops it. Items before
    ``let_go`` are read again if they are needed.
    """

    def __init__(self, dataset: Any, seed: int, epoch: int, loading: LoaderOptions) -> None:
        self._dataset, self._seed, self._epoch, self._loading = dataset, seed, epoch, loading
        self._begin()

    def _begin(self) -> None:
        self._items: dict[int, Any] = {}
        self._checksums = array("H")  # of all items read so far
        self._next, self._over = 0, False
        self._iterator: Iterator[Any] | None = None

    def reaches(self, stop: int) -> bool:
        """Whether the stream has at least ``stop`` items. Reads them."""
        if self._next < stop and not self._over:
            with streams_kept():
                while self._next < stop and not self._over:
                    self._read()
        return self._next >= stop

    @property
    def length(self) -> int | None:
        """The number of items, once the end was reached; else None."""
        return self._next if self._over else None

    def let_go(self, before: int) -> None:
        """Drop the items at places ``before`` this one, which will hardly be needed again."""
        for place in [place for place in self._items if place < before]:
            del self._items[place]

    def at(self, place: int) -> Any:
        """The item at ``place``."""
        if place < self._next and place not in self._items:  # a step is repeated whose items were dropped
            self._begin()
        self._reach(place)
        return self._items[place]

    def checksum(self, places: range) -> int:
        """The checksum of the items at ``places``."""
        if places:
            self._reach(places[-1])
        return sum(self._checksums[place] for place in places) % PRIME

    def _reach(self, place: int) -> None:
        if not self.reaches(place + 1):
            rule = "a stream gives the same items each time that an epoch of it is read"
            fix = "let it depend on nothing but its epoch and torch's, NumPy's and Python's global generators"
            raise UserError(rule, f"an end at {self._next} where there was an item before", fix)

    def _read(self) -> None:
        if self._iterator is None:
            self._iterator = self._opened()
        place = self._next
        if not self._loading.loader_workers:
            seed_everything(derive(self._seed, "stream", self._epoch, place))
        try:
            item = next(self._iterator)
        except StopIteration:
            self._over = True
            return
        except Exception as error:
            if (damage := damaged_tar(error)) is not None:
                raise damage from error
            raise
        self._items[place] = item
        self._checksums.append(zlib.crc32(b"%d" % place, checksum_of(item)) % PRIME)
        self._next += 1

    def _opened(self) -> Iterator[Any]:
        """An iterator like torch's ``DataLoader``, with as many loading processes."""
        seed, loading = derive(self._seed, "stream", self._epoch), self._loading
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(max(0, self._epoch))  # an evaluation reads the first epoch
        seed_everything(seed)
        if not loading.loader_workers:
            return iter(self._dataset)
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=loading.loader_workers,
            prefetch_factor=loading.prefetch_factor,
            timeout=loading.timeout_s,
            worker_init_fn=loading.worker_init_fn,
            multiprocessing_context=loading.context,
            generator=torch.Generator().manual_seed(seed),
        )
        return iter(loader)


# --- damaged tar files, as WebDataset reads them ---


def damaged_tar(error: BaseException, items: Iterable[Any] = ()) -> UserError | None:
    """The error for the user, if ``error`` comes from a tar file that was cut; None if it does not.

    ``error`` was raised while samples were read, or ``items`` collated.
    """
    if isinstance(error, tarfile.ReadError):  # WebDataset has added the file's name
        texts = [each.strip().splitlines()[-1] for each in error.args if isinstance(each, str) and each.strip()]
        return UserError("a tar file of a stream is whole", ": ".join(reversed(texts)) or "one that ends early", FIX)
    missing = _missing(error)
    for sample in (*items, *_samples_at_hand(error)) if missing else ():
        if isinstance(sample, Mapping) and URL in sample and KEY in sample and not _names_in(sample) & missing:
            has = ", ".join(str(name) for name in sample if not str(name).startswith("__"))
            value = f"{sample[URL]}: sample {sample[KEY]} has {has or 'nothing'}, and no {' or '.join(sorted(missing))}"
            return UserError("a sample of a tar file has all its parts", value, f"was the file cut? {FIX}")
    return None


def _missing(error: BaseException) -> set[str]:
    """The names of parts, any of which was looked up where ``error`` was raised, and was missing."""
    if isinstance(error, KeyError):
        return {name for name in error.args[:1] if isinstance(name, str)}
    match = re.match(r"didn't find \[(.*?)\] in \[", str(error)) if isinstance(error, ValueError) else None
    return set() if match is None else set(re.findall(r"'([^']+)'", match[1]))  # as WebDataset's to_tuple reports it


def _names_in(sample: Mapping[Any, Any]) -> set[str]:
    """The names of a sample's parts, and the texts in it, which a program may look up in a table of its own."""
    return {each for each in (*sample, *sample.values()) if isinstance(each, str)}


def _samples_at_hand(error: BaseException) -> Iterator[Any]:
    """The local variables of the frames that ``error`` came through, the innermost first."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        yield from list(frame.f_locals.values())
