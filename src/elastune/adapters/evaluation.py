"""An evaluation pass for loops that gather the results of each batch: all workers have the same number of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, SequentialSampler

from elastune.adapters.loaders import rebuilt
from elastune.core.errors import UserError
from elastune.train.data.drawing import drawn
from elastune.train.session import Session

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

    def gather(self, given: Any) -> Any:
        """Return ``given`` with the rows of all workers, as if one worker had evaluated their batches in order.

        Each sample counts once: a batch gives no more rows than it has samples.

        Args:
            given: A tensor, or lists and dicts of tensors, for the batch that this worker is at.

        Raises:
            UserError: For anything else.
        """
        if isinstance(given, torch.Tensor):
            return self._gather(given.detach())
        if isinstance(given, Mapping):
            return {name: self.gather(each) for name, each in given.items()}
        if isinstance(given, tuple) and hasattr(given, "_fields"):
            return type(given)(*map(self.gather, given))
        if isinstance(given, (list, tuple)):
            return type(given)(self.gather(each) for each in given)
        raise UserError("tensors are gathered, and lists and dicts of them", type(given).__name__, "make it a tensor")

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        place, workers = torch.tensor([self._place]), self._session.size
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor[: self._samples].contiguous()
        begun = self._session.gather("evaluated", rows), self._session.gather("places", place)
        found, places = (each.wait() for each in begun)
        if len(found.workers) < workers:
            self._session.sum(0.0)  # who was lost took a part with it: all evaluate again
        parts = {int(place): rows for place, rows in zip(places.value, found.value, strict=True)}
        kept = [rows for place, rows in sorted(parts.items()) if place >= 0]
        return torch.cat(kept).to(tensor.device)


class _Numbered(Dataset[Any]):
    """Samples with their places; behind the last one as many more batches as workers lack for equal numbers."""

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
    """A batch with the place of its first sample (-1 for one that only fills up) and the number of its samples."""

    def __init__(self, collate: Callable[[list[Any]], Any], length: int) -> None:
        self._collate, self._length = collate, length

    def __call__(self, numbered: list[tuple[int, Any]]) -> tuple[int, int, Any]:
        real = [sample for at, sample in numbered if at < self._length]
        if not real:
            return -1, 0, self._collate([numbered[0][1]])
        return numbered[0][0], len(real), self._collate(real)
