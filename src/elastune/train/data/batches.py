"""The batches of one pass, as the program's loop draws them: an iterator with the number of global batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any


class Batches(Iterator[Any]):
    """The batches of one pass; a loop over it may be left, and begun once.

    Its length is the number of global batches in the epoch, whatever the number of slots and workers: the plain
    loader's length.
    """

    def __init__(self, batches: Generator[Any, None, None], count: Callable[[], int | None]) -> None:
        """``count`` returns the number of global batches; None: it is not known, as of a stream."""
        self._batches, self._count = batches, count

    def __next__(self) -> Any:
        return next(self._batches)

    def close(self) -> None:
        """Leave the loop, as a ``break`` does."""
        self._batches.close()

    def __len__(self) -> int:
        count = self._count()
        if count is None:
            raise TypeError("the length of a stream is not known: end its loop by --max-steps or session.stop")
        return count
