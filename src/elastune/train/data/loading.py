"""Reading samples: the order that a sampler draws for an epoch, and collated batches on a device.

A sampler draws once an epoch from random streams that follow from the run's seed, so all workers draw the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from elastune.core.errors import UserError
from elastune.core.run import derive
from elastune.train.rng import SeededSamples, seed_everything, streams_kept

# [drawing] What a sampler draws for an epoch: once, from random streams that the run's seed decides, alike on all workers.

MOST_DRAWN = 1000  # times the data set: beyond, a sampler is taken for one that never ends


class Drawn(Dataset[Any]):
    """The samples of ``dataset`` in the ``order`` that was drawn: one drawn twice is augmented twice, by its place."""

    def __init__(self, dataset: Any, order: torch.Tensor) -> None:
        self.dataset = dataset
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> Any:
        return self.dataset[int(self.order[place])]


def drawn(sampler: Iterable[int], length: int, seed: int, epoch: int) -> torch.Tensor:
    """The indices that ``sampler`` gives for ``epoch``: a function of the arguments, if its only state is random.

    Its ``generator``, or else torch's, NumPy's and Python's global ones, stand as seed, epoch and the seed of its own
    generator say; afterwards all stand as before. ``set_epoch`` is called where it has one.

    Returns:
        Indices of samples, shape (n,), int64.

    Raises:
        UserError: For indices that are none of a data set of ``length`` samples, for none, and for too many.
    """
    stream = sampler_stream(sampler, seed, epoch)
    name, most = type(sampler).__name__, MOST_DRAWN * length
    with streams_kept(), own_generator(sampler, stream):
        seed_everything(stream)
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        found = [_index(given, length, name) for given in islice(iter(sampler), most + 1)]
    if not found:
        raise UserError("a sampler must draw samples", f"none of {name}", "see what it was made from")
    if len(found) > most:
        raise UserError("a sampler must come to an end", f"over {most} indices of {name}", "give it num_samples")
    return torch.tensor(found, dtype=torch.int64)


def _index(given: Any, length: int, name: str) -> int:
    whole = isinstance(given, torch.Tensor) and given.numel() == 1 and not given.is_floating_point()
    try:
        index = int(given) if whole else given.__index__()
    except AttributeError:
        rule = "a sampler gives one index after another"
        raise UserError(rule, f"{type(given).__name__} of {name}", "see what it iterates over") from None
    if not 0 <= index < length:
        raise UserError(f"a sampler gives indices from 0 to {length - 1}", f"{index} of {name}", "see its data set")
    return int(index)


def sampler_stream(sampler: Any, seed: int, epoch: int, *others: Any) -> int:
    """The seed of what ``sampler``, with ``others`` that it asks, draws for ``epoch``: of the run's and its own."""
    own = [getattr(each, "generator", None) for each in (sampler, *others)]
    seeds = [each.initial_seed() for each in own if isinstance(each, torch.Generator)]
    return derive(seed, "sampler", epoch, *(seeds or [0]))


@contextmanager
def own_generator(sampler: Any, seed: int) -> Iterator[None]:
    """Where ``sampler`` has a generator of its own it draws from one that begins at ``seed``."""
    if not hasattr(sampler, "generator"):
        yield
        return
    before, sampler.generator = sampler.generator, torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        sampler.generator = before


# [loading] From a map-style dataset to collated batches on a device.


@dataclass(frozen=True)
class LoaderOptions:
    """How samples are fetched: torch's DataLoader options."""

    collate_fn: Callable[[list[Any]], Any] | None = None
    loader_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    timeout_s: float = 0.0
    worker_init_fn: Callable[[int], None] | None = None
    context: Any = None


def check_dataset(dataset: Any, batch_size: Any) -> None:
    """Refuse what cannot be cut into slots."""
    streams = isinstance(dataset, IterableDataset)
    if not streams and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            "a dataset has __len__ and __getitem__, or is torch's IterableDataset",
            type(dataset).__name__,
            "derive the stream from torch.utils.data.IterableDataset",
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UserError("batch_size must be a whole number of at least 1", batch_size, "set config batch_size")
    if not streams and len(dataset) == 0:
        raise UserError("a dataset must hold samples", "0 samples", "check how it was split")


def evaluation_indices(length: int, batch_size: int, workers: int, rank: int) -> Iterator[list[int]]:
    """Every ``workers``-th batch of a pass in order: how samples fall into batches does not depend on the workers."""
    for start in range(rank * batch_size, length, workers * batch_size):
        yield list(range(start, min(start + batch_size, length)))


def whole_batches(dataset: Any, loading: LoaderOptions) -> bool:
    """Whether there is nothing random and nothing to collate: indexing batches is ten times as fast as samples."""
    return type(dataset) is TensorDataset and loading.collate_fn is None


def fetch_whole(dataset: TensorDataset, batches: Iterator[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The samples of each of ``batches``, int64 indices of shape (n,), where ``whole_batches`` says so."""
    for indices in batches:
        yield [_rows(tensor, indices) for tensor in dataset.tensors]


_SELECTED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
)
"""Dtypes that ``index_select`` knows."""


def _rows(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """``tensor[indices]``, which takes thirty times as long for rows of 512 numbers."""
    if tensor.dtype not in _SELECTED or not tensor.is_contiguous() or tensor.layout is not torch.strided:
        return tensor[indices]  # of any dtype, and its layout in memory follows the tensor's
    return tensor.index_select(0, indices if tensor.device == indices.device else indices.to(tensor.device))


def fetch(dataset: Any, indices: Iterator[list[int]], loading: LoaderOptions, seed: int, epoch: int) -> Iterator[Any]:
    """The collated samples of each list of indices."""
    if whole_batches(dataset, loading):
        yield from fetch_whole(dataset, (torch.tensor(batch, dtype=torch.int64) for batch in indices))
        return
    loader: DataLoader[Any] = DataLoader(
        SeededSamples(dataset, seed, epoch),
        batch_sampler=indices,
        collate_fn=loading.collate_fn,
        num_workers=loading.loader_workers,
        pin_memory=loading.pin_memory,
        prefetch_factor=loading.prefetch_factor if loading.loader_workers else None,
        timeout=loading.timeout_s,
        worker_init_fn=loading.worker_init_fn,
        multiprocessing_context=loading.context if loading.loader_workers else None,
    )
    yield from loader


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure of lists, tuples and mappings with every tensor on ``device``."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if type(batch) is list:  # what most collate: to ask for abstract classes takes longer than all else here
        return [to_device(value, device) for value in batch]
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return type(batch)(to_device(value, device) for value in batch)  # type: ignore[call-arg]
    return batch
