"""A pass in the batches that a batch sampler draws: of its own sizes, such as sentences of like length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import accumulate, islice
from typing import Any

from elastune.core.errors import UserError
from elastune.train.data.drawing import MOST_DRAWN, own_generator, sampler_stream
from elastune.train.data.loading import Loading
from elastune.train.data.source import MapStyleSource
from elastune.train.rng import seed_everything, streams_kept


def drawn_batches(batches: Iterable[Iterable[Any]], length: int, seed: int, epoch: int) -> list[list[Any]]:
    """What ``batches`` gives for ``epoch``, as ``drawing.drawn`` draws indices; so with its ``sampler``, if it has one.

    Raises:
        UserError: For none, for an empty one, and for too many.
    """
    inner, name, most = getattr(batches, "sampler", None), type(batches).__name__, MOST_DRAWN * length
    stream = sampler_stream(batches, seed, epoch, inner)
    with ExitStack() as kept:
        kept.enter_context(streams_kept())
        for each in (batches, inner):
            kept.enter_context(own_generator(each, stream))
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(epoch)
        seed_everything(stream)
        found = [list(batch) for batch in islice(iter(batches), most + 1)]
    if not found or not all(found):
        raise UserError("a batch sampler must draw samples", f"none of {name}", "see what it was made from")
    if len(found) > most:
        raise UserError("a batch sampler must come to an end", f"over {most} batches of {name}", "give it an end")
    return found


def typical_size(batches: Iterable[Iterable[Any]], length: int, seed: int) -> int:
    """How many samples a batch has: what it says itself, or the mean of the first epoch."""
    told = getattr(batches, "batch_size", None)
    if isinstance(told, int) and told > 0:
        return told
    found = drawn_batches(batches, length, seed, 0)
    return max(1, round(sum(map(len, found)) / len(found)))


class BatchedSource(MapStyleSource):
    """A ``StepSource`` whose global batches are those of a batch sampler. ``size``: see ``typical_size``."""

    def __init__(
        self, dataset: Any, seed: int, epoch: int, *, sampler: Any, size: int, loading: Loading, turns: int = 1
    ) -> None:
        found = drawn_batches(sampler, len(dataset), seed, epoch)
        self._stops = list(accumulate(map(len, found)))
        self._size = size
        order = [index for batch in found for index in batch]
        super().__init__(
            dataset, seed, epoch, shuffle=False, drop_last=False, loading=loading, sampler=order, turns=turns
        )

    def batches(self, offset: int, size: int) -> Iterator[range]:
        """Those that are left behind ``offset``. Raises ``UserError`` where ``size`` was changed."""
        if size != self._size:
            fix = "give the DataLoader a sampler and a batch_size, or leave out what changes it"
            raise UserError("batches of a batch sampler have its own sizes", f"batches of {size} are asked for", fix)
        start = offset
        for stop in self._stops:
            if stop > offset:
                yield range(start, stop)
                start = stop
