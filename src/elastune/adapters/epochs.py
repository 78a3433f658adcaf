"""Parts that all adapters share: data loaders, epochs of a loop without a session, and evaluation on all workers.

A script with its own loop repeats its earlier epochs after a restart: they are skipped here. Scripts that gather the
results of each batch get equally many batches on every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler

from elastune.core.errors import UserError
from elastune.parallel.comm.norms import exact_sum
from elastune.train.data.loading import drawn
from elastune.train.program.load import at_end, end_program
from elastune.train.rng import streams_kept
from elastune.train.session import Session


class Loader:
    """A ``DataLoader`` whose passes yield the batches of ``batches(loader)``; all else is as in the script's loader."""

    def __init__(self, batches: Callable[[DataLoader[Any]], Iterator[Any]], loader: DataLoader[Any]) -> None:
        self._batches = batches
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a copy of ``loader`` with other options."""
    has_workers = loader.num_workers > 0
    options = {
        "dataset": loader.dataset,
        "batch_size": loader.batch_size,
        "sampler": loader.sampler,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "drop_last": loader.drop_last,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context if has_workers else None,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor if has_workers else None,
        "persistent_workers": has_workers and loader.persistent_workers,
    }
    return DataLoader(**{**options, **changes})


class SessionEpochs:
    """The training passes of a program with a loop over epochs of its own; each is an epoch of ``session``.

    A program that starts again in mid-run (in a resumed run, or on a worker that joined) runs its loop from the start.
    The passes that are done by then give no batches, and what the program does after them has no effect.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._started_epochs = 0
        self._trains = False
        self._epochs: Iterator[int] = iter(())
        at_end(self._end)

    @property
    def again(self) -> bool:
        """Whether the program repeats what was done before it started again."""
        return not self._trains and self._session.epoch > 0

    def train(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield this worker's batches of the next training pass."""
        self._started_epochs += 1
        if not self._trains and self._started_epochs <= self._session.epoch:
            return
        epoch = next(self._epochs, None)
        if epoch is None:  # only the program knows how many epochs follow
            self._epochs = self._session.epochs(self._started_epochs)
            epoch = next(self._epochs, None)
        if self._started_epochs <= self._session.epoch:  # this worker has just joined; the others are further
            self._epochs = self._epochs if epoch is None else chain([epoch], self._epochs)
            return
        if epoch is None:
            end_program()
        self._trains = True
        yield from self._session.batches(loader)

    def _end(self) -> None:
        """End the newest epoch: write its checkpoint, and stop if a stop was requested."""
        next(self._epochs, None)


class Scheduler:
    """A scheduler that does not step while the script repeats earlier passes."""

    def __init__(self, passes: SessionEpochs, scheduler: Any) -> None:
        self._passes = passes
        self._scheduler = scheduler

    def step(self, *args: Any, **options: Any) -> None:
        if not self._passes.again:
            self._scheduler.step(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def first_batch(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield one batch in place of an evaluation that was done before; random streams stay as they were."""
    with streams_kept():
        batches = list(islice(loader, 1))
    yield from batches


WHOLE = SequentialSampler, RandomSampler, DistributedSampler


class Evaluation:
    """One evaluation pass in which all workers have the same number of batches, so that they can gather the results."""

    def __init__(self, session: Session, loader: DataLoader[Any]) -> None:
        self._session = session
        self._loader = loader
        self._place, self._samples = -1, 0

    def __iter__(self) -> Iterator[Any]:
        loader, size = self._loader, self._loader.batch_size
        if size is None or not hasattr(loader.dataset, "__len__"):
            rule, fix = "a pass that is gathered has batches of one size", "give its DataLoader a batch_size"
            raise UserError(rule, "a stream" if size is not None else "batches of the loader's own", fix)
        length, sampler = len(loader.dataset), loader.sampler
        places = list(range(length))
        if not isinstance(sampler, WHOLE):  # drawn as the session draws it: alike on all workers
            places = sorted(drawn(sampler, length, self._session.seed, -1).tolist())
        numbered = _Numbered(loader.dataset, places, size, self._session.size)
        collate = _Collate(loader.collate_fn, len(places))
        padded = rebuilt(loader, dataset=numbered, sampler=None, collate_fn=collate, drop_last=False)
        for place, samples, batch in self._session.batches(padded, train=False):
            self._place, self._samples = place, samples
            yield batch
        self._place, self._samples = -1, 0

    def gather(self, values: Any) -> Any:
        """Return ``values`` with the rows of all workers, as if one worker had evaluated their batches in order.

        Each sample counts once: a batch gives no more rows than it has samples.

        Args:
            values: A tensor, or lists and dicts of tensors, for the batch that this worker is at.

        Raises:
            UserError: For anything else.
        """
        if isinstance(values, torch.Tensor):
            return self._gather(values.detach())
        if isinstance(values, Mapping):
            return {name: self.gather(value) for name, value in values.items()}
        if isinstance(values, tuple) and hasattr(values, "_fields"):
            return type(values)(*map(self.gather, values))
        if isinstance(values, (list, tuple)):
            return type(values)(self.gather(value) for value in values)
        raise UserError("tensors are gathered, and lists and dicts of them", type(values).__name__, "make it a tensor")

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        place, workers = torch.tensor([self._place]), self._session.size
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor[: self._samples].contiguous()
        gatherings = self._session.gather("evaluated", rows), self._session.gather("places", place)
        gathered, places = (gathering.wait() for gathering in gatherings)
        if len(gathered.workers) < workers:
            self._session.sum(0.0)  # a lost worker took a part with it: all evaluate again
        parts = {int(place): rows for place, rows in zip(places.value, gathered.value, strict=True)}
        kept = [rows for place, rows in sorted(parts.items()) if place >= 0]
        return torch.cat(kept).to(tensor.device)


class DividedEvaluation:
    """Evaluation passes of which each worker reads its own batches; values are then reduced over all workers.

    A pass that cannot be divided into whole batches of all samples is read by each worker, and reduces nothing.

    Attributes:
        on: Whether the newest pass was divided.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.on = False

    def __deepcopy__(self, memo: Any) -> DividedEvaluation:
        """Return itself: Lightning copies the metrics that reduce by it."""
        return self

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield this worker's batches of one pass over ``loader``."""
        sized = loader.batch_size is not None and hasattr(loader.dataset, "__len__")
        whole = sized and not loader.drop_last and isinstance(loader.sampler, WHOLE)
        self.on = whole and len(loader) >= self._session.size > 1
        yield from self._session.batches(loader, train=False) if self.on else loader

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all workers, stacked, where the newest pass was divided; else ``tensor``."""
        if not self.on:
            return tensor
        workers, gathered = self._session.size, self._session.gather("reduced", tensor.detach()).wait()
        if len(gathered.workers) < workers:
            self._session.sum(0.0)  # a lost worker took a part with it: all evaluate again
        return torch.stack(gathered.value).to(tensor.device)

    def reduce(self, tensor: torch.Tensor, op: Any = "mean") -> torch.Tensor:
        """Return the sum, mean, maximum or minimum over all workers, where the newest pass was divided.

        Sums and means are rounded once, so they depend on no order.

        Raises:
            UserError: For another ``op``.
        """
        if not self.on:
            return tensor
        name = str(op).rpartition(".")[2].lower()
        rows = self.gather(tensor)
        if name in ("max", "min"):
            return rows.amax(0) if name == "max" else rows.amin(0)
        if name not in ("sum", "mean", "avg"):
            raise UserError("values of an evaluation are reduced by sum, mean, max or min", op, "use one of them")
        sums = [exact_sum(column) for column in rows.reshape(len(rows), -1).double().t().tolist()]
        divisor = 1 if name == "sum" else len(rows)
        dtype = tensor.dtype if divisor == 1 or tensor.is_floating_point() else torch.get_default_dtype()
        values = torch.tensor([value / divisor for value in sums], dtype=torch.float64)
        return values.to(dtype).reshape(tensor.shape).to(tensor.device)


class _Numbered(Dataset[Any]):
    """Samples with their places, padded with batches until all workers have equally many."""

    def __init__(self, dataset: Any, places: list[int], batch_size: int, workers: int) -> None:
        self._dataset, self._places, self._count = dataset, places, len(places)
        batches = -(-self._count // batch_size)
        if batches % workers:
            self._count = (batches + workers - batches % workers) * batch_size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> tuple[int, Any]:
        return at, self._dataset[self._places[min(at, len(self._places) - 1)]]


class _Collate:
    """A batch with the place of its first sample (-1 for a batch of padding alone) and the number of its samples."""

    def __init__(self, collate: Callable[[list[Any]], Any], length: int) -> None:
        self._collate, self._length = collate, length

    def __call__(self, numbered: list[tuple[int, Any]]) -> tuple[int, int, Any]:
        real = [sample for at, sample in numbered if at < self._length]
        if not real:
            return -1, 0, self._collate([numbered[0][1]])
        return numbered[0][0], len(real), self._collate(real)
