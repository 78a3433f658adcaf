"""Reading samples: the order that a sampler draws for an epoch, and collated batches on a device.

A sampler draws once an epoch from random streams that follow from the run's seed, so all workers draw the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from elastune.core.errors import UserError
from elastune.core.run import derive
from elastune.train.rng import SeededSamples, seed_everything, streams_kept

MOST_DRAWN = 1000  # times the data set: a sampler that draws more is taken for endless
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
"""Dtypes that ``index_select`` supports."""


@dataclass(frozen=True)
class LoaderOptions:
    """How samples are loaded: torch's DataLoader options. ``kept``: the processes of earlier passes."""

    collate_fn: Callable[[list[Any]], Any] | None = None
    loader_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    timeout_s: float = 0.0
    worker_init_fn: Callable[[int], None] | None = None
    context: Any = None
    kept: KeptProcesses | None = field(default=None, compare=False)


def check_dataset(dataset: Any, batch_size: Any) -> None:
    """Raise ``UserError`` for data or a batch size that cannot be cut into slots."""
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
    """The indices of every ``workers``-th batch of a pass, in order. The batches do not depend on the workers."""
    for start in range(rank * batch_size, length, workers * batch_size):
        yield list(range(start, min(start + batch_size, length)))


def whole_batches(dataset: Any, loading: LoaderOptions) -> bool:
    """Whether batches can be indexed at once: nothing is random, and nothing is collated. It is ten times as fast."""
    return type(dataset) is TensorDataset and loading.collate_fn is None


def fetch_whole(dataset: TensorDataset, batches: Iterator[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The samples of each of ``batches``, int64 indices of shape (n,), for data with ``whole_batches``."""
    for indices in batches:
        yield [_rows(tensor, indices) for tensor in dataset.tensors]


def _rows(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """``tensor[indices]``. Plain indexing takes thirty times as long for rows of 512 numbers."""
    if tensor.dtype not in _SELECTED or not tensor.is_contiguous() or tensor.layout is not torch.strided:
        return tensor[indices]  # for any dtype; the layout in memory follows the tensor's
    return tensor.index_select(0, indices if tensor.device == indices.device else indices.to(tensor.device))


def fetch(dataset: Any, indices: Iterator[list[int]], loading: LoaderOptions, seed: int, epoch: int) -> Iterator[Any]:
    """The collated samples of each list of indices."""
    if whole_batches(dataset, loading):
        yield from fetch_whole(dataset, (torch.tensor(batch, dtype=torch.int64) for batch in indices))
        return
    if loading.kept is not None and not loading.kept.busy:
        yield from loading.kept.fetch(dataset, indices, loading, seed, epoch)
        return
    yield from DataLoader(SeededSamples(dataset, seed, epoch), batch_sampler=indices, **_options(loading))


def _options(loading: LoaderOptions) -> dict[str, Any]:
    """The options of torch's ``DataLoader`` for ``loading``."""
    return {
        "collate_fn": loading.collate_fn,
        "num_workers": loading.loader_workers,
        "pin_memory": loading.pin_memory,
        "prefetch_factor": loading.prefetch_factor if loading.loader_workers else None,
        "timeout": loading.timeout_s,
        "worker_init_fn": loading.worker_init_fn,
        "multiprocessing_context": loading.context if loading.loader_workers else None,
    }


# --- loading processes that stay from pass to pass ---


class KeptProcesses:
    """The loading processes of a program's ``DataLoader`` with ``persistent_workers=True``.

    They hold the data set as it was when they started, as torch's do. Order and epoch come with each batch of indices,
    so no pass gets those of an earlier one.

    Attributes:
        busy: Whether a pass loads from them.
    """

    def __init__(self) -> None:
        self.busy = False
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = None

    def fetch(
        self, dataset: Any, indices: Iterator[list[int]], loading: LoaderOptions, seed: int, epoch: int
    ) -> Iterator[Any]:
        """The collated samples of each list of indices."""
        order = dataset.order if isinstance(dataset, Drawn) else None
        self._requests.coming = ((epoch, each, each if order is None else order[each].tolist()) for each in indices)
        if self._loader is None:
            held = dataset.dataset if order is not None else dataset
            # A generator of its own: torch draws a number where processes start, which only some passes do.
            options: dict[str, Any] = {"persistent_workers": True, "generator": torch.Generator().manual_seed(seed)}
            self._loader = DataLoader(
                _SamplesOfEpochs(held, seed), batch_sampler=self._requests, **_options(loading), **options
            )
        self.busy = True
        try:
            yield from self._loader
        finally:
            self.busy = False


_Request = tuple[int, list[int], list[int]]  # an epoch, places in its pass, and the samples there
_KEPT: weakref.WeakKeyDictionary[DataLoader[Any], KeptProcesses] = weakref.WeakKeyDictionary()


def kept_processes(loader: DataLoader[Any]) -> KeptProcesses | None:
    """The processes that belong to a program's ``loader``; None where it wants none that stay."""
    if not loader.num_workers or not loader.persistent_workers:
        return None
    return _KEPT.setdefault(loader, KeptProcesses())


class _Requests:
    """Stands for a batch sampler: the requests of the present pass."""

    coming: Iterator[_Request] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.coming


class _SamplesOfEpochs(Dataset[Any]):
    """The samples of a data set in any epoch, as ``SeededSamples`` reads them."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._samples = _AtPlaces(dataset)
        self._seeded = SeededSamples(self._samples, seed, 0)

    def __getitems__(self, request: _Request) -> list[Any]:
        epoch, places, indices = request
        if epoch != self._seeded.epoch:
            self._seeded = SeededSamples(self._samples, self._seeded.seed, epoch)
        self._samples.index_of = dict(zip(places, indices, strict=True))
        return self._seeded.__getitems__(places)


class _AtPlaces(Dataset[Any]):
    """The samples of a data set by their places in a pass."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.index_of: dict[int, int] = {}

    def __getitem__(self, place: int) -> Any:
        return self._dataset[self.index_of[place]]


# --- batches on a device, and the order of samplers ---


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure of lists, tuples and mappings with every tensor on ``device``."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if type(batch) is list:  # the usual case: a check for abstract classes takes longer than all the rest
        return [to_device(value, device) for value in batch]
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return type(batch)(to_device(value, device) for value in batch)  # type: ignore[call-arg]
    return batch


def drawn(sampler: Iterable[int], length: int, seed: int, epoch: int) -> torch.Tensor:
    """The indices that ``sampler`` draws for ``epoch``: they follow from the arguments, if its only state is random.

    The ``generator`` of the sampler, or torch's, NumPy's and Python's global ones, are seeded by seed, epoch and the
    seed of the sampler's generator. Afterwards all are restored. ``set_epoch`` is called if the sampler has it.

    Returns:
        Indices of samples, shape (n,), int64.

    Raises:
        UserError: An index is not in a data set of ``length`` samples; or the sampler draws none, or too many.
    """
    stream = sampler_stream(sampler, seed, epoch)
    name, most = type(sampler).__name__, MOST_DRAWN * length
    with streams_kept(), own_generator(sampler, stream):
        seed_everything(stream)
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        indices = [_index(value, length, name) for value in islice(iter(sampler), most + 1)]
    if not indices:
        raise UserError("a sampler must draw samples", f"none of {name}", "see what it was made from")
    if len(indices) > most:
        raise UserError("a sampler must come to an end", f"over {most} indices of {name}", "give it num_samples")
    return torch.tensor(indices, dtype=torch.int64)


def _index(value: Any, length: int, name: str) -> int:
    whole = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point()
    try:
        index = int(value) if whole else value.__index__()
    except AttributeError:
        rule = "a sampler gives one index after another"
        raise UserError(rule, f"{type(value).__name__} of {name}", "see what it iterates over") from None
    if not 0 <= index < length:
        raise UserError(f"a sampler gives indices from 0 to {length - 1}", f"{index} of {name}", "see its data set")
    return int(index)


def sampler_stream(sampler: Any, seed: int, epoch: int, *others: Any) -> int:
    """The seed of the draws of ``sampler`` and ``others`` for ``epoch``, from the run's seed and their own seeds."""
    generators = [getattr(each, "generator", None) for each in (sampler, *others)]
    seeds = [each.initial_seed() for each in generators if isinstance(each, torch.Generator)]
    return derive(seed, "sampler", epoch, *(seeds or [0]))


@contextmanager
def own_generator(sampler: Any, seed: int) -> Iterator[None]:
    """Have ``sampler`` draw from a generator that begins at ``seed``, if it has a generator of its own."""
    if not hasattr(sampler, "generator"):
        yield
        return
    before, sampler.generator = sampler.generator, torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        sampler.generator = before


class Drawn(Dataset[Any]):
    """The samples of ``dataset`` in the ``order`` that was drawn.

    A sample drawn twice is augmented twice, by its place.
    """

    def __init__(self, dataset: Any, order: torch.Tensor) -> None:
        self.dataset = dataset
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> Any:
        return self.dataset[int(self.order[place])]
