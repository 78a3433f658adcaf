"""What a training pass goes through, and how it is cut into steps: from a position to the next global batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastune.core.batch_slices import BatchSlice, contributors, shares
from elastune.core.run import Means, Position
from elastune.core.seeds import derive
from elastune.train.control import checksum
from elastune.train.data.loading import Loading, fetch
from elastune.train.rng import epoch_order

PROBED = 2  # samples


class StepSource(Protocol):
    """The samples of one training pass, in the order in which it visits them.

    A sample is named by its place in the pass, counted from 0. Every worker has a source of its own, equal to the
    others'; it knows nothing of workers. A stream is a source without an end.
    """

    def batches(self, offset: int, size: int) -> Iterator[range]:
        """The places of the next global batches of ``size`` samples, from place ``offset`` on."""
        ...

    def length(self, offset: int, size: int) -> int:
        """How many places the pass uses if it goes on at ``offset`` in batches of ``size``; 0: nobody knows."""
        ...

    def checksum(self, places: range) -> int:
        """A number below ``control.PRIME`` that tells apart which samples are at ``places``; adds up over parts."""
        ...

    def fetch(self, parts: Iterator[range]) -> Iterator[Any]:
        """The collated samples of each of ``parts``, in order."""
        ...

    def probe(self) -> range:
        """The places of a few samples that every worker can read, again and again; none of a stream."""
        ...


class MapStyleSource:
    """A pass over a map-style dataset. The order is a pure function of seed and epoch."""

    def __init__(
        self, dataset: Any, seed: int, epoch: int, *, shuffle: bool, drop_last: bool, loading: Loading
    ) -> None:
        count = len(dataset)
        self._order = epoch_order(count, seed, epoch) if shuffle else torch.arange(count)
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

    def checksum(self, places: range) -> int:
        return checksum(self._order[places.start : places.stop])

    def fetch(self, parts: Iterator[range]) -> Iterator[Any]:
        indices = (self._order[part.start : part.stop].tolist() for part in parts)
        return fetch(self._dataset, indices, self._loading, self._seed, self._epoch)

    def probe(self) -> range:
        count = min(PROBED, len(self._order))
        start = derive(self._seed, "probe", self._epoch) % (len(self._order) - count + 1)
        return range(start, start + count)


@dataclass(frozen=True)
class StepPlan:
    """One global batch as one worker takes it.

    Attributes:
        offset: The place of its first sample in the pass.
        size: Its samples.
        slices: This worker's part.
        contributors: How many workers add their control vector to the step.
        workers: How many workers there are.
        checksum: ``StepSource.checksum`` of all of it.
        length: How many samples the pass will use; 0: nobody knows.
    """

    offset: int
    size: int
    slices: list[BatchSlice]
    contributors: int
    workers: int
    checksum: int
    length: int

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
) -> Iterator[StepPlan]:
    """The steps of a pass from ``at`` on, as worker ``rank`` of ``workers`` takes them, each a part of the batch.

    Args:
        least: Samples that a forward pass must have, where the batch has as many.
        even: All workers make as many passes. ``in_turn``: they have slots that are dealt out in turn.
        everyone: How many workers there are where all of them contribute to every step, with samples or without.
    """
    known: dict[int, tuple[list[BatchSlice], int]] = {}
    length = source.length(at.offset, batch_size)
    for places in source.batches(at.offset, batch_size):
        size = len(places)
        if size not in known:
            options = means.mode, means.micro_batch, least
            own = shares(size, means.num_slots, workers, rank, *options, even=even, in_turn=in_turn)
            voters = everyone or contributors(size, means.num_slots, workers, means.mode, least)
            known[size] = own, voters
        slices, voters = known[size]
        yield StepPlan(
            offset=places.start,
            size=size,
            slices=slices,
            contributors=voters,
            workers=everyone or workers,
            checksum=source.checksum(places),
            length=length,
        )
