"""What a program asks a pass to go through: a data set with options, or a ``DataLoader`` that brings its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
from elastune.train.data.batched import BatchedSource, drawn_batches, typical_size
from elastune.train.data.drawing import Drawn, drawn
from elastune.train.data.loading import Loading, check_dataset
from elastune.train.data.source import MapStyleSource, StepSource
from elastune.train.data.stream import StreamSource


@dataclass(frozen=True)
class Asked:
    """A pass over ``dataset`` in global batches of ``batch_size``: shuffled, in order, or as ``sampler`` draws it.

    ``batch_sampler``: draws whole batches instead, of about ``batch_size``. ``turns``: steps with each batch.
    """

    dataset: Any
    batch_size: int
    shuffle: bool
    sampler: Iterable[int] | None
    drop_last: bool
    loading: Loading
    turns: int = 1
    batch_sampler: Any = None

    @property
    def streams(self) -> bool:
        """Whether samples come one after another, and nobody knows how many."""
        return isinstance(self.dataset, IterableDataset)

    def source(self, seed: int) -> Callable[[int], StepSource]:
        """What an epoch's training pass goes through, by the epoch's number."""

        def of_epoch(epoch: int) -> StepSource:
            if self.streams:
                last, loading = self.drop_last, self.loading
                return StreamSource(self.dataset, seed, epoch, drop_last=last, loading=loading, turns=self.turns)
            if self.batch_sampler is not None:
                own, size = self.batch_sampler, self.batch_size
                return BatchedSource(
                    self.dataset, seed, epoch, sampler=own, size=size, loading=self.loading, turns=self.turns
                )
            how = {"shuffle": self.shuffle, "drop_last": self.drop_last}
            return MapStyleSource(
                self.dataset, seed, epoch, **how, loading=self.loading, sampler=self.sampler, turns=self.turns
            )

        return of_epoch

    def to_evaluate(self, seed: int) -> Any:
        """The data set of an evaluation, in order: all of it, or what ``sampler`` draws."""
        if self.batch_sampler is not None:
            found = drawn_batches(self.batch_sampler, len(self.dataset), seed, -1)
            return Drawn(self.dataset, torch.tensor([index for batch in found for index in batch]))
        if self.sampler is None:
            return self.dataset
        return Drawn(self.dataset, drawn(self.sampler, len(self.dataset), seed, -1))


def asked_of(
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
) -> Asked:
    """Options of ``session.batches``, checked; None: not given. ``seed``: the run's. Raises ``UserError``."""
    given = {
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
        if twice := [name for name, value in given.items() if value is not None]:
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
    loading = Loading(collate_fn, loader_workers or 0, bool(pin_memory), prefetch_factor)
    return Asked(data, batch_size, shuffle is not False, sampler, bool(drop_last), loading)


def _of_loader(loader: DataLoader[Any], seed: int) -> Asked:
    """What ``loader`` would have given one process, except that its batches are the global ones."""
    batches: Any = loader.batch_sampler
    if batches is None:
        fix = "give DataLoader a batch_size, so that elastune can cut batches into the workers' parts"
        raise UserError("a DataLoader's batches must be of several samples", "batch_size=None", fix)
    plain = type(batches) is BatchSampler
    check_dataset(loader.dataset, batches.batch_size if plain else 1)
    data: Any = loader.dataset
    size = batches.batch_size if plain else typical_size(batches, len(data), seed)
    collate: Any = loader.collate_fn
    loading = Loading(
        None if collate is default_collate else collate,
        loader.num_workers,
        loader.pin_memory,
        loader.prefetch_factor,
        timeout_s=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        context=loader.multiprocessing_context,
    )
    if not plain:
        return Asked(loader.dataset, size, False, None, False, loading, batch_sampler=batches)
    shuffle, sampler = (False, None) if isinstance(loader.dataset, IterableDataset) else _order_of(batches.sampler)
    return Asked(loader.dataset, size, shuffle, sampler, batches.drop_last, loading)


def _order_of(sampler: Any) -> tuple[bool, Iterable[int] | None]:
    """Whether samples are shuffled, and who draws them where that says not all of it.

    ``DistributedSampler`` deals samples out among processes, as elastune does itself: what is left of it is its order.
    """
    if isinstance(sampler, DistributedSampler):
        return sampler.shuffle, None
    if type(sampler) is SequentialSampler:
        return False, None
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return True, None if sampler.generator is None else sampler
    return True, sampler
