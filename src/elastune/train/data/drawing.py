"""What a sampler draws for an epoch: once, from random streams that the run's seed decides, alike on all workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset

from elastune.core.errors import UserError
from elastune.core.seeds import derive
from elastune.train.rng import seed_everything, streams_kept

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
