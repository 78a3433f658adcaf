"""The data of a training pass: the user's request, its source of samples, and its division into steps.

``DataRequest`` checks the options of ``session.batches``. A ``StepSource`` visits the samples in an order that
depends on no worker. ``plan_steps`` and ``plan_rounds`` cut it into each worker's part of the next global batches.
``Batches`` is what the program's loop iterates over.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, Position, derive
from elastune.core.slots import BatchSlice, apart, contributors, places_of_learner, shares, slices_of_round
from elastune.core.sync_plan import SyncPlan
from elastune.train.data.divided import DividedSource, StreamPositions
from elastune.train.data.fingerprint import PRIME
from elastune.train.data.loading import (
    MOST_DRAWN,
    Drawn,
    LoaderOptions,
    check_dataset,
    drawn,
    fetch,
    fetch_whole,
    kept_processes,
    own_generator,
    sampler_stream,
    whole_batches,
)
from elastune.train.data.parts import Division, division_of
from elastune.train.data.stream import StreamSource
from elastune.train.rng import epoch_order, seed_everything, streams_kept

PROBED = 2  # samples of a pass that all workers read and compare


@dataclass(frozen=True)
class DataRequest:
    """The user's request of a pass over ``dataset`` in global batches of ``batch_size``.

    Attributes:
        dataset: The data.
        batch_size: The size of a global batch.
        shuffle: Whether samples are shuffled.
        sampler: Draws the order instead.
        drop_last: Whether a last batch that is not full is left out.
        loading: How samples are loaded.
        turns: How many steps are taken with each batch.
        batch_sampler: Draws whole batches instead, of about ``batch_size``.
    """

    dataset: Any
    batch_size: int
    shuffle: bool
    sampler: Iterable[int] | None
    drop_last: bool
    loading: LoaderOptions
    turns: int = 1
    batch_sampler: Any = None

    @property
    def streams(self) -> bool:
        """Whether the data are a stream, whose length is unknown."""
        return isinstance(self.dataset, IterableDataset)

    def source(self, seed: int, positions: StreamPositions | None = None) -> Callable[[int], StepSource]:
        """A function that makes the source of an epoch's training pass, by the epoch's number.

        Args:
            seed: The run's seed.
            positions: How far the parts of a stream were read; None: the stream is not divided.
        """
        division: Division | str = ""
        if positions is not None and self.streams:
            division = division_of(self.dataset, positions.slots)
            positions.say(division if isinstance(division, str) else division.price)

        def source_of_epoch(epoch: int) -> StepSource:
            if self.streams:
                last, loading = self.drop_last, self.loading
                if positions is not None and isinstance(division, Division):
                    opened = division.open_part
                    options: dict[str, Any] = {"drop_last": last, "loading": loading}
                    return DividedSource(self.dataset, opened, positions, seed, epoch, turns=self.turns, **options)
                return StreamSource(self.dataset, seed, epoch, drop_last=last, loading=loading, turns=self.turns)
            if self.batch_sampler is not None:
                sampler, size = self.batch_sampler, self.batch_size
                return BatchedSource(
                    self.dataset, seed, epoch, sampler=sampler, size=size, loading=self.loading, turns=self.turns
                )
            order = {"shuffle": self.shuffle, "drop_last": self.drop_last}
            return MapStyleSource(
                self.dataset, seed, epoch, **order, loading=self.loading, sampler=self.sampler, turns=self.turns
            )

        return source_of_epoch

    def to_evaluate(self, seed: int) -> Any:
        """The data set of an evaluation, in order: all of it, or the samples that the sampler draws."""
        if self.batch_sampler is not None:
            batches = drawn_batches(self.batch_sampler, len(self.dataset), seed, -1)
            return Drawn(self.dataset, torch.tensor([index for batch in batches for index in batch]))
        if self.sampler is None:
            return self.dataset
        return Drawn(self.dataset, drawn(self.sampler, len(self.dataset), seed, -1))


def data_request(
    data: Any,
    batch_size: int | None,
    *,
    shuffle: bool | None = None,
    sampler: Any = None,
    drop_last: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loader_workers: int | None = None,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    seed: int = 0,
) -> DataRequest:
    """Check the options of ``session.batches``; None: an option was not given. ``seed``: the run's.

    Raises ``UserError`` for data or options that cannot be used.
    """
    options = {
        "batch_size": batch_size,
        "shuffle": shuffle,
        "sampler": sampler,
        "drop_last": drop_last,
        "collate_fn": collate_fn,
        "loader_workers": loader_workers,
        "pin_memory": pin_memory,
        "prefetch_factor": prefetch_factor,
    }
    if isinstance(data, DataLoader):
        if twice := [name for name, value in options.items() if value is not None]:
            raise UserError("a DataLoader brings its own options", ", ".join(twice), "give them to the DataLoader")
        return _of_loader(data, seed)
    check_dataset(data, batch_size)
    if isinstance(data, IterableDataset) and (shuffle or sampler is not None):
        fix = "shuffle in it: what it draws from torch's, NumPy's or Python's global generator follows the run's seed"
        raise UserError("a stream comes in an order of its own", "shuffle=True" if shuffle else "a sampler", fix)
    if sampler is not None and shuffle is not None:
        raise UserError("a sampler decides the order", f"shuffle={shuffle}, too", "leave shuffle out")
    if sampler is not None and (isinstance(sampler, BatchSampler) or not hasattr(sampler, "__iter__")):
        fix = "give torch's Sampler, or any iterable of indices, and batch_size beside it"
        raise UserError("a sampler gives one index after another", type(sampler).__name__, fix)
    assert batch_size is not None  # checked above
    loading = LoaderOptions(collate_fn, loader_workers or 0, bool(pin_memory), prefetch_factor)
    return DataRequest(data, batch_size, shuffle is not False, sampler, bool(drop_last), loading)


def _of_loader(loader: DataLoader[Any], seed: int) -> DataRequest:
    """The request for the batches that ``loader`` would give one process: they become the global batches."""
    batches: Any = loader.batch_sampler
    if batches is None:
        fix = "give DataLoader a batch_size, so that elastune can cut batches into the workers' parts"
        raise UserError("a DataLoader's batches must be of several samples", "batch_size=None", fix)
    plain = type(batches) is BatchSampler
    check_dataset(loader.dataset, batches.batch_size if plain else 1)
    data: Any = loader.dataset
    size = batches.batch_size if plain else typical_size(batches, len(data), seed)
    collate: Any = loader.collate_fn
    loading = LoaderOptions(
        None if collate is default_collate else collate,
        loader.num_workers,
        loader.pin_memory,
        loader.prefetch_factor,
        timeout_s=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        context=loader.multiprocessing_context,
        kept=kept_processes(loader),
    )
    if not plain:
        return DataRequest(loader.dataset, size, False, None, False, loading, batch_sampler=batches)
    shuffle, sampler = (False, None) if isinstance(loader.dataset, IterableDataset) else _order_of(batches.sampler)
    return DataRequest(loader.dataset, size, shuffle, sampler, batches.drop_last, loading)


def _order_of(sampler: Any) -> tuple[bool, Iterable[int] | None]:
    """Whether samples are shuffled, and the sampler that draws them, if there is one of the user.

    ``DistributedSampler`` distributes samples to processes, as elastune does itself: only its order is used.
    """
    if isinstance(sampler, DistributedSampler):
        return sampler.shuffle, None
    if type(sampler) is SequentialSampler:
        return False, None
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return True, None if sampler.generator is None else sampler
    return True, sampler


# --- sources: the samples of a pass, in order ---


class StepSource(Protocol):
    """The samples of one training pass, in the order of its visits.

    A sample is named by its place in the pass, counted from 0. Every worker has an equal source of its own, which knows
    nothing of workers. A stream is a source whose end is unknown.

    Attributes:
        turns: How many steps are taken with each global batch.
        samples: How many samples the data set has; 0: it is a stream.
    """

    turns: int
    samples: int

    def batches(self, offset: int, size: int) -> Iterator[range]:
        """The places of the next global batches of ``size`` samples, from place ``offset`` on."""
        ...

    def length(self, offset: int, size: int) -> int:
        """How many places the pass uses if it goes on at ``offset`` in batches of ``size``; 0: unknown."""
        ...

    def ends(self, place: int) -> bool:
        """Whether the pass is known to be over at ``place``, if ``length`` is unknown."""
        ...

    def checksum(self, places: range) -> int:
        """A number below ``PRIME`` that identifies the samples at ``places``; the numbers of parts add up."""
        ...

    def numbers(self, places: range) -> list[int]:
        """The numbers of the samples at ``places`` in the data set; of a stream the places themselves."""
        ...

    def fetch(self, parts: Iterator[range]) -> Iterator[Any]:
        """The collated samples of each of ``parts``, in order."""
        ...

    def probe(self) -> range:
        """The places of a few samples that every worker can read repeatedly; empty for a stream."""
        ...


class MapStyleSource:
    """A pass over a map-style dataset. The order follows from seed and epoch, or ``sampler`` draws it."""

    def __init__(
        self,
        dataset: Any,
        seed: int,
        epoch: int,
        *,
        shuffle: bool,
        drop_last: bool,
        loading: LoaderOptions,
        sampler: Iterable[int] | None = None,
        turns: int = 1,
    ) -> None:
        self.turns = turns
        count = self.samples = len(dataset)
        self._drawn = sampler is not None
        if sampler is not None:
            self._order = drawn(sampler, count, seed, epoch)
        else:
            self._order = epoch_order(count, seed, epoch) if shuffle else torch.arange(count)
        self._sums: np.ndarray[Any, np.dtype[np.int64]] | None = None  # cumulative sums of the order
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch
        self._drop_last = drop_last
        self._loading = loading

    def batches(self, offset: int, size: int) -> Iterator[range]:
        for start in range(offset, len(self._order), size):
            stop = min(start + size, len(self._order))
            if self._drop_last and stop - start < size:
                return
            yield range(start, stop)

    def length(self, offset: int, size: int) -> int:
        count = len(self._order)
        return count - (count - offset) % size if self._drop_last else count

    def ends(self, place: int) -> bool:
        return place >= len(self._order)

    def checksum(self, places: range) -> int:
        if self._sums is None:
            self._sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._order.numpy())])
        return int(self._sums[places.stop] - self._sums[places.start]) % PRIME

    def numbers(self, places: range) -> list[int]:
        return [int(number) for number in self._order[places.start : places.stop]]

    def fetch(self, parts: Iterator[range]) -> Iterator[Any]:
        if whole_batches(self._dataset, self._loading):
            return fetch_whole(self._dataset, (self._order[part.start : part.stop] for part in parts))
        if self._drawn:
            # Read by place, so that a sample drawn twice is augmented twice.
            dataset, indices = Drawn(self._dataset, self._order), (list(part) for part in parts)
            return fetch(dataset, indices, self._loading, self._seed, self._epoch)
        indices = (self._order[part.start : part.stop].tolist() for part in parts)
        return fetch(self._dataset, indices, self._loading, self._seed, self._epoch)

    def probe(self) -> range:
        count = min(PROBED, len(self._order))
        start = derive(self._seed, "probe", self._epoch) % (len(self._order) - count + 1)
        return range(start, start + count)


class BatchedSource(MapStyleSource):
    """A ``StepSource`` with the global batches of a batch sampler, which may differ in size.

    ``size``: see ``typical_size``.
    """

    def __init__(
        self, dataset: Any, seed: int, epoch: int, *, sampler: Any, size: int, loading: LoaderOptions, turns: int = 1
    ) -> None:
        drawn_lists = drawn_batches(sampler, len(dataset), seed, epoch)
        self._stops = list(accumulate(map(len, drawn_lists)))
        self._size = size
        order = [index for batch in drawn_lists for index in batch]
        super().__init__(
            dataset, seed, epoch, shuffle=False, drop_last=False, loading=loading, sampler=order, turns=turns
        )

    def batches(self, offset: int, size: int) -> Iterator[range]:
        """The batches after ``offset``. Raises ``UserError`` if ``size`` was changed."""
        if size != self._size:
            fix = "give the DataLoader a sampler and a batch_size, or leave out what changes it"
            raise UserError("batches of a batch sampler have its own sizes", f"batches of {size} are asked for", fix)
        start = offset
        for stop in self._stops:
            if stop > offset:
                yield range(start, stop)
                start = stop


def drawn_batches(batches: Iterable[Iterable[Any]], length: int, seed: int, epoch: int) -> list[list[Any]]:
    """The batches of indices that ``batches``, a batch sampler, draws for ``epoch``; seeded as in ``loading.drawn``.

    Raises:
        UserError: The sampler draws no batch, an empty one, or too many.
    """
    inner, name, most = getattr(batches, "sampler", None), type(batches).__name__, MOST_DRAWN * length
    stream = sampler_stream(batches, seed, epoch, inner)
    with ExitStack() as stack:
        stack.enter_context(streams_kept())
        for sampler in (batches, inner):
            stack.enter_context(own_generator(sampler, stream))
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
        seed_everything(stream)
        drawn_lists = [list(batch) for batch in islice(iter(batches), most + 1)]
    if not drawn_lists or not all(drawn_lists):
        raise UserError("a batch sampler must draw samples", f"none of {name}", "see what it was made from")
    if len(drawn_lists) > most:
        raise UserError("a batch sampler must come to an end", f"over {most} batches of {name}", "give it an end")
    return drawn_lists


def typical_size(batches: Iterable[Iterable[Any]], length: int, seed: int) -> int:
    """The size of a batch: the sampler's ``batch_size``, or the mean of the first epoch."""
    declared = getattr(batches, "batch_size", None)
    if isinstance(declared, int) and declared > 0:
        return declared
    batches_drawn = drawn_batches(batches, length, seed, 0)
    return max(1, round(sum(map(len, batches_drawn)) / len(batches_drawn)))


# --- plans: each worker's part of a global batch ---


@dataclass(frozen=True)
class StepPlan:
    """One global batch, or one round of several, as one worker takes it.

    Attributes:
        offset: The place of its first sample in the pass.
        size: The number of its samples.
        slices: This worker's part.
        contributors: How many workers add their control vector to the step.
        workers: How many workers there are.
        checksum: ``StepSource.checksum`` of all of it.
        length: How many samples the pass will use; 0: unknown.
        steps: The number of its global batches.
        turn: Which of the steps with this global batch this is, from 0.
        turns: How many steps are taken with this global batch.
        left_out: Learners that the round ended without, and the places of their samples.
        places_of: Returns the places of one learner's samples, in order.
        checksum_of: Returns ``StepSource.checksum`` of some of its places.
    """

    offset: int
    size: int
    slices: list[BatchSlice]
    contributors: int
    workers: int
    checksum: int
    length: int
    steps: int = 1
    turn: int = 0
    turns: int = 1
    left_out: Mapping[int, Sequence[range]] = field(default_factory=dict)
    places_of: Callable[[int], Sequence[range]] = lambda learner: ()
    checksum_of: Callable[[range], int] = lambda places: 0

    def without(self, learners: Sequence[int]) -> StepPlan:
        """The same round, ended without these ``learners``."""
        return replace(self, left_out={learner: self.places_of(learner) for learner in learners})

    @property
    def moves(self) -> int:
        """How many samples further the pass is after this step."""
        return self.size if self.turn == self.turns - 1 else 0

    @property
    def used(self) -> tuple[int, int]:
        """How many samples all workers have trained on together, and their checksum."""
        if not self.left_out:
            return self.size, self.checksum
        left = [places for learner in self.left_out.values() for places in learner]
        return self.size - sum(map(len, left)), (self.checksum - sum(map(self.checksum_of, left))) % PRIME

    @property
    def taken(self) -> tuple[int, int, int, int]:
        """The values that are equal on all workers: offset, size, length and checksum."""
        return self.offset, self.size, self.length, self.checksum

    @property
    def own_parts(self) -> list[range]:
        """The places of this worker's slices, in order."""
        return [range(self.offset + p.samples.start, self.offset + p.samples.stop) for p in self.slices]


def plan_steps(
    source: StepSource,
    batch_size: int,
    at: Position,
    execution: ExecutionSettings,
    workers: int,
    rank: int,
    least: int = 1,
    everyone: int | None = None,
    *,
    even: bool = False,
    in_turn: bool = False,
    among: tuple[int, int] = (1, 0),
) -> Iterator[StepPlan]:
    """The steps of a pass from ``at`` on, as worker ``rank`` of ``workers`` takes them.

    Args:
        source: The samples.
        batch_size: The size of a global batch.
        at: The position to begin at.
        execution: Slots, micro-batch and mode.
        workers: How many workers share a batch.
        rank: Which of them this worker is.
        least: The least number of samples in a forward pass, if the batch has as many.
        everyone: The number of workers, if all of them contribute to every step, with samples or without.
        even: Whether all workers make equally many passes.
        in_turn: Whether slots are distributed in turn.
        among: How many workers divide these passes among them, and which of them this worker is.
    """
    parts_of_size: dict[int, tuple[list[BatchSlice], int]] = {}
    length = source.length(at.offset, batch_size)
    for places in source.batches(at.offset, batch_size):
        size = len(places)
        if size not in parts_of_size:
            options = execution.mode, execution.micro_batch, least
            part = shares(size, execution.num_slots, workers, rank, *options, even=even, in_turn=in_turn)
            part = apart(part, *among) if among[0] > 1 else part
            voters = everyone or contributors(size, execution.num_slots, workers, execution.mode, least)
            parts_of_size[size] = part, voters
        slices, voters = parts_of_size[size]
        plan = StepPlan(
            offset=places.start,
            size=size,
            slices=slices,
            contributors=voters,
            workers=everyone or workers,
            checksum=source.checksum(places),
            length=length,
            turns=source.turns,
        )
        for turn in range(at.turn if places.start == at.offset else 0, source.turns):
            yield replace(plan, turn=turn) if turn else plan


def global_batches(source: StepSource, size: int) -> int | None:
    """How many global batches of ``size`` samples a whole pass has; None: unknown."""
    return sum(1 for _ in source.batches(0, size)) if source.length(0, size) else None


def plan_rounds(
    source: StepSource,
    batch_size: int,
    at: Position,
    execution: ExecutionSettings,
    sync: SyncPlan,
    workers: int,
    rank: int,
    least: int = 1,
    most_steps: int | None = None,
    first_seat: tuple[int, int] | None = None,
) -> Iterator[StepPlan]:
    """The rounds of a pass from ``at`` on, as worker ``rank`` of ``workers`` takes them with its learners.

    A round is ``sync.every`` global batches, or the rest of the pass. The run's last round ends after ``most_steps``.
    For the other arguments see ``plan_steps``.

    Args:
        first_seat: How many workers share the learners of the first round, and which of them this worker is. Set if
            other workers have begun that round before a loss.
    """
    length = source.length(at.offset, batch_size)
    seat = first_seat or (workers, rank)
    batches, left = source.batches(at.offset, batch_size), most_steps
    while places := list(islice(batches, min(sync.every, left or sync.every))):
        left = None if left is None else left - len(places)
        sizes = [len(batch) for batch in places]
        carried, seat = sync.carried(*seat), (workers, rank)
        slices = slices_of_round(
            sizes, execution.num_slots, sync.learners, carried, execution.mode, execution.micro_batch, least
        )
        yield StepPlan(
            offset=places[0].start,
            size=sum(sizes),
            slices=slices,
            contributors=workers,
            workers=workers,
            checksum=sum(map(source.checksum, places)) % PRIME,
            length=length,
            steps=len(places),
            places_of=partial(_places_of, places[0].start, sizes, execution, sync.learners, least),
            checksum_of=source.checksum,
        )


def _places_of(
    start: int, sizes: Sequence[int], execution: ExecutionSettings, learners: int, least: int, learner: int
) -> list[range]:
    places = places_of_learner(sizes, execution.num_slots, learners, learner, execution.mode, least)
    return [range(start + samples.start, start + samples.stop) for samples in places]


class Batches(Iterator[Any]):
    """The batches of one pass, as the program's loop draws them: the loop may be left, and begun once.

    Its length is the number of global batches in the epoch, whatever the number of slots and workers: the plain
    loader's length.
    """

    def __init__(self, batches: Generator[Any, None, None], count: Callable[[], int | None]) -> None:
        """``count`` returns the number of global batches; None: it is not known, as of a stream."""
        self._batches, self._count = batches, count

    def __next__(self) -> Any:
        return next(self._batches)

    def close(self) -> None:
        """Leave the loop, as a ``break`` does."""
        self._batches.close()

    def __len__(self) -> int:
        count = self._count()
        if count is None:
            raise TypeError("the length of a stream is not known: end its loop by --max-steps or session.stop")
        return count
