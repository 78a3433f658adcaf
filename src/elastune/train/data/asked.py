"""What a program asks a pass to go through: a data set with options, or a ``DataLoader`` that brings its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from elastune.core.errors import UserError
from elastune.train.data.drawing import Drawn, drawn
from elastune.train.data.loading import Loading, check_dataset
from elastune.train.data.source import MapStyleSource


@dataclass(frozen=True)
class Asked:
    """A pass over ``dataset`` in global batches of ``batch_size``: shuffled, in order, or as ``sampler`` draws it.

    ``turns``: steps with each batch.
    """

    dataset: Any
    batch_size: int
    shuffle: bool
    sampler: Iterable[int] | None
    drop_last: bool
    loading: Loading
    turns: int = 1

    def source(self, seed: int) -> Callable[[int], MapStyleSource]:
        """What an epoch's training pass goes through, by the epoch's number."""

        def of_epoch(epoch: int) -> MapStyleSource:
            how = {"shuffle": self.shuffle, "drop_last": self.drop_last}
            return MapStyleSource(
                self.dataset, seed, epoch, **how, loading=self.loading, sampler=self.sampler, turns=self.turns
            )

        return of_epoch

    def to_evaluate(self, seed: int) -> Any:
        """The data set of an evaluation, in order: all of it, or what ``sampler`` draws."""
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
) -> Asked:
    """Options of ``session.batches``, checked; None: not given. Raises ``UserError``."""
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
        return _of_loader(data)
    check_dataset(data, batch_size)
    if sampler is not None and shuffle is not None:
        raise UserError("a sampler decides the order", f"shuffle={shuffle}, too", "leave shuffle out")
    if sampler is not None and (isinstance(sampler, BatchSampler) or not hasattr(sampler, "__iter__")):
        fix = "give torch's Sampler, or any iterable of indices, and batch_size beside it"
        raise UserError("a sampler gives one index after another", type(sampler).__name__, fix)
    assert batch_size is not None  # checked above
    loading = Loading(collate_fn, loader_workers or 0, bool(pin_memory), prefetch_factor)
    return Asked(data, batch_size, shuffle is not False, sampler, bool(drop_last), loading)


def _of_loader(loader: DataLoader[Any]) -> Asked:
    """What ``loader`` would have given one process, except that its batches are the global ones."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        got = "batch_size=None" if batches is None else type(batches).__name__
        fix = "give DataLoader a batch_size and a sampler, so that elastune can cut batches into the workers' parts"
        check_dataset(loader.dataset, 1)  # a stream has no batches to cut either, and its own words
        raise UserError("a DataLoader's batches must be so many samples each", got, fix)
    check_dataset(loader.dataset, batches.batch_size)
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
    shuffle, sampler = _order_of(batches.sampler)
    return Asked(loader.dataset, batches.batch_size, shuffle, sampler, batches.drop_last, loading)


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
