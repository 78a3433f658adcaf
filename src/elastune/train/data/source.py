"""What a training pass goes through, and how it is cut into steps: from a position to the next global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch

from elastune.core.batch_slices import BatchSlice, apart, contributors, places_of_learner, round_shares, shares
from elastune.core.run import Means, Position
from elastune.core.seeds import derive
from elastune.core.sync_plan import SyncPlan
from elastune.train.data.content import PRIME
from elastune.train.data.drawing import Drawn, drawn
from elastune.train.data.loading import Loading, fetch, fetch_whole, whole_batches
from elastune.train.rng import epoch_order

PROBED = 2  # samples


class StepSource(Protocol):
    """The samples of one training pass, in the order in which it visits them.

    A sample is named by its place in the pass, counted from 0. Every worker has a source of its own, equal to the
    others'; it knows nothing of workers. A stream is a source without an end.

    ``turns``: steps that are taken with each global batch.
    """

    turns: int

    def batches(self, offset: int, size: int) -> Iterator[range]:
        """The places of the next global batches of ``size`` samples, from place ``offset`` on."""
        ...

    def length(self, offset: int, size: int) -> int:
        """How many places the pass uses if it goes on at ``offset`` in batches of ``size``; 0: nobody knows."""
        ...

    def ends(self, place: int) -> bool:
        """Whether the pass is known to be over at ``place``, where ``length`` does not tell."""
        ...

    def checksum(self, places: range) -> int:
        """A number below ``PRIME`` that tells apart which samples are at ``places``; adds up over parts."""
        ...

    def fetch(self, parts: Iterator[range]) -> Iterator[Any]:
        """The collated samples of each of ``parts``, in order."""
        ...

    def probe(self) -> range:
        """The places of a few samples that every worker can read, again and again; none of a stream."""
        ...


class MapStyleSource:
    """A pass over a map-style dataset. The order is a pure function of seed and epoch, or drawn by ``sampler``."""

    def __init__(
        self,
        dataset: Any,
        seed: int,
        epoch: int,
        *,
        shuffle: bool,
        drop_last: bool,
        loading: Loading,
        sampler: Iterable[int] | None = None,
        turns: int = 1,
    ) -> None:
        self.turns = turns
        count = len(dataset)
        self._drawn = sampler is not None
        if sampler is not None:
            self._order = drawn(sampler, count, seed, epoch)
        else:
            self._order = epoch_order(count, seed, epoch) if shuffle else torch.arange(count)
        self._sums: np.ndarray[Any, np.dtype[np.int64]] | None = None  # of the first so many of it
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

    def fetch(self, parts: Iterator[range]) -> Iterator[Any]:
        if whole_batches(self._dataset, self._loading):
            return fetch_whole(self._dataset, (self._order[part.start : part.stop] for part in parts))
        if self._drawn:
            # By their places: a sample that was drawn twice is augmented twice.
            dataset, indices = Drawn(self._dataset, self._order), (list(part) for part in parts)
            return fetch(dataset, indices, self._loading, self._seed, self._epoch)
        indices = (self._order[part.start : part.stop].tolist() for part in parts)
        return fetch(self._dataset, indices, self._loading, self._seed, self._epoch)

    def probe(self) -> range:
        count = min(PROBED, len(self._order))
        start = derive(self._seed, "probe", self._epoch) % (len(self._order) - count + 1)
        return range(start, start + count)


@dataclass(frozen=True)
class StepPlan:
    """One global batch, or one round of several, as one worker takes it.

    Attributes:
        offset: The place of its first sample in the pass.
        size: Its samples.
        steps: Its global batches.
        left_out: Learners that the round ended without, and the places of their samples.
        places_of: The places of one learner's samples, in order.
        checksum_of: ``StepSource.checksum`` of some of its places.
        slices: This worker's part.
        contributors: How many workers add their control vector to the step.
        workers: How many workers there are.
        checksum: ``StepSource.checksum`` of all of it.
        length: How many samples the pass will use; 0: nobody knows.
        turns: Steps that are taken with this global batch, and ``turn``: which of them this is, from 0.
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
        """The same round, which has ended without these ``learners``."""
        return replace(self, left_out={learner: self.places_of(learner) for learner in learners})

    @property
    def moves(self) -> int:
        """By how many samples the pass comes further with it."""
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
        """What all workers take alike: offset, size, length and checksum."""
        return self.offset, self.size, self.length, self.checksum

    @property
    def own_parts(self) -> list[range]:
        """The places of this worker's slices, in order."""
        return [range(self.offset + p.samples.start, self.offset + p.samples.stop) for p in self.slices]


def plan_steps(
    source: StepSource,
    batch_size: int,
    at: Position,
    means: Means,
    workers: int,
    rank: int,
    least: int = 1,
    everyone: int | None = None,
    *,
    even: bool = False,
    in_turn: bool = False,
    among: tuple[int, int] = (1, 0),
) -> Iterator[StepPlan]:
    """The steps of a pass from ``at`` on, as worker ``rank`` of ``workers`` takes them, each a part of the batch.

    Args:
        least: Samples that a forward pass must have, where the batch has as many.
        even: All workers make as many passes. ``in_turn``: they have slots that are dealt out in turn.
        among: How many workers share out these passes among them, and which of them this one is.
        everyone: How many workers there are where all of them contribute to every step, with samples or without.
    """
    known: dict[int, tuple[list[BatchSlice], int]] = {}
    length = source.length(at.offset, batch_size)
    for places in source.batches(at.offset, batch_size):
        size = len(places)
        if size not in known:
            options = means.mode, means.micro_batch, least
            own = shares(size, means.num_slots, workers, rank, *options, even=even, in_turn=in_turn)
            own = apart(own, *among) if among[0] > 1 else own
            voters = everyone or contributors(size, means.num_slots, workers, means.mode, least)
            known[size] = own, voters
        slices, voters = known[size]
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


def plan_rounds(
    source: StepSource,
    batch_size: int,
    at: Position,
    means: Means,
    sync: SyncPlan,
    workers: int,
    rank: int,
    least: int = 1,
    most_steps: int | None = None,
    first_seat: tuple[int, int] | None = None,
) -> Iterator[StepPlan]:
    """The rounds of a pass from ``at`` on, as worker ``rank`` of ``workers`` takes them with its learners.

    A round is ``sync.every`` global batches, or what is left of the pass; and one ends after ``most_steps``, where they
    end the run. Other arguments as for ``plan_steps``.

    Args:
        first_seat: How many workers the learners of the first round were dealt out to, and which of them this one is,
            where others have begun it before some were lost.
    """
    length = source.length(at.offset, batch_size)
    seat = first_seat or (workers, rank)
    batches, left = source.batches(at.offset, batch_size), most_steps
    while places := list(islice(batches, min(sync.every, left or sync.every))):
        left = None if left is None else left - len(places)
        sizes = [len(batch) for batch in places]
        carried, seat = sync.carried(*seat), (workers, rank)
        slices = round_shares(sizes, means.num_slots, sync.learners, carried, means.mode, means.micro_batch, least)
        yield StepPlan(
            offset=places[0].start,
            size=sum(sizes),
            slices=slices,
            contributors=workers,
            workers=workers,
            checksum=sum(map(source.checksum, places)) % PRIME,
            length=length,
            steps=len(places),
            places_of=partial(_places_of, places[0].start, sizes, means, sync.learners, least),
            checksum_of=source.checksum,
        )


def _places_of(start: int, sizes: Sequence[int], means: Means, learners: int, least: int, learner: int) -> list[range]:
    own = places_of_learner(sizes, means.num_slots, learners, learner, means.mode, least)
    return [range(start + samples.start, start + samples.stop) for samples in own]
