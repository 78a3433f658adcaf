"""A ``DataLoader`` for a script to go on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


class Loader:
    """A ``DataLoader`` for a script to go on with; ``batches`` gives the batches of a pass over it."""

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
    }
    return DataLoader(**{**options, **changes})
